"""Rows of tables over each transport: few inside their message, many behind it or in shared memory."""

from __future__ import annotations

import numpy as np
import pytest

from ps_protocol.cluster.answers import Outcome, RowsAnswer, StepAnswer
from ps_protocol.cluster.requests import LookupHeader, PushHeader
from ps_protocol.errors import InvalidRequest
from ps_protocol.model.tables import RowCount, RowInit
from ps_protocol.wire.socket_messages import INLINE_BYTES
from ps_worker.transport.base import ClientTransport
from tests.support.tables import start_with, table_spec
from tests.transports.support import Line, line, running_shard

pytestmark = pytest.mark.usefixtures("loop", "quiet")

FEW, MANY = 10, 40_000
DIM = 4


def look_up(line: Line, ids, number=1, table=0):
    """Ask for rows of one table and read them."""
    ask(line.carrier, ids, number, line.phase, line.clock + 1, table)
    return read(line, ids.size)


def ask(carrier: ClientTransport, ids, number, phase, clock, table=0) -> None:
    lookup = LookupHeader(number, [RowCount(table, ids.size)], (phase, clock))
    carrier.look_up(lookup, [memoryview(ids).cast("B")])


def read(line: Line, count: int):
    found = np.empty((count, DIM), np.float32)
    pieces = [memoryview(found.reshape(-1)).cast("B")]
    while (answer := line.carrier.receive(lambda _: pieces)) is None:
        pass
    assert isinstance(answer, RowsAnswer)
    return found


def push_rows(line: Line, ids, gradient, **header) -> StepAnswer:
    """Push rows of one table, and nothing for the variables."""
    line.sequence, line.clock = line.sequence + 1, line.clock + 1
    message = PushHeader(
        sequence=line.sequence,
        phase=line.phase,
        clock=line.clock,
        pulled_version=line.version,
        absent=range(line.layout.parameter_slices),
        tables=[RowCount(0, ids.size)],
        **header,
    )
    rows = [memoryview(ids).cast("B"), memoryview(gradient.reshape(-1)).cast("B")]
    line.carrier.push(message, [], rows)
    return line.receive()


def spread(count: int):
    return np.arange(count, dtype=np.int64) * 7 - 1000


@pytest.mark.parametrize("count", [FEW, MANY])
@pytest.mark.parametrize("shapes", [((4, 3),), ()], ids=["with variables", "tables alone"])
def test_rows_come_and_gradients_go(transport, count, shapes):
    with running_shard() as shard:
        model = start_with(shard, table_spec(dim=DIM), shapes=shapes)
        with line(shard, model, transport) as worker:
            ids = spread(count)
            before = look_up(worker, ids)
            gradient = np.random.default_rng(0).integers(-9, 9, (count, DIM)).astype(np.float32)
            for step in range(1, 4):
                assert push_rows(worker, ids, gradient).outcome == Outcome.APPLIED
                assert np.allclose(look_up(worker, ids, step + 1), before - 0.5 * step * gradient, atol=1e-5)
            assert model.tables[0].rows == count


def test_rows_asked_for_one_after_another_do_not_get_mixed_up(transport):
    with running_shard() as shard:
        model = start_with(shard, table_spec(dim=DIM))
        with line(shard, model, transport) as worker:
            lots = [spread(MANY) + 1000 * number for number in range(3)]
            for number, ids in enumerate(lots, 1):
                ask(worker.carrier, ids, number, worker.phase, 1)
            found = [read(worker, MANY) for _ in lots]
            for ids, rows in zip(lots, found, strict=True):
                assert np.array_equal(look_up(worker, ids[:FEW].copy(), 9), rows[:FEW])
            assert not np.array_equal(found[0], found[1])


def test_rows_for_the_next_step_may_be_asked_for_before_this_one_is_pushed(transport):
    with running_shard() as shard:
        model = start_with(shard, table_spec(dim=DIM, init=RowInit("constant", 1.0)))
        with line(shard, model, transport) as worker:
            ids = spread(MANY)
            ask(worker.carrier, ids, 1, worker.phase, worker.clock + 2)
            first = read(worker, MANY)
            push_rows(worker, ids, np.ones((MANY, DIM), np.float32))
            assert (first == 1.0).all()
            assert (look_up(worker, ids, 2) == 0.5).all()


def test_what_is_larger_than_the_shared_memory_travels_on_the_socket(monkeypatch):
    monkeypatch.setattr("ps_server.shard.transport.side_channels.ROOM_BYTES", 2 * INLINE_BYTES)
    with running_shard() as shard:
        model = start_with(shard, table_spec(dim=DIM))
        with line(shard, model, "shm") as worker:
            ids = spread(MANY)
            before = look_up(worker, ids)
            push_rows(worker, ids, np.ones((MANY, DIM), np.float32))
            assert np.allclose(look_up(worker, ids, 2), before - 0.5, atol=1e-6)


def test_a_push_that_names_more_shared_rows_than_there_can_be_is_refused(monkeypatch):
    monkeypatch.setattr("ps_server.shard.transport.side_channels.ROOM_BYTES", 2 * INLINE_BYTES)
    with running_shard() as shard:
        model = start_with(shard, table_spec(dim=DIM))
        with line(shard, model, "shm") as worker:
            message = PushHeader(sequence=1, clock=1, absent=[0], rows_in_room=True, tables=[RowCount(0, MANY)])
            worker.carrier.push(message, [])
            with pytest.raises(InvalidRequest, match="more rows in shared memory"):
                worker.receive()


@pytest.mark.parametrize("name", ["grpc", "bulk"])
def test_a_push_that_names_shared_rows_where_nothing_is_shared_is_refused(name):
    with running_shard() as shard:
        model = start_with(shard, table_spec(dim=DIM))
        with line(shard, model, name) as worker:
            message = PushHeader(sequence=1, clock=1, absent=[0], rows_in_room=True, tables=[RowCount(0, 1)])
            worker.carrier.push(message, [])
            with pytest.raises(InvalidRequest, match="shared memory"):
                worker.receive()


def test_a_worker_that_goes_with_rows_lent_to_it_leaves_the_shard_in_order(transport):
    with running_shard() as shard:
        model = start_with(shard, table_spec(dim=DIM))
        ids = spread(MANY)
        with line(shard, model, transport) as worker:
            ask(worker.carrier, ids, 1, worker.phase, 1)
        with line(shard, model, transport) as worker:
            assert look_up(worker, ids).shape == (MANY, DIM)
