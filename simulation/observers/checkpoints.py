"""Reads checkpoints for the judge: the version and the value of each part."""

from __future__ import annotations

import math
from pathlib import Path

from ps_server.checkpoint.format.record import ModelRecord
from ps_server.checkpoint.read.checkpoint import Checkpoint
from ps_server.checkpoint.read.source import opened
from ps_server.consistency import TrackerState
from simulation.observers.subjects import Subjects


def tell_of_checkpoint(subjects: Subjects, folder: Path) -> None:
    """Tell the judge what the complete checkpoint in ``folder`` holds, once."""
    judge = subjects.judge.checkpoints
    if judge.knows(folder.name):
        return
    for model in Checkpoint.open(folder).manifest.models.values():
        holders = sorted(model.shard_map.holders)
        versions = [TrackerState.from_json(facts["tracker"]).version for facts in model.facts]
        values, parts = _saved(subjects, folder, model), {}
        for shard, version in zip(holders, versions, strict=True):
            parts[subjects.place(shard, model.shard_map)] = version, values.get(shard, math.nan)
        judge.saved(folder.name, parts)


def _saved(subjects: Subjects, folder: Path, model: ModelRecord) -> dict[int, float]:
    """By shard: the value of its part of ``model``."""
    variables = model.shard_map.spec.variables
    shards = {(variables[each.variable].name, each.row_begin): each.shard for each in model.shard_map.slices}
    found: dict[int, list[float]] = {}
    with opened(folder, model) as source:
        for piece in model.pieces:
            if not piece.state:
                data = bytearray(piece.nbytes)
                source.read(piece, 0, piece.nbytes, memoryview(data))
                shift = subjects.moves.shift(model.shard_map, piece.variable, piece.row_begin)
                values = (value - shift for value in memoryview(data).cast("d"))
                found.setdefault(shards[piece.variable, piece.row_begin], []).extend(values)
    return {shard: subjects.one(values) for shard, values in found.items()}
