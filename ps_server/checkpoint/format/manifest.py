"""The manifest of a checkpoint: encoding, verification and format version."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ps_protocol.errors import ConfigError, DamagedData
from ps_protocol.sealed import SEAL_AT, SEAL_BYTES, seal, sealed
from ps_server.checkpoint.folder.files import CHECKED_BYTES, MANIFEST_NAME, checksum, storage_errors
from ps_server.checkpoint.folder.safe_open import open_below, read_below
from ps_server.checkpoint.format.record import Facts, ModelRecord
from ps_server.checkpoint.format.validation import check_models

#: Increased when an older torch-ps could misread a checkpoint. 1 has no tables. 2 has options of models as JSON text.
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

    def encode(self) -> bytes:
        """The bytes of the file; they carry their own checksum."""
        body = {
            "format": FORMAT,
            "checked_bytes": CHECKED_BYTES,
            "program": self.program,
            "committed_seconds": self.committed_seconds,
            "facts": dict(self.facts),
            "models": {name: model.to_json() for name, model in self.models.items()},
        }
        return seal(body)

    @classmethod
    def decode(cls, data: bytes, path: Path) -> Manifest:
        """Raises DamagedData, naming ``path``, for bytes that are not from ``encode``, and for a newer format."""
        try:
            body = json.loads(data)
            found, form = body["checksum"], body["format"]
        except (ValueError, AttributeError, KeyError, TypeError, RecursionError) as error:
            raise _damaged(path, expected="the JSON object that was written", actual=str(error)) from error
        if form not in range(1, FORMAT + 1):
            raise DamagedData(
                f"{path} has a format that this torch-ps does not read",
                expected=f"format {FORMAT} at most",
                actual=f"format {form}, written by torch-ps {body.get('program', '?')}",
                remedy="restore it with the version that wrote it, or a later one",
            )
        text = b"{" + data[SEAL_BYTES:]
        if data != sealed(text):
            raise _damaged(path, expected=f"checksum {found}", actual=checksum(text))
        try:
            if body["checked_bytes"] != CHECKED_BYTES:
                raise ValueError(f"checked_bytes is {body['checked_bytes']}, not {CHECKED_BYTES}")
            models = {name: ModelRecord.from_json(model) for name, model in body["models"].items()}
            check_models(models)
            program, seconds, facts = body["program"], body["committed_seconds"], body["facts"]
            if not (isinstance(program, str) and isinstance(facts, dict) and _is_time(seconds)):
                raise ValueError("program, committed_seconds or facts are not as they are written")
            return cls(program, seconds, facts, models)
        except (AttributeError, KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
            raise _damaged(path, expected=f"a manifest of format {form}", actual=repr(error)) from error


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
        return file.read(SEAL_BYTES)[SEAL_AT:].split(b'"')[0].decode(errors="replace")


def _damaged(path: Path, *, expected: str, actual: str) -> DamagedData:
    return DamagedData(
        f"{path} is damaged: it is not what was written",
        expected=expected,
        actual=actual,
        remedy="restore another checkpoint, or a copy of this one",
    )
