"""Which shard holds how much of which variable, from shard maps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from ps_protocol.cluster.history import PlacedVariable
from ps_protocol.model.spec import ShardMap

NAMED = 64
"""Of each model, so many of the largest variables are named; the others are one entry."""


def placement_of(maps: Iterable[ShardMap]) -> tuple[PlacedVariable, ...]:
    """By model; its largest variables first, then the rest together, then its tables."""
    return tuple(entry for shard_map in maps for entry in _of_model(shard_map))


def _of_model(shard_map: ShardMap) -> list[PlacedVariable]:
    spec = shard_map.spec
    amounts: list[Counter[int]] = [Counter() for _ in spec.variables]
    for piece in shard_map.slices:
        rows = piece.row_end - piece.row_begin
        amounts[piece.variable][piece.shard] += rows * spec.variables[piece.variable].row_bytes
    placed = [
        PlacedVariable(spec.name, variable.name, dict(sorted(held.items())))
        for variable, held in zip(spec.variables, amounts, strict=True)
    ]
    placed.sort(key=lambda entry: (-sum(entry.amounts.values()), entry.name))
    if len(placed) > NAMED:
        placed[NAMED - 1 :] = [_together(spec.name, placed[NAMED - 1 :])]
    tables = [
        PlacedVariable(spec.name, table.name, dict(sorted(Counter(owners).items())), table=True)
        for table, owners in zip(spec.tables, shard_map.tables, strict=True)
    ]
    return placed + tables


def _together(model: str, small: list[PlacedVariable]) -> PlacedVariable:
    total: Counter[int] = Counter()
    for entry in small:
        total.update(entry.amounts)
    return PlacedVariable(model, f"{len(small)} smaller variables", dict(sorted(total.items())), count=len(small))
