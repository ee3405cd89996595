"""Rows of tables on a real shard, spoken to with the generated stubs only."""

from __future__ import annotations

import threading

import numpy as np

from ps_protocol.model.spec import Consistency, Mode
from ps_protocol.model.tables import RowInit, RowLife
from ps_protocol.v1 import shard_pb2 as pb
from ps_protocol.v1 import shard_pb2_grpc
from ps_protocol.wire.convert.options import options_to_pb
from tests.support.shards import RecordingLog, running_shard
from tests.support.tables import (
    RowStream,
    array,
    get_rows,
    load_rows,
    start_with,
    table_spec,
)

SYNC = Consistency(Mode.SYNC)
DENSE = bytes(64)
IDS = array(5, -3, 1 << 62, 0)


def test_a_row_begins_with_values_that_depend_on_its_id_alone_and_looking_does_not_make_it():
    with running_shard() as shard:
        model = start_with(shard, table_spec(), table_spec("users", dim=3))
        stream = RowStream(shard)
        rows = stream.look_up(IDS, 4)
        assert np.array_equal(stream.look_up(IDS[::-1].copy(), 4)[::-1], rows)
        assert len(np.unique(rows)) == rows.size
        assert model.tables[0].rows == 0


def test_a_push_changes_its_rows_and_no_other_and_the_variables_with_them():
    with running_shard() as shard:
        model = start_with(shard, table_spec(), table_spec("users", dim=3))
        stream = RowStream(shard)
        before, others = stream.look_up(IDS, 4), stream.look_up(array(8, 9), 3, table=1)
        gradient = np.arange(8, dtype=np.float32).reshape(2, 4)
        result, payload = stream.exchange_rows(
            np.ones(12, np.float32).tobytes() + bytes(16), {0: (IDS[1:3].copy(), gradient)}
        )
        assert result.outcome == pb.OUTCOME_APPLIED
        assert np.allclose(np.frombuffer(payload, np.float32)[:12], -0.1)
        expected = before.copy()
        expected[1:3] -= 0.5 * gradient
        assert np.array_equal(stream.look_up(IDS, 4), expected)
        assert np.array_equal(stream.look_up(array(8, 9), 3, table=1), others)
        assert [table.rows for table in model.tables] == [2, 0]


def test_several_tables_come_in_one_answer_in_the_order_asked():
    with running_shard() as shard:
        start_with(shard, table_spec(), table_spec("users", dim=3))
        stream = RowStream(shard)
        stream.ask({0: IDS, 1: IDS[:2]}, number=9)
        both = stream.rows(1).reshape(-1)
        assert np.array_equal(both[:16].reshape(4, 4), stream.look_up(IDS, 4))
        assert np.array_equal(both[16:].reshape(2, 3), stream.look_up(IDS[:2], 3, table=1))


def test_no_ids_are_no_rows():
    with running_shard() as shard:
        start_with(shard, table_spec())
        stream = RowStream(shard)
        assert stream.look_up(array(), 4).size == 0
        result, _ = stream.exchange_rows(DENSE, {0: (array(), np.empty((0, 4), np.float32))})
        assert result.outcome == pb.OUTCOME_APPLIED


def test_a_model_of_tables_alone_is_trained():
    with running_shard() as shard:
        model = start_with(shard, table_spec(init=RowInit("constant", 2.0)), shapes=())
        stream = RowStream(shard)
        stream.exchange_rows(b"", {0: (IDS, np.ones((4, 4), np.float32))})
        assert np.array_equal(stream.look_up(IDS, 4), np.full((4, 4), 1.5, np.float32))
        assert model.tables[0].updates == 1


def test_a_repeated_push_changes_no_row_again():
    with running_shard() as shard:
        start_with(shard, table_spec())
        stream = RowStream(shard)
        stream.exchange_rows(DENSE, {0: (IDS, np.ones((4, 4), np.float32))})
        once = stream.look_up(IDS, 4)
        again = RowStream(shard)
        result, _ = again.exchange_rows(DENSE, {0: (IDS, np.ones((4, 4), np.float32))}, sequence=1, clock=1)
        assert result.outcome == pb.OUTCOME_DUPLICATE
        assert np.array_equal(again.look_up(IDS, 4), once)


def test_sync_applies_the_mean_of_all_pushes_once():
    with running_shard({0: 1, 1: 2}, SYNC) as shard:
        start_with(shard, table_spec(init=RowInit("constant", 0.0)))
        one, two = RowStream(shard), RowStream(shard, rank=1, incarnation=2)
        two.push_rows(DENSE, {0: (array(1, 2), np.full((2, 4), 4.0, np.float32))})
        one.push_rows(DENSE, {0: (array(2, 3), np.full((2, 4), 2.0, np.float32))})
        one.result(), two.result()
        rows = one.look_up(array(1, 2, 3), 4)
        assert np.array_equal(rows[:, 0], np.array([-1.0, -1.5, -0.5], np.float32))


