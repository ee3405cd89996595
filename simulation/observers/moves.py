"""Owns what slices and rows that have moved differ by from the updates of the shard that they are on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ps_protocol.model.layout import Layout
from ps_protocol.model.spec import ShardMap, Slice
from simulation.judge import Judge
from simulation.loads import Load, Piece, RowLoad
from simulation.truth import ShardTruth


@dataclass(frozen=True, slots=True)
class _Epoch:
    """One shard map, and by how much slices and rows have more than the updates of their shards."""

    shard_map: ShardMap
    slices: Mapping[Piece, float]
    rows: Mapping[int, float]


class Moves:
    """Of models whose updates only add up: what a slice or a row brings along is a number, from then on."""

    def __init__(self, judge: Judge) -> None:
        self._judge = judge
        #: By model and epoch.
        self._epochs: dict[tuple[str, int], _Epoch] = {}

    def decided(self, shard_maps: Iterable[ShardMap]) -> None:
        """The coordinator has these maps. A new one is decided while training pauses on all shards."""
        for shard_map in shard_maps:
            key = shard_map.spec.name, shard_map.epoch
            known = self._epochs.get(key)
            if known is None or known.shard_map != shard_map:
                before = self._before(shard_map)
                if before is not None:
                    self._check_one_point(before.shard_map)
                    brought = self._brought_slices(before, shard_map), self._brought_rows(before, shard_map)
                    self._epochs[key] = _Epoch(shard_map, *brought)
                else:
                    self._epochs[key] = _Epoch(shard_map, {}, {})

    def begin_job(self) -> None:
        """Another job begins: nothing has moved in it."""
        self._epochs.clear()

    def restarted(self, shard_maps: Mapping[str, ShardMap], released: Mapping[str, int]) -> None:
        """A coordinator begins with these maps, and these last epochs of models: what was decided later is undone."""
        last = {**released, **{name: shard_map.epoch for name, shard_map in shard_maps.items()}}
        self._epochs = {key: each for key, each in self._epochs.items() if key[1] <= last.get(key[0], 0)}

    def shifts(self, layout: Layout, load: Load | None) -> list[float]:
        """What the slices in ``layout`` have brought along, by element, one after another; empty: nothing.

        ``load``: the last checkpoint that was put in.
        """
        shard_map = layout.shard_map
        brought = self._slices(shard_map.spec.name, shard_map.epoch, load)
        if not brought:
            return []
        found: list[float] = []
        for span in layout.slices:
            begin, end = span.slice.row_begin, span.slice.row_end
            elements = (span.end - span.begin) // 8 // (end - begin)
            for row in range(begin, end):
                found += [brought.get((span.variable.name, row), 0.0)] * elements
        return found

    def shift(self, shard_map: ShardMap, piece: Piece, load: Load | None) -> float:
        """The same for one piece."""
        return self._slices(shard_map.spec.name, shard_map.epoch, load).get(piece, 0.0)

    def brought_rows(self, shard_map: ShardMap, load: RowLoad | None) -> Mapping[int, float]:
        """By id, what rows have brought along. ``load``: the last checkpoint that was put in."""
        return self._rows(shard_map.spec.name, shard_map.epoch, load)

    def _slices(self, model: str, epoch: int, load: Load | None) -> Mapping[Piece, float]:
        if load is not None and load.epoch == epoch:
            return load.brought
        known = self._epochs.get((model, epoch))
        return known.slices if known else {}

    def _rows(self, model: str, epoch: int, load: RowLoad | None) -> Mapping[int, float]:
        if load is not None and load.epoch == epoch:
            return load.brought
        known = self._epochs.get((model, epoch))
        return known.rows if known else {}

    def _before(self, shard_map: ShardMap) -> _Epoch | None:
        """The epoch before; None: the model was declared with this one."""
        name, epoch, generation = shard_map.spec.name, shard_map.epoch, self._judge.places.generation
        same = generation(name, epoch) == generation(name, epoch - 1)
        return self._epochs.get((name, epoch - 1)) if same else None

    def _truth(self, shard_map: ShardMap, shard: int) -> ShardTruth:
        places = self._judge.places
        return places.truth[places.number(shard, shard_map.spec.name, shard_map.epoch)]

    def _brought_slices(self, before: _Epoch, shard_map: ShardMap) -> Mapping[Piece, float]:
        name, epoch = shard_map.spec.name, before.shard_map.epoch
        homes = _homes(before.shard_map)
        found: dict[Piece, float] = {}
        for piece, shard in _homes(shard_map).items():
            there, here = self._truth(shard_map, homes[piece]), self._truth(shard_map, shard)
            had = self._slices(name, epoch, there.loads.last()).get(piece, 0.0)
            if brought := had + there.newest - here.newest:
                found[piece] = brought
        return found

    def _brought_rows(self, before: _Epoch, shard_map: ShardMap) -> Mapping[int, float]:
        name, epoch = shard_map.spec.name, shard_map.epoch
        ids = self._judge.rows.known(self._judge.places.number(0, name, epoch))
        homes, owners = owners_of(before.shard_map, ids), owners_of(shard_map, ids)
        found: dict[int, float] = {}
        for row in homes:
            there, here = self._truth(shard_map, homes[row]), self._truth(shard_map, owners[row])
            more = there.row(row, len(there.history)) - here.row(row, len(here.history))
            had = self._rows(name, before.shard_map.epoch, there.row_loads.last())
            found[row] = had.get(row, 0.0) + more
        return found

    def _check_one_point(self, before: ShardMap) -> None:
        """A push that one shard has applied and another holds would be applied twice to a slice, or never."""
        holders = [self._truth(before, number) for number in before.holders]
        applied = {name: truth.number for truth in holders for name in truth.applied}
        for truth in holders:
            if both := truth.held & applied.keys():
                self._judge.fail(
                    f"slices move while shard {truth.number} holds push {min(both)}, which shard {applied[min(both)]} "
                    f"has applied"
                )


def owners_of(shard_map: ShardMap, ids: Sequence[int]) -> dict[int, int]:
    """The shard of each row of the model's table."""
    if not shard_map.tables:
        return {}
    from ps_protocol.model.ids import buckets_of  # Compiled code: not for runs without tables.

    (owners,) = shard_map.tables
    buckets: list[int] = buckets_of(np.array(ids, np.int64), len(owners)).tolist()
    return {row: owners[bucket] for row, bucket in zip(ids, buckets, strict=True)}


def _homes(shard_map: ShardMap) -> dict[Piece, int]:
    return {piece: each.shard for each in shard_map.slices for piece in pieces_of(shard_map, each)}


def pieces_of(shard_map: ShardMap, part: Slice) -> list[Piece]:
    """The rows of a slice."""
    name = shard_map.spec.variables[part.variable].name
    return [(name, row) for row in range(part.row_begin, part.row_end)]
