"""What the data directories of shards hold: the parameters that their snapshots and every record of their logs make."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from ps_server.log.folder import DataFolder
from ps_server.log.recovery import recover
from ps_server.state.model_state import ModelState


@dataclass(frozen=True, slots=True)
class Replayed:
    """One model over all shards."""

    #: The variables, in declared order.
    tensors: list[torch.Tensor]
    #: By shard, how many updates were applied.
    versions: list[int]


def replay(data: Path, shards: int) -> Mapping[str, Replayed]:
    """Every model in ``data``, of a cluster at rest; its shards may be running. Nothing in ``data`` is changed."""
    found: list[dict[str, ModelState]] = []
    for shard in range(shards):
        with TemporaryDirectory(dir=data) as copy:
            name = f"shard-{shard}"
            unneeded = shutil.ignore_patterns("LOCK", "*.part", "spare-*")
            # Links are enough: what is recovered is read, and the rest is replaced, not written over.
            shutil.copytree(data / name, Path(copy, name), ignore=unneeded, copy_function=os.link)
            folder = DataFolder.open(Path(copy), shard)
            try:
                found.append(recover(folder, log_goes_on=True).models)
            finally:
                folder.close()
    return {name: _joined([models[name] for models in found]) for name in found[0]}


def _joined(parts: list[ModelState]) -> Replayed:
    tensors = [torch.full(v.shape, torch.nan) for v in parts[0].shard_map.spec.variables]
    for part in parts:
        for index, span in enumerate(part.replica.layout.slices):
            piece = span.slice
            tensors[piece.variable][piece.row_begin : piece.row_end] = part.replica.region.slice(index)
    return Replayed(tensors, [part.tracker.version for part in parts])
