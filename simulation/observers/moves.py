"""Owns what slices that have moved between shards differ by from the updates of the shard that they are on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ps_protocol.model.layout import Layout
from ps_protocol.model.spec import ShardMap
from simulation.judge import Judge

Piece = tuple[str, int]
"""A slice: its variable and its first row. Slices are not split when they move."""


class Moves:
    """Of models whose updates only add up: what a slice brings along is a number, from then on."""

    def __init__(self, judge: Judge) -> None:
        self._judge = judge
        #: By model and epoch: the map, and what each slice has more than the updates of its shard.
        self._epochs: dict[tuple[str, int], tuple[ShardMap, Mapping[Piece, float]]] = {}

    def decided(self, shard_maps: Iterable[ShardMap]) -> None:
        """The coordinator has these maps. A new one is decided while training pauses on all shards."""
        for shard_map in shard_maps:
            name, epoch = shard_map.spec.name, shard_map.epoch
            known = self._epochs.get((name, epoch))
            if known is None or known[0] != shard_map:
                self._check_one_point(shard_map)
                self._epochs[name, epoch] = shard_map, self._brought(shard_map)

    def _brought(self, shard_map: ShardMap) -> Mapping[Piece, float]:
        before = self._epochs.get((shard_map.spec.name, shard_map.epoch - 1))
        if before is None:
            return {}
        home, truth = _homes(before[0]), self._judge.truth
        found: dict[Piece, float] = {}
        for piece, shard in _homes(shard_map).items():
            brought = before[1].get(piece, 0.0) + truth[home[piece]].newest - truth[shard].newest
            if brought:
                found[piece] = brought
        return found

    def _check_one_point(self, shard_map: ShardMap) -> None:
        """A push that one shard has applied and another holds would be applied twice to a slice, or never."""
        before = self._epochs.get((shard_map.spec.name, shard_map.epoch - 1))
        holders = [self._judge.truth[number] for number in before[0].holders] if before else []
        applied = {name: truth.number for truth in holders for name in truth.applied}
        for truth in holders:
            if both := truth.held & applied.keys():
                self._judge.fail(
                    f"slices move while shard {truth.number} holds push {min(both)}, which shard {applied[min(both)]} "
                    f"has applied"
                )

    def shift(self, shard_map: ShardMap, variable: str, row: int) -> float:
        """What the slice of ``variable`` that begins with ``row`` has brought along."""
        known = self._epochs.get((shard_map.spec.name, shard_map.epoch))
        return known[1].get((variable, row), 0.0) if known else 0.0

    def shifts(self, layout: Layout) -> list[float]:
        """The same for all elements in ``layout``, one after another; empty: for none."""
        known = self._epochs.get((layout.shard_map.spec.name, layout.shard_map.epoch))
        if not known or not known[1]:
            return []
        return [
            known[1].get((span.variable.name, span.slice.row_begin), 0.0)
            for span in layout.slices
            for _ in range(span.begin // 8, span.end // 8)
        ]


def _homes(shard_map: ShardMap) -> dict[Piece, int]:
    variables = shard_map.spec.variables
    return {(variables[each.variable].name, each.row_begin): each.shard for each in shard_map.slices}
