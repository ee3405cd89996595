"""The manifest of a checkpoint: encoding, verification and format version."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ps_protocol.errors import ConfigError
from ps_protocol.sealed import SEAL_BYTES, checksum_in, seal, unseal
from ps_server.checkpoint.files import CHECKED_BYTES, MANIFEST_NAME, open_below, read_below, storage_errors
from ps_server.checkpoint.record import Facts, ModelRecord
from ps_server.checkpoint.validation import check_models, whole_number

#: Increased when an older torch-ps could misread a checkpoint.
FORMAT = 3

MAX_MANIFEST_BYTES = 64 << 20
"""Some hundred thousand tensors. Reading one takes up to thirty times its size in memory."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """The contents of a checkpoint except its tensors."""

    #: Version of torch-ps that wrote it.
    program: str
    #: Unix time of the commit.
    committed_seconds: float
    #: Facts of the job from the caller: data positions, phase, mode.
    facts: Facts
    models: Mapping[str, ModelRecord]

    @property
    def step(self) -> int:
        """The highest version of its models, over their shards; 0 where no shard noted one."""
        return max((_version(facts) for model in self.models.values() for facts in model.facts), default=0)

    @property
    def size_bytes(self) -> int:
        """Bytes of its own files, without the manifest."""
        return sum(file.size_bytes for model in self.models.values() for file in model.files)

    def encode(self) -> bytes:
        """The bytes of the file; they carry their own checksum."""
        body = {
            "checked_bytes": CHECKED_BYTES,
            "program": self.program,
            "committed_seconds": self.committed_seconds,
            "facts": dict(self.facts),
            "models": {name: model.to_json() for name, model in self.models.items()},
        }
        return seal(FORMAT, body)

    @classmethod
    def decode(cls, data: bytes, path: Path) -> Manifest:
        """Raises DamagedData, naming ``path``, for bytes that are not from ``encode``, and for another format."""
        return unseal(data, FORMAT, path, cls._from_json, "restore another checkpoint, or a copy of this one")

    @classmethod
    def _from_json(cls, body: Mapping[str, Any]) -> Manifest:
        if body["checked_bytes"] != CHECKED_BYTES:
            raise ValueError(f"checked_bytes is {body['checked_bytes']}, not {CHECKED_BYTES}")
        models = {name: ModelRecord.from_json(model) for name, model in body["models"].items()}
        check_models(models)
        program, seconds, facts = body["program"], body["committed_seconds"], body["facts"]
        if not (isinstance(program, str) and isinstance(facts, dict) and _is_time(seconds)):
            raise ValueError("program, committed_seconds or facts are not as they are written")
        return cls(program, seconds, facts, models)


def _version(facts: Facts) -> int:
    tracker = facts.get("tracker")
    version = tracker.get("version") if isinstance(tracker, Mapping) else None
    return version if isinstance(version, int) and whole_number(version) else 0


def _is_time(value: object) -> bool:
    return isinstance(value, int | float) and 0 <= value < math.inf


def read_manifest(folder: Path) -> Manifest:
    """The manifest in ``folder``.

    Raises ConfigError when there is none, DamagedData as ``Manifest.decode``, and for one that is not a plain file or
    larger than any that ``commit`` writes.
    """
    path = folder / MANIFEST_NAME
    try:
        with storage_errors(path):
            data = read_below(folder, MANIFEST_NAME, MAX_MANIFEST_BYTES)
    except ConfigError as error:
        if isinstance(error.__cause__, FileNotFoundError | NotADirectoryError):
            raise ConfigError(
                f"{folder} is not a complete checkpoint",
                expected=f"a folder with {MANIFEST_NAME}, which is written last",
                actual="no such file",
                remedy="name the folder of one checkpoint that has it",
            ) from error
        raise
    return Manifest.decode(data, path)


def read_seal(folder: Path) -> str:
    """The identity of the checkpoint in ``folder``: the checksum in its manifest.

    Raises ConfigError where there is no manifest, DamagedData where it is no plain file.
    """
    with storage_errors(folder / MANIFEST_NAME), os.fdopen(open_below(folder, MANIFEST_NAME), "rb") as file:
        return checksum_in(file.read(SEAL_BYTES))