def test_a_lookup_for_a_later_step_waits_as_long_as_the_mode_says():
    with running_shard({0: 1, 1: 2}, Consistency(Mode.SSP, staleness=1)) as shard:
        start_with(shard, table_spec(init=RowInit("constant", 0.0)))
        one, two = RowStream(shard), RowStream(shard, rank=1, incarnation=2)
        # For the second push: allowed, both may be one step ahead. For the third: when the other has made one.
        one.ask({0: IDS}, ahead=1)
        assert not one.rows(4).any()
        one.ask({0: IDS}, ahead=2)
        came = threading.Event()
        rows = []

        def read() -> None:
            rows.append(one.rows(4))
            came.set()

        reading = threading.Thread(target=read)
        reading.start()
        two.exchange_rows(DENSE, {0: (IDS, np.ones((4, 4), np.float32))})
        one.push_rows(DENSE, {})
        assert came.wait(60)
        reading.join()
        assert np.array_equal(rows[0], np.full((4, 4), -0.5, np.float32))


def test_a_lookup_in_sync_for_the_next_step_brings_what_this_step_makes():
    with running_shard({0: 1}, SYNC) as shard:
        start_with(shard, table_spec(init=RowInit("constant", 0.0)))
        stream = RowStream(shard)
        stream.ask({0: IDS}, ahead=1)
        stream.push_rows(DENSE, {0: (IDS, np.ones((4, 4), np.float32))})
        assert np.array_equal(stream.rows(4), np.full((4, 4), -0.5, np.float32))
        assert stream.result()[0].outcome == pb.OUTCOME_APPLIED


def test_a_lookup_whatever_the_mode_is_answered_at_once():
    with running_shard({0: 1, 1: 2}, SYNC) as shard:
        start_with(shard, table_spec())
        stream = RowStream(shard)
        stream.ask({0: IDS}, ahead=7, now=True)
        assert stream.rows(4).shape == (4, 4)


def test_the_learning_rate_that_comes_with_a_push_is_used_until_another_comes():
    with running_shard() as shard:
        start_with(shard, table_spec(init=RowInit("constant", 0.0)))
        stream = RowStream(shard)
        ones = {0: (array(1), np.ones((1, 4), np.float32))}
        stream.exchange_rows(DENSE, ones, table_arguments=[options_to_pb({"lr": 0.25})])
        stream.exchange_rows(DENSE, ones)
        assert stream.look_up(array(1), 4)[0, 0] == -0.5


def test_rows_are_loaded_and_read_without_a_stream():
    with running_shard() as shard:
        model = start_with(shard, table_spec(optimizer="adagrad"))
        rows = np.arange(16, dtype=np.float32).reshape(4, 4)
        assert load_rows(shard, IDS, rows).written == 4
        assert np.array_equal(get_rows(shard, IDS, 4), rows)
        load_rows(shard, array(5, 77), np.zeros((2, 4), np.float32), only_new=True)
        assert np.array_equal(get_rows(shard, array(5, 77), 4), np.stack([rows[0], np.zeros(4, np.float32)]))
        assert model.tables[0].rows == 5


def test_a_bucket_is_read_whole():
    with running_shard() as shard:
        model = start_with(shard, table_spec(optimizer="rowwise_adagrad"))
        stream = RowStream(shard)
        ids = np.arange(100)
        stream.exchange_rows(DENSE, {0: (ids, np.ones((100, 4), np.float32))})
        stub = shard_pb2_grpc.ShardStub(shard.channel)
        found = []
        for reply in stub.SaveBuckets(pb.SaveBucketsRequest(model="model", table=0, buckets=range(16))):
            if reply.HasField("bucket"):
                bucket, payload = reply.bucket, b""
            else:
                payload += reply.chunk.payload
            if len(payload) == bucket.payload_bytes:
                found.append(np.frombuffer(payload[: 8 * bucket.rows], np.int64))
                assert (bucket.width, bucket.updates) == (5, 1)
        assert sorted(np.concatenate(found)) == list(range(100))
        assert model.tables[0].rows == 100


def test_every_update_of_rows_is_in_the_log():
    log = RecordingLog()
    with running_shard(log=log) as shard:
        start_with(shard, table_spec())
        stream = RowStream(shard)
        stream.exchange_rows(DENSE, {0: (IDS, np.ones((4, 4), np.float32))})
        ((update, _),) = log.updates
        (rows,) = update.step.tables
        assert np.array_equal(rows.ids, IDS)
        assert rows.updates == 1


def test_the_status_of_a_model_tells_of_its_tables():
    with running_shard() as shard:
        start_with(shard, table_spec(life=RowLife(admit_after=2)))
        stream = RowStream(shard)
        stream.exchange_rows(DENSE, {0: (IDS, np.ones((4, 4), np.float32))})
        stream.exchange_rows(DENSE, {0: (IDS[:1], np.ones((1, 4), np.float32))})
        (table,) = shard_pb2_grpc.ShardStub(shard.channel).GetModel(pb.GetModelRequest(model="model")).tables
        assert (table.name, table.rows, table.waiting, table.updates, table.inserted) == ("ads", 1, 3, 2, 1)
        assert table.size_bytes > 0
