"""What a browser is told: everything once, then what is new; names cannot end a script."""

from __future__ import annotations

import json
import math
from array import array
from dataclasses import replace
from typing import Any

import pytest

from ps_protocol.cluster.history import Curve, Curves, JobHistory
from ps_protocol.cluster.view import JobEvent
from ps_server.page.messages import PageState, Viewer, curves_from, plain, to_json, whole
from tests.glance.jobs import history, shard, worker


def told(viewer: Viewer, job: JobHistory) -> Any:
    return json.loads(viewer.message(PageState.of(job)))


def curves(*values: float, generation: int = 0, name: str = "loss") -> Curves:
    numbers = array("d", values)
    return Curves(array("d", range(len(values))), (Curve(name, True, numbers, numbers, numbers),), 1.0, generation)


def test_the_first_message_has_everything_and_the_next_only_what_is_new() -> None:
    viewer = Viewer()
    job = history(worker(0, steps=1), shard(0), events=(JobEvent(1, 5.0, "one"),), curves=curves(1.0, 2.0))
    first = told(viewer, job)
    assert {"head", "workers", "shards", "tables", "clock", "events", "curves", "configuration"} <= first.keys()
    assert told(viewer, replace(job, at_seconds=job.at_seconds + 1)).keys() == {"clock", "curves"}
    later = history(worker(0, steps=2), shard(0), events=(*job.events, JobEvent(2, 6.0, "two")), curves=job.curves)
    message = told(viewer, later)
    assert message.keys() == {"clock", "curves", "workers", "events"}
    assert [event["text"] for event in message["events"]] == ["two"]


def test_curves_come_from_the_last_point_on_which_may_have_grown() -> None:
    viewer = Viewer()
    assert told(viewer, history(curves=curves(1.0, 2.0)))["curves"]["first"] == 0
    message = told(viewer, history(curves=curves(1.0, 2.5, 3.0)))["curves"]
    assert (message["first"], message["times"], message["curves"][0]["mean"]) == (1, [1.0, 2.0], [2.5, 3.0])


@pytest.mark.parametrize("other", [curves(1.5, 3.0, generation=1), curves(1.0, 2.0, 3.0, name="auc")])
def test_merged_points_and_new_names_are_told_from_the_beginning(other: Curves) -> None:
    viewer = Viewer()
    told(viewer, history(curves=curves(1.0, 2.0)))
    assert told(viewer, history(curves=other))["curves"]["first"] == 0


def test_numbers_that_json_lacks_are_null() -> None:
    assert plain({"a": math.nan, "b": math.inf, "c": 1 / 3}) == {"a": None, "b": None, "c": 0.333333}
    assert curves_from(curves(math.nan, 1.0), 0)["curves"][0]["mean"] == [None, 1.0]


def test_times_keep_their_milliseconds() -> None:
    assert plain(1795363021.7894) == 1795363021.789


def test_a_name_cannot_end_a_script_element() -> None:
    evil = "</script><script>alert(1)</script>&"
    text = to_json(whole(history(worker(0, metrics={evil: 1.0}), shard(0))))
    assert "<" not in text
    assert ">" not in text
    assert json.loads(text)["head"]["reported"] == {evil: 1.0}
