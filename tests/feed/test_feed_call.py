"""The Feed call of a real shard, spoken with the generated stubs only."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import grpc
import numpy as np
import pytest

from ps_protocol.errors import InvalidRequest, ModelMoved, StateLost, UnknownModel
from ps_protocol.v1 import shard_pb2 as pb
from ps_protocol.v1 import shard_pb2_grpc
from tests.support.shards import TestShard, error_of, refused_as, running_shard
from tests.support.tables import RowStream, array, get_rows, start_with, table_spec

DENSE = bytes(64)


def feed(shard: TestShard, cursor: pb.FeedCursor | None = None, **fields: Any) -> Iterator[tuple[pb.FeedBatch, bytes]]:
    """Batches with their payloads."""
    request = pb.FeedRequest(model="model", cursor=cursor, **fields)
    replies = shard_pb2_grpc.ShardStub(shard.channel).Feed(request)
    try:
        for reply in replies:
            batch, payload = reply.batch, b""
            while len(payload) < batch.payload_bytes:
                payload += next(replies).chunk.payload
            yield batch, payload
    finally:
        replies.cancel()


def push(stream: RowStream, *ids: int) -> None:
    stream.exchange_rows(DENSE, {0: (array(*ids), np.ones((len(ids), 4), np.float32))})


def test_a_batch_is_ids_and_then_rows_and_the_last_one_says_that_it_is():
    with running_shard() as shard:
        start_with(shard, table_spec())
        push(RowStream(shard), 5, -3, 1 << 62)
        (batch, payload), (last, _) = feed(shard)
        assert (batch.rows, batch.width, list(batch.buckets), batch.HasField("cursor")) == (3, 4, [*range(16)], False)
        assert (last.rows, last.current, last.cursor.updates) == (0, True, 1)
        ids = np.frombuffer(payload, np.int64, 3)
        assert sorted(ids) == [-3, 5, 1 << 62]
        assert np.array_equal(np.frombuffer(payload, np.float32, offset=24).reshape(3, 4), get_rows(shard, ids, 4))


def test_a_stream_goes_on_with_what_changes_and_a_cursor_goes_on_where_it_was():
    with running_shard() as shard:
        start_with(shard, table_spec())
        stream = RowStream(shard)
        push(stream, 1, 2)
        batches = feed(shard, follow=True)
        while not (found := next(batches))[0].current:
            pass
        push(stream, 2, 3)
        batch, payload = next(batches)
        assert sorted(np.frombuffer(payload, np.int64, 2)) == [2, 3]
        assert (batch.cursor.updates, len(batch.buckets)) == (2, 0)
        batches.close()
        ((again, _),) = feed(shard, found[0].cursor)
        assert (again.rows, again.cursor) == (2, batch.cursor)


def test_a_table_or_model_that_is_not_there_is_refused(monkeypatch):
    monkeypatch.setattr("ps_server.shard.times.UNKNOWN_SECONDS", 0.2)
    with running_shard() as shard:
        with refused_as(UnknownModel):
            list(feed(shard))
        start_with(shard, table_spec())
        with pytest.raises(grpc.RpcError) as caught:
            list(feed(shard, table=1))
        error = error_of(caught.value)
        assert isinstance(error, InvalidRequest)
        assert (error.expected, error.actual) == ("a number below 1", "1")


def test_a_stream_ends_with_what_stops_the_model():
    with running_shard() as shard:
        model = start_with(shard, table_spec())
        batches = feed(shard, follow=True)
        next(batches)

        async def stop() -> None:
            model.stop(StateLost("gone"))

        shard.loop.run(stop())
        with refused_as(StateLost):
            list(batches)


def test_a_reader_by_an_older_shard_map_is_told_that_the_model_moved():
    with running_shard() as shard:
        model = start_with(shard, table_spec())
        held = model.layout.shard_map
        model.layout = replace(model.layout, shard_map=replace(held, epoch=2))
        with refused_as(ModelMoved):
            list(feed(shard, epoch=1))
