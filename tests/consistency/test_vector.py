"""The clock vector against sorting, and what a push costs."""

from __future__ import annotations

import pickle
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ps_protocol.model.spec import Consistency
from ps_server.consistency import Position, PushInfo, Tracker, WorkerKey
from ps_server.consistency.events import FOREVER
from ps_server.consistency.vector import ClockVector

from .job import ASYNC, SYNC, at, backup, ssp

positions = st.builds(Position, st.integers(0, 2), st.integers(0, 6))
moves = st.lists(st.tuples(st.integers(0, 5), st.none() | positions))


@given(moves, st.integers(0, 6))
def test_the_frontier_is_what_all_but_the_missing_have_reached(
    moves: list[tuple[int, Position | None]], missing: int
) -> None:
    vector, plain = ClockVector(), dict[int, Position]()
    for rank, position in moves:
        if position is None:
            vector.remove(rank)
            plain.pop(rank, None)
        else:
            vector.place(rank, position)
            plain[rank] = position
        for left_out in (0, missing):
            expected = sorted(plain.values())[left_out] if len(plain) > left_out else FOREVER
            assert vector.frontier(left_out) == expected
        assert len(vector) == len(plain)
        if plain:
            lowest = min(plain.values())
            rank, others = vector.slowest()
            assert plain[rank] == vector[rank] == lowest
            assert others == list(plain.values()).count(lowest) - 1


def test_a_standing_worker_does_not_make_the_vector_grow_while_others_run_ahead() -> None:
    def size(steps: int) -> int:
        vector = ClockVector()
        vector.place(0, at(0))
        for clock in range(steps):
            vector.place(1, at(clock))
            assert vector.frontier() == at(0)
        return len(pickle.dumps(vector))

    assert size(10_000) <= size(100) + 500


@dataclass
class Comparisons:
    count: int = 0


class CountedClock(int):
    """A clock that counts how often it is compared."""

    comparisons: Comparisons

    def __new__(cls, value: int, comparisons: Comparisons) -> CountedClock:
        clock = super().__new__(cls, value)
        clock.comparisons = comparisons
        return clock

    def __eq__(self, other: object) -> bool:
        self.comparisons.count += 1
        return int(self) == other

    def __lt__(self, other: int) -> bool:
        self.comparisons.count += 1
        return int(self) < int(other)

    def __le__(self, other: int) -> bool:
        self.comparisons.count += 1
        return int(self) <= int(other)

    def __gt__(self, other: int) -> bool:
        self.comparisons.count += 1
        return int(self) > int(other)

    def __ge__(self, other: int) -> bool:
        self.comparisons.count += 1
        return int(self) >= int(other)

    __hash__ = int.__hash__


def comparisons_per_push(mode: Consistency, workers: int, steps: int = 5) -> float:
    tracker, comparisons = Tracker(mode), Comparisons()
    tracker.members(dict.fromkeys(range(workers), 1))
    for clock in range(1, steps + 1):
        for rank in range(workers):
            position = Position(0, CountedClock(clock, comparisons))
            tracker.push(PushInfo(WorkerKey(rank, 1), clock, position, tracker.version))
            tracker.take_ready(0.0)
            tracker.blocker(position)
    return comparisons.count / (steps * workers)


@pytest.mark.parametrize("mode", [ASYNC, ssp(2), SYNC, backup(1)], ids=str)
def test_a_push_costs_no_more_with_a_thousand_workers_than_with_ten(mode: Consistency) -> None:
    few, many = comparisons_per_push(mode, 10), comparisons_per_push(mode, 1000)
    assert few > 1
    assert many <= 1.5 * few
