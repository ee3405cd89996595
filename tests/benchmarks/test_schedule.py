"""The order of measuring, and figures from samples."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from benchmarks.processes import ChildFailed
from benchmarks.rows import Group, Key, Subject
from benchmarks.schedule import measure
from benchmarks.timing import Figures, Loop


class Stage:
    """Records who is up and who is asked, in order."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def subject(self, name: str) -> Subject:
        @contextmanager
        def opened() -> Iterator[Actor]:
            self.events.append(f"{name} up")
            try:
                yield Actor(name, self.events)
            finally:
                self.events.append(f"{name} down")

        return Subject((Key(name, "step", 4),), opened)


class Actor:
    def __init__(self, name: str, events: list[str]) -> None:
        self._name = name
        self._events = events

    def run(self, operation: str, count: int, warm_up: int) -> dict[str, list[float]]:
        self._events.append(f"{self._name} {operation}")
        return {"seconds": [1.0] * count}

    def rest(self) -> None:
        self._events.append(f"{self._name} rests")

    def wake(self) -> None:
        self._events.append(f"{self._name} wakes")


def test_rows_of_a_group_are_measured_in_turn_while_the_others_rest() -> None:
    stage = Stage()
    measured = measure(Group("", (stage.subject("a"), stage.subject("b")), rounds=2, count=3), lambda *_: None)
    turn = [f"{name} {event}" for name in "ab" for event in ("wakes", "step", "rests")]
    assert stage.events == ["a up", "a rests", "b up", "b rests", *turn, *turn, "b down", "a down"]
    assert [figures["seconds"].samples for figures in measured.rows.values()] == [6, 6]


def test_rows_that_do_not_fit_together_are_brought_up_one_at_a_time() -> None:
    stage = Stage()
    group = Group("", (stage.subject("a"), stage.subject("b")), rounds=1, count=1, together=False)
    measure(group, lambda *_: None)
    assert stage.events == [f"{name} {event}" for name in "ab" for event in ("up", "step", "down")]


def test_a_row_whose_child_fails_has_no_figures_and_the_others_go_on() -> None:
    stage = Stage()

    def fail(round_number: int, key: Key) -> None:
        if key.system == "a" and round_number == 1:
            raise ChildFailed("it ended")

    outcome = measure(Group("", (stage.subject("a"), stage.subject("b")), rounds=3, count=1), fail)
    assert [key.system for key in outcome.rows] == ["b"]
    assert {key.system: reason for key, reason in outcome.failures.items()} == {"a": "it ended"}
    assert stage.events.count("a wakes") == 2
    assert stage.events.count("b step") == 3


def test_an_interruption_leaves_nothing_up() -> None:
    stage = Stage()

    def fail(round_number: int, key: Key) -> None:
        raise ValueError(key.system)

    with pytest.raises(ValueError, match="a"):
        measure(Group("", (stage.subject("a"), stage.subject("b")), rounds=1, count=1), fail)
    assert stage.events[-2:] == ["b down", "a down"]


def test_only_keeps_the_rows_with_one_of_the_words() -> None:
    stage = Stage()
    group = Group("", (stage.subject("a"), stage.subject("b"), stage.subject("c")), rounds=1, count=1)
    assert [subject.keys[0].system for subject in group.only(("a: step", "c: step")).subjects] == ["a", "c"]
    assert group.only(()) == group


def test_figures_hold_quartiles_and_the_median_of_each_round() -> None:
    figures = Figures.of([[1.0, 2.0, 3.0], [5.0, 4.0]])
    assert (figures.low, figures.median, figures.high) == (2.0, 3.0, 4.0)
    assert figures.rounds == (2.0, 4.5)
    assert (figures.samples, figures.p99) == (5, None)
    assert Figures.of([[float(value) for value in range(200)]]).p99 == 198


def test_a_loop_counts_only_what_comes_after_the_warm_up() -> None:
    calls: list[int] = []
    assert len(Loop({"step": lambda: calls.append(1)}).run("step", 3, warm_up=2)) == 3
    assert len(calls) == 5


def test_a_key_says_what_it_is() -> None:
    assert str(Key("ours", "step", 4_000_000, tensors=1000, workers=2, shards=4)) == (
        "ours: step, 4 MB, 1,000 tensors, 2 workers, 4 shards"
    )
