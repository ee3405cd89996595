"""What the data directories of shards hold: the parameters that their snapshots and every record of their logs make."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from ps_protocol.errors import PsError
from ps_server.log.folder import DataFolder
from ps_server.log.recovery import recover
from ps_server.state.model_state import ModelState

PATIENCE_SECONDS = 60.0
"""The longest time for a shard to come to rest."""


@dataclass(frozen=True, slots=True)
class Replayed:
    """One model over all shards."""

    #: The variables, in declared order.
    tensors: list[torch.Tensor]
    #: By shard, how many updates were applied.
    versions: list[int]


def replay(data: Path, shards: int) -> Mapping[str, Replayed]:
    """Every model in ``data``, of a cluster at rest; its shards may be running. Nothing in ``data`` is changed."""
    found = [_recovered(data, shard) for shard in range(shards)]
    return {name: _joined([models[name] for models in found]) for name in found[0]}


def _recovered(data: Path, shard: int) -> Mapping[str, ModelState]:
    """What is in the folder of ``shard``: read again while it takes a snapshot, which removes and renames files."""
    end = time.monotonic() + PATIENCE_SECONDS
    while True:
        before = _contents(data / f"shard-{shard}")
        try:
            models = _read(data, shard)
        except (OSError, PsError):  # shutil.Error is an OSError
            if _contents(data / f"shard-{shard}") == before:
                raise
        else:
            if _contents(data / f"shard-{shard}") == before:
                return models
        if time.monotonic() > end:
            raise TimeoutError(f"{data / f'shard-{shard}'} does not come to rest")


def _contents(folder: Path) -> set[tuple[str, int]]:
    """The names of all files in ``folder``, and which file each is."""
    return {(entry.path, entry.inode()) for root, *_ in os.walk(folder) for entry in _entries(root)}


def _entries(folder: str) -> list[os.DirEntry[str]]:
    with suppress(FileNotFoundError), os.scandir(folder) as entries:
        return list(entries)
    return []


def _read(data: Path, shard: int) -> Mapping[str, ModelState]:
    with TemporaryDirectory(dir=data) as copy:
        name = f"shard-{shard}"
        unneeded = shutil.ignore_patterns("LOCK", "*.part", "spare-*")
        # Links are enough: what is recovered is read, and the rest is replaced, not written over.
        shutil.copytree(data / name, Path(copy, name), ignore=unneeded, copy_function=os.link)
        folder = DataFolder.open(Path(copy), shard)
        try:
            return recover(folder, log_goes_on=True).models
        finally:
            folder.close()


def _joined(parts: list[ModelState]) -> Replayed:
    tensors = [torch.full(v.shape, torch.nan) for v in parts[0].shard_map.spec.variables]
    for part in parts:
        for index, span in enumerate(part.replica.layout.slices):
            piece = span.slice
            tensors[piece.variable][piece.row_begin : piece.row_end] = part.replica.region.slice(index)
    return Replayed(tensors, [part.tracker.version for part in parts])
