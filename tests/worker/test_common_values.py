"""Which parameters workers evaluate, as a table; and that what others told is checked."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import pytest

from ps_protocol.errors import InvalidRequest
from ps_protocol.model.spec import Consistency, Mode
from ps_worker.common_values import Choice, CommonValues, ParameterReport, choose

NONE = ParameterReport(has_stepped=True)
SET = ParameterReport("weight", "a", "b", has_stepped=True)
OTHERWISE = replace(SET, parameters="c")
LOCKSTEP = {"in_lockstep": True}


@pytest.mark.parametrize(
    ("told", "after", "during"),
    [
        ([NONE, NONE], Choice.NEWEST, Choice.NEWEST),
        ([SET, SET], Choice.OWN, Choice.OWN),
        ([SET, OTHERWISE], Choice.LOWEST, Choice.OWN),
        ([SET, replace(SET, buffers="c")], Choice.LOWEST, Choice.OWN),
        ([SET, NONE], Choice.LOWEST, Choice.REFUSED),
        ([NONE, SET], Choice.LOWEST, Choice.REFUSED),
        ([replace(SET, **LOCKSTEP), replace(NONE, **LOCKSTEP)], Choice.LOWEST, Choice.LOWEST),
        ([replace(SET, has_stepped=False), ParameterReport()], Choice.LOWEST, Choice.LOWEST),
    ],
)
def test_workers_evaluate_the_same_parameters(told: list[ParameterReport], after: Choice, during: Choice) -> None:
    # Rank 0 has left.
    by_rank = dict(enumerate(told, 1))
    assert choose(by_rank, in_training=False) is after
    assert choose(by_rank, in_training=True) is during


class Session:
    rank = 1
    consistency = Consistency(Mode.ASYNC)


class Model:
    """Notes what is asked of it."""

    has_stepped = True

    def __init__(self, *names: str) -> None:
        self.names = names
        self.calls: list[object] = []

    def set_values(self, *, with_buffers: bool) -> tuple[str, ...]:
        return self.names

    def digests(self) -> tuple[str, str]:
        return "a", "b"

    def offer_values(self, *, assigns: bool) -> None:
        self.calls.append(assigns)

    def pull(self, place: str = "") -> None:
        self.calls.append(place)


def test_a_process_that_was_started_again_sets_nothing_in_an_exchange_of_the_one_before() -> None:
    for process, assigns in (("of the one before", False), (None, True)):
        model, values = Model("weight"), CommonValues(Session())  # type: ignore[arg-type]

        def gather(own: Any, process: str | None = process) -> dict[int, Any]:
            return {1: own if own is None else own | {"process": process or own["process"]}, 2: asdict(NONE)}

        values.settle([model], gather, "the end of the training")  # type: ignore[list-item]
        assert model.calls == [assigns, "the end of the training"]


def test_values_that_were_not_set_on_all_ranks_in_the_middle_of_a_training_are_one_error_that_names_them() -> None:
    values = CommonValues(Session())  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match=r"not on all workers.*rank 1") as caught:
        values.before_evaluation([Model("weight")], lambda own: {0: asdict(NONE), 1: own}, in_training=True)  # type: ignore[list-item]
    assert caught.value.variable == "weight"


@pytest.mark.parametrize("given", [None, 3, {"variable": 3}, {"unknown": "x"}, {**asdict(NONE), "has_stepped": "yes"}])
def test_what_another_call_gave_is_one_error(given: Any) -> None:
    values = CommonValues(Session())  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match=r"different collective calls.*worker 0"):
        values.before_evaluation([], lambda own: {0: given, 1: own}, in_training=False)


def test_averages_that_differ_between_workers_are_said_once(caplog: pytest.LogCaptureFixture) -> None:
    values, model = CommonValues(Session()), Model("weight")  # type: ignore[arg-type]
    for _ in range(2):
        values.before_evaluation([model], lambda own: {0: asdict(OTHERWISE), 1: own}, in_training=True)  # type: ignore[list-item]
    assert model.calls == []
    assert caplog.text.count("workers evaluate different parameters: 'weight'") == 1
