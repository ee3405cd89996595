"""Reads checkpoints for the judge: the version and the values of each part."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

from ps_protocol.model.spec import Slice
from ps_server.checkpoint.checkpoint import Checkpoint
from ps_server.checkpoint.record import ModelRecord
from ps_server.checkpoint.source import opened
from ps_server.consistency import TrackerState
from simulation.checkpoint_judge import SavedPart
from simulation.loads import Load, Piece
from simulation.observers.moves import pieces_of
from simulation.observers.subjects import Subjects
from simulation.truth import RowValues


def tell_of_checkpoint(subjects: Subjects, folder: Path) -> None:
    """Tell the judge what the complete checkpoint in ``folder`` holds, once."""
    judge = subjects.judge.checkpoints
    if judge.knows(folder.name):
        return
    checkpoint = Checkpoint.open(folder)
    for name, model in checkpoint.manifest.models.items():
        holders = sorted(model.shard_map.holders)
        versions = [TrackerState.from_json(facts["tracker"]).version for facts in model.facts]
        rows, parts = _rows(subjects, checkpoint, model), {}
        values = _values(folder, model)
        for shard, version in zip(holders, versions, strict=True):
            number = subjects.place(shard, model.shard_map)
            parts[number] = _part(subjects, model, number, version, values, rows.get(shard, {}))
        judge.saved(folder.name, name, parts)


def beginning_of(folder: Path) -> tuple[str, int, Mapping[int, Iterable[int]]]:
    """What a job begins with that restores this checkpoint: its name, the phase, and trained items by epoch."""
    facts = Checkpoint.open(folder).manifest.facts
    trained: dict[int, set[int]] = {}
    for data in facts["data"].values():
        leased = [span for holder in data["holders"].values() for span in holder["leased"]]
        open_items = {item for begin, end in (*data["free"], *leased) for item in range(begin, end)}
        trained |= {epoch: set(range(data["length"])) for epoch in range(data["epoch"])}
        trained[data["epoch"]] = set(range(data["length"])) - open_items
    return folder.name, facts["phase"], trained


def _part(
    subjects: Subjects,
    model: ModelRecord,
    number: int,
    version: int,
    values: Mapping[Piece, list[float]],
    rows: RowValues,
) -> SavedPart:
    """What a place has of ``values`` and ``rows``."""
    shard_map, moves = model.shard_map, subjects.moves
    shard = number % subjects.judge.places.shards
    pieces = [piece for each in shard_map.slices if each.shard == shard for piece in pieces_of(shard_map, each)]

    def shifts(load: Load | None) -> list[float]:
        return [moves.shift(shard_map, piece, load) for piece in pieces for _ in values[piece]]

    def brought(load: Load | None) -> Mapping[Piece, float]:
        return {piece: moves.shift(shard_map, piece, load) for piece in pieces}

    elements = [value for piece in pieces for value in values[piece]]
    value = subjects.own_value(subjects.judge.truth[number], version, elements, shifts)
    _, own_rows = subjects.own_rows(number, shard_map, version, rows)
    return SavedPart(version, value, brought, rows, own_rows)


def _values(folder: Path, model: ModelRecord) -> dict[Piece, list[float]]:
    """The elements of each row of a variable."""
    variables = model.shard_map.spec.variables
    by_name: dict[Piece, Slice] = {
        (variables[each.variable].name, each.row_begin): each for each in model.shard_map.slices
    }
    found: dict[Piece, list[float]] = {}
    with opened(folder, model) as source:
        for piece in model.pieces:
            if not piece.state:
                data = bytearray(piece.nbytes)
                source.read(piece, 0, piece.nbytes, memoryview(data))
                rows = pieces_of(model.shard_map, by_name[piece.variable, piece.row_begin])
                values = np.frombuffer(data, np.float64).reshape(len(rows), -1).tolist()
                found |= dict(zip(rows, values, strict=True))
    return found


def _rows(subjects: Subjects, checkpoint: Checkpoint, model: ModelRecord) -> dict[int, dict[int, float]]:
    """By shard and id."""
    found: dict[int, dict[int, float]] = {}
    spec = model.shard_map.spec
    for table, owners in zip(spec.tables, model.shard_map.tables, strict=True):
        from ps_server.checkpoint.table_reader import saved_table  # Compiled code: not for runs without tables.

        with saved_table(checkpoint, spec.name, table.name) as saved:
            for bucket, shard in enumerate(owners):
                contents = saved.contents(bucket)
                rows = subjects.rows(contents.ids, contents.rows[:, : table.dim])
                found.setdefault(shard, {}).update(rows)
    return found
