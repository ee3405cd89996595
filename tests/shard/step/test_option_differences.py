"""In sync the options of the lowest rank are used; a worker that pushed others is told so, once for each."""

from __future__ import annotations

import numpy as np
import pytest

from ps_protocol.model.spec import OptionDifference
from ps_protocol.wire.convert.options import differences_from_pb, differences_to_pb
from ps_server.consistency import Position, PushInfo, WorkerKey
from ps_server.shard.step.options import OptionDifferences
from ps_server.shard.step.push import IncomingPush
from ps_server.shard.step.pushed_rows import PushedRows

NO_BYTES = memoryview(np.empty(0, np.uint8).data)


def push(rank: int, *options: dict[str, object], rows: list[dict[str, float]] | None = None) -> IncomingPush:
    info = PushInfo(WorkerKey(rank, 7), sequence=1, position=Position(0, 1), pulled_version=0)
    return IncomingPush(info, None, frozenset(), options, rows=PushedRows((), rows, NO_BYTES) if rows else None)


def test_equal_options_are_no_difference() -> None:
    differences = OptionDifferences("model")
    differences.note([push(0, {"lr": 0.1}), push(1, {"lr": 0.1})])
    differences.note([push(1, {"lr": 0.2})])
    assert differences.of(WorkerKey(1, 7)) == ()


def test_each_difference_is_found_once_with_the_values_it_was_seen_with(caplog) -> None:
    differences = OptionDifferences("model")
    differences.note([push(0, {"lr": 0.1}, {"lr": 1.0}), push(2, {"lr": 0.1}, {"lr": 0.5})])
    differences.note([push(0, {"lr": 0.1}, {"lr": 0.9}), push(2, {"lr": 0.1}, {"lr": 0.4})])
    assert differences.of(WorkerKey(2, 7)) == [OptionDifference(1, False, "lr", 0, 1.0, 0.5)]
    assert differences.of(WorkerKey(0, 7)) == ()
    assert [record.getMessage() for record in caplog.records] == [
        "model 'model': worker 2 pushes lr=0.5 in group 1, and worker 0, whose options are used, 1.0"
    ]
    # Another lowest rank is another difference; it comes behind the first.
    differences.note([push(1, {"lr": 0.1}, {"lr": 0.9}), push(2, {"lr": 0.1}, {"lr": 0.4})])
    assert [each.used_rank for each in differences.of(WorkerKey(2, 7))] == [0, 1]


def test_options_of_tables_are_compared_among_those_that_push_rows() -> None:
    differences = OptionDifferences("model")
    pushes = [push(0), push(1, rows=[{"lr": 0.1}, {"lr": 0.2}]), push(2, rows=[{"lr": 0.1}, {"lr": 0.3}])]
    differences.note(pushes)
    (found,) = differences.of(WorkerKey(2, 7))
    assert found == OptionDifference(1, True, "lr", 1, 0.2, 0.3)
    (message,) = differences_to_pb([found])
    assert (message.WhichOneof("place"), message.table) == ("table", 1)
    assert differences_from_pb([message]) == [found]


def test_workers_that_are_gone_are_forgotten() -> None:
    differences = OptionDifferences("model")
    differences.note([push(0, {"lr": 0.1}), push(1, {"lr": 0.2})])
    differences.members({0: 7, 1: 7})
    assert differences.of(WorkerKey(1, 7))
    differences.members({0: 7, 1: 8})
    assert not differences.of(WorkerKey(1, 7))


def test_long_and_strange_values_are_short_and_printable(caplog: pytest.LogCaptureFixture) -> None:
    differences = OptionDifferences("model")
    differences.note([push(0, {"name": "a"}), push(1, {"name": "\x1b[2J\n" + "x" * 500})])
    (found,) = differences.of(WorkerKey(1, 7))
    assert isinstance(found.own, str)
    assert len(found.own) == 80
    assert caplog.records[0].getMessage().isprintable()
