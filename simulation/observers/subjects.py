"""Owns what is known of the observed processes: which shard each serves, and where values are in a region."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ps_protocol.model.layout import Layout
from ps_protocol.model.spec import ShardMap
from ps_server.state.region import Region
from simulation.judge import Judge
from simulation.loads import Load
from simulation.observers.moves import Moves
from simulation.runtime.disk import Disk
from simulation.runtime.kernel import Kernel
from simulation.truth import RowValues, ShardTruth, same

Wrappers = Iterable[tuple[Any, str, Callable[[Any], Any]]]
"""What has the observed function, its name there, and what makes the observer of the function."""


class Shard(Protocol):
    """A process that serves a shard."""

    number: int
    incarnation: int
    disk: Disk


class Subjects:
    """Whose code runs, in the judge's terms."""

    def __init__(self, kernel: Kernel, judge: Judge, *, raw: bool) -> None:
        """``raw``: payloads are. Else elements differ, and the judge hears of their mean."""
        self.kernel = kernel
        self.judge = judge
        self.is_raw = raw
        self.shards: dict[Any, Shard] = {}
        #: By number of the shard: the incarnation that holds the place.
        self.newest: dict[int, int] = {}
        #: Processes that train.
        self.workers: set[Any] = set()
        #: Those of which the coordinator has heard that they leave.
        self.left: set[Any] = set()
        #: Those that have ended cleanly, and gave up saying so.
        self.unheard: set[Any] = set()
        #: By process of a worker: the point of its host's exchanges that it is not to pass unharmed, and what happens.
        self.points: dict[Any, tuple[str, Callable[[], None]]] = {}
        self.moves = Moves(judge)
        self._positions: dict[int, tuple[Layout, npt.NDArray[np.int64]]] = {}

    def value_of(self, region: Region, version: int) -> float:
        """The value that all variables in ``region`` have, less what slices that moved have brought along.

        ``region`` is what a shard has as ``version``.
        """
        return self.value_in(region.layout, self.values(region.layout, region.bytes), version)

    def value_in(self, layout: Layout, values: list[float], version: int) -> float:
        """The same, of the elements of a region."""
        truth = self.judge.truth[self.place(layout.shard, layout.shard_map)]
        return self.own_value(truth, version, values, lambda load: self.moves.shifts(layout, load))

    def value_under(self, load: Load, region: Region) -> float:
        """The same, of what a checkpoint is put into."""
        return self.one(_less(self.values(region.layout, region.bytes), self.moves.shifts(region.layout, load)))

    def own_value(
        self,
        truth: ShardTruth,
        version: int,
        values: list[float],
        shifts: Callable[[Load | None], list[float]],
    ) -> float:
        """What ``values`` are without what has been brought along.

        That depends on the checkpoints that were put in: where it is open which of them the values come after, it is
        one that fits them, the last if there are several. ``shifts``: what has been brought along after each.
        """
        bases = truth.loads.bases(version)
        if len(bases) > 1:
            for base, (expected, _) in zip(reversed(bases), reversed(truth.states(version)), strict=True):
                own = _less(values, shifts(base))
                if all(same(each, expected) for each in own):
                    return self.one(own)
        return self.one(_less(values, shifts(bases[-1])))

    def own_rows(self, number: int, shard_map: ShardMap, version: int, rows: RowValues) -> tuple[int, RowValues]:
        """``rows`` without what they have brought along, and which state of ``version`` that is, as ``own_value``."""
        loads = self.judge.truth[number].row_loads
        first, bases = loads.first(version), loads.bases(version)
        for state in range(len(bases) - 1, first - 1, -1):
            brought = self.moves.brought_rows(shard_map, bases[state])
            own = {row: value - brought.get(row, 0.0) for row, value in rows.items()} if brought else rows
            if len(bases) == first + 1 or self.judge.rows.fits(number, version, own):
                return state, own
        return first, own

    def values(self, layout: Layout, data: Any) -> list[float]:
        """All elements of the variables in ``data``, the bytes of a region."""
        if id(layout) not in self._positions:
            ranges = [np.arange(each.begin // 8, each.end // 8) for each in layout.slices]
            self._positions[id(layout)] = layout, np.concatenate(ranges or [np.empty(0, np.int64)])
        found: list[float] = np.frombuffer(data, np.float64)[self._positions[id(layout)][1]].tolist()
        return found

    def one(self, values: list[float]) -> float:
        """What the judge hears of ``values``; NaN: there are none, for only rows are there."""
        if not values:
            return math.nan
        if not self.is_raw:
            return math.fsum(values) / len(values)
        if values.count(values[0]) != len(values):
            self.judge.fail(f"{self.kernel.process} has values of different updates: {min(values)} to {max(values)}")
        return values[0]

    def rows(self, ids: npt.NDArray[np.int64], values: npt.NDArray[np.float32]) -> RowValues:
        """By id, the number that all elements of a row have."""
        if not len(ids):
            return {}
        found = values.reshape(len(ids), -1)
        if (found != found[:, :1]).any():
            self.judge.fail(f"{self.kernel.process} has a row of different updates: {found.tolist()}")
        return dict(zip(ids.tolist(), found[:, 0].tolist(), strict=True))

    def begin_job(self) -> None:
        """All processes of the job before have ended."""
        self.shards.clear()
        self.newest.clear()
        self.moves.begin_job()

    def forget(self) -> None:
        """Let go of all processes."""
        self.shards.clear()
        self.workers.clear()
        self.left.clear()
        self.unheard.clear()
        self.points.clear()
        self._positions.clear()

    def serving(self) -> Shard | None:
        """The shard whose code runs now, once it holds its place."""
        shard = self.shards.get(self.kernel.process)
        # One that another has replaced may not know it yet: what it does then is not the shard's history.
        return shard if shard is not None and shard.incarnation == self.newest.get(shard.number) else None

    def place(self, shard: int, shard_map: ShardMap) -> int:
        """The judge's number for what ``shard`` has of one model."""
        return self.judge.places.number(shard, shard_map.spec.name, shard_map.epoch)


def _less(values: list[float], shifts: list[float]) -> list[float]:
    if not shifts:
        return values
    return [round(value - shift, 2) for value, shift in zip(values, shifts, strict=True)]
