"""No message about rows that a worker can send breaks the shard, its tables, or another worker's training."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ps_protocol.v1 import shard_pb2 as pb
from tests.protocol.fuzz.attacked import Target, call, target, whole_streams
from tests.protocol.options import OPTIONS
from tests.support.shards import wait_until
from tests.support.tables import RowStream, array, start_with, table_spec

DENSE_BYTES = 64
LARGE = st.sampled_from([1 << 20, (1 << 32) - 1, 1 << 40, (1 << 63) - 1, (1 << 64) - 1])
COUNTS = st.integers(0, 4) | LARGE
NUMBERS = st.integers(0, 2) | st.sampled_from([(1 << 31) - 1, (1 << 32) - 1])
TABLES = st.lists(st.builds(pb.TableRows, table=NUMBERS, rows=COUNTS), max_size=3)
IDS = st.lists(st.integers(-3, 3) | st.sampled_from([-(1 << 63), (1 << 63) - 1]), max_size=4).map(
    lambda ids: np.array(ids, np.int64).tobytes()
)
FLOATS = st.lists(st.floats(width=32), max_size=24).map(lambda values: np.array(values, np.float32).tobytes())
PAYLOADS = st.one_of(
    st.builds(lambda dense, ids, rows: dense + ids + rows, st.sampled_from([b"", bytes(DENSE_BYTES)]), IDS, FLOATS),
    st.binary(max_size=80),
)
LOOKUPS = st.builds(
    pb.Lookup,
    number=st.integers(0, 3) | LARGE,
    tables=TABLES,
    phase=st.just(0) | LARGE,
    clock=st.integers(0, 3) | LARGE,
    now=st.booleans(),
    payload=st.just(b"") | IDS,
).map(lambda lookup: pb.StepRequest(lookup=lookup))
PUSHES = st.builds(
    pb.PushHeader,
    sequence=st.integers(1, 4),
    clock=st.integers(1, 4),
    tables=TABLES,
    table_arguments=st.lists(OPTIONS, max_size=3),
    skipped=st.booleans(),
    finite=st.booleans(),
    rows_in_room=st.booleans(),
    payload=st.just(b"") | PAYLOADS,
).map(lambda push: pb.StepRequest(push=push))
CHUNKS = st.builds(pb.Chunk, position=st.just(0) | st.integers(0, 50), payload=PAYLOADS).map(
    lambda chunk: pb.StepRequest(chunk=chunk)
)
MESSAGES = (LOOKUPS | PUSHES | CHUNKS).map(pb.StepRequest.SerializeToString)


@dataclass(repr=False)
class Trained(Target):
    """A shard with two tables."""

    def assert_unharmed(self) -> None:
        wait_until(lambda: self.model.pool.in_use == 0)
        version = self.model.tracker.version
        ids, gradient = array(100, 200), np.ones((2, 3), np.float32)
        assert isinstance(self.bystander, RowStream)
        before = self.bystander.look_up(ids, 3, table=1)
        result, _ = self.bystander.exchange_rows(bytes(DENSE_BYTES), {1: (ids, gradient)})
        assert (result.outcome, result.version) == (pb.OUTCOME_APPLIED, version + 1)
        assert np.allclose(self.bystander.look_up(ids, 3, table=1), before - 0.5 * gradient, rtol=1e-3, atol=1e-3)
        logged = self.logged[:]
        self.logged.clear()
        assert logged == []


@pytest.fixture(scope="module")
def attacked() -> Iterator[Trained]:
    """One shard for all examples: what harms it in one is seen in that or in the next."""
    with target() as made:
        shard = made.shard
        model = start_with(shard, table_spec(), table_spec("users", dim=3), name="rows")
        bystander = RowStream(shard, rank=1, incarnation=2, name="rows")
        yield Trained(shard, model, bystander, made.logged)
        bystander.end()


def opening(attacked: Trained) -> bytes:
    message = pb.StepRequest.FromString(attacked.opening())
    message.open.model = "rows"
    return message.SerializeToString()


@whole_streams
@given(messages=st.lists(MESSAGES, max_size=5))
@example(
    messages=[
        pb.StepRequest(
            push=pb.PushHeader(
                sequence=1, clock=1, payload=bytes(DENSE_BYTES) + bytes(8), tables=[pb.TableRows(table=0, rows=1)]
            )
        ).SerializeToString()
    ]
)
def test_whatever_comes_about_rows_on_an_open_stream_harms_nobody_else(attacked: Trained, messages: list[bytes]):
    call(attacked, "Step", [opening(attacked), *messages])
    attacked.assert_unharmed()


@whole_streams
@given(
    header=st.builds(
        pb.LoadRowsHeader,
        worker=st.just(pb.WorkerId(rank=1, incarnation=2)),
        model=st.just("rows"),
        table=NUMBERS,
        rows=COUNTS,
        with_state=st.booleans(),
        only_new=st.booleans(),
    ),
    chunks=st.lists(st.builds(pb.Chunk, position=st.just(0) | st.integers(0, 50), payload=PAYLOADS), max_size=3),
)
def test_whatever_is_loaded_as_rows_harms_nobody(attacked: Trained, header: pb.LoadRowsHeader, chunks: list[pb.Chunk]):
    messages = [pb.LoadRowsRequest(header=header), *(pb.LoadRowsRequest(chunk=chunk) for chunk in chunks)]
    call(attacked, "LoadRows", [message.SerializeToString() for message in messages])
    attacked.assert_unharmed()


@whole_streams
@given(
    request=st.builds(pb.GetRowsRequest, model=st.just("rows"), table=NUMBERS, ids=IDS | st.binary(max_size=20))
    | st.builds(
        pb.SaveBucketsRequest, model=st.just("rows"), table=NUMBERS, buckets=st.lists(NUMBERS | st.just(16), max_size=3)
    )
)
def test_whatever_is_asked_of_rows_harms_nobody(attacked: Trained, request: pb.GetRowsRequest | pb.SaveBucketsRequest):
    method = "GetRows" if isinstance(request, pb.GetRowsRequest) else "SaveBuckets"
    call(attacked, method, [request.SerializeToString()])
    attacked.assert_unharmed()
