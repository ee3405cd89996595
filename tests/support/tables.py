"""Models with tables for tests: their specs, a client of rows made of generated stubs, and what rows ought to be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ps_protocol.model.row_optimizers import ROW_OPTIMIZERS
from ps_protocol.model.spec import ModelSpec, ShardMap
from ps_protocol.model.tables import Ids, RowInit, RowLife, TableSpec
from ps_protocol.v1 import shard_pb2 as pb
from ps_protocol.v1 import shard_pb2_grpc
from ps_server.shard.step.model import ShardModel
from tests.support.shards import StubStream, TestShard, load, simple_spec, whole_map, writer

Rows = npt.NDArray[np.float32]


def table_spec(
    name: str = "ads",
    dim: int = 4,
    optimizer: str = "sgd",
    *,
    init: RowInit | None = None,
    life: RowLife | None = None,
    buckets: int = 16,
    seed: int = 7,
    **options: float,
) -> TableSpec:
    """A table whose learning rate is 0.5 unless told otherwise."""
    arguments = {**ROW_OPTIMIZERS[optimizer].defaults(), "lr": 0.5, **options}
    return TableSpec(
        name, dim, seed, init or RowInit("uniform", -1.0, 1.0), optimizer, arguments, life or RowLife(), buckets
    )


def spec_with(*tables: TableSpec, shapes: Sequence[tuple[int, ...]] = ((4, 3),), **arguments: Any) -> ModelSpec:
    """A model with a few variables and ``tables``."""
    spec = simple_spec(*shapes, **arguments)
    if not shapes:
        spec = replace(spec, variables=())
    return replace(spec, tables=tables)


def whole_table_map(spec: ModelSpec) -> ShardMap:
    """Everything on shard 0."""
    return replace(whole_map(spec), tables=tuple((0,) * table.buckets for table in spec.tables))


def start_with(shard: TestShard, *tables: TableSpec, **arguments: Any) -> ShardModel:
    """Place a model with ``tables`` and give its variables zeros for values."""
    model = shard.place(whole_table_map(spec_with(*tables, **arguments)))
    values = bytes(model.layout.region_bytes)
    assert load(shard, model, values).written
    return model


def array(*ids: int) -> Ids:
    """Ids as an array."""
    return np.array(ids, np.int64)


class RowStream(StubStream):
    """A step stream that asks for rows and pushes them."""

    def ask(self, wanted: Mapping[int, Ids], *, number: int = 1, ahead: int = 0, now: bool = False) -> None:
        """Ask for rows for the next push, or for one ``ahead`` steps later."""
        tables = [pb.TableRows(table=table, rows=ids.size) for table, ids in wanted.items()]
        payload = b"".join(ids.tobytes() for ids in wanted.values())
        lookup = pb.Lookup(number=number, tables=tables, phase=self.phase, clock=self.clock + 1 + ahead, now=now)
        self.send(lookup=lookup)
        for position in range(0, len(payload), 13):
            self.send(chunk=pb.Chunk(position=position, payload=payload[position : position + 13]))

    def rows(self, dim: int) -> Rows:
        """The rows asked for, [n, dim]."""
        while (reply := next(self.replies)).WhichOneof("body") == "waiting":
            pass
        assert reply.WhichOneof("body") == "rows", reply
        payload = reply.rows.payload
        while len(payload) < reply.rows.payload_bytes:
            payload += next(self.replies).chunk.payload
        return np.frombuffer(payload, np.float32).reshape(-1, dim)

    def look_up(self, ids: Ids, dim: int, *, table: int = 0) -> Rows:
        self.ask({table: ids})
        return self.rows(dim)

    def push_rows(self, dense: bytes, rows: Mapping[int, tuple[Ids, Rows]], **header: Any) -> None:
        """Send a push with gradients of rows, by table."""
        tables = [pb.TableRows(table=table, rows=ids.size) for table, (ids, _) in rows.items()]
        payload = dense + b"".join(ids.tobytes() for ids, _ in rows.values())
        payload += b"".join(np.ascontiguousarray(values, np.float32).tobytes() for _, values in rows.values())
        self.push(payload, tables=tables, **header)

    def exchange_rows(
        self, dense: bytes, rows: Mapping[int, tuple[Ids, Rows]], **header: Any
    ) -> tuple[pb.StepResult, bytes]:
        self.push_rows(dense, rows, **header)
        return self.result()


def get_rows(shard: TestShard, ids: Ids, dim: int, *, table: int = 0, model: str = "model") -> Rows:
    """Rows by the unary call."""
    stub = shard_pb2_grpc.ShardStub(shard.channel)
    replies = stub.GetRows(pb.GetRowsRequest(model=model, table=table, ids=ids.tobytes()))
    rows = next(replies).rows
    payload = rows.payload
    for reply in replies:
        payload += reply.chunk.payload
    return np.frombuffer(payload, np.float32).reshape(-1, dim)


def load_rows(shard: TestShard, ids: Ids, rows: Rows, *, table: int = 0, **header: Any) -> pb.LoadRowsReply:
    """Write rows by the unary call, as the lowest live worker."""
    stub = shard_pb2_grpc.ShardStub(shard.channel)
    head = pb.LoadRowsHeader(model="model", table=table, rows=ids.size, **({"worker": writer(shard)} | header))
    payload = ids.tobytes() + np.ascontiguousarray(rows, np.float32).tobytes()
    chunk = pb.Chunk(position=0, payload=payload)
    return stub.LoadRows(iter([pb.LoadRowsRequest(header=head), pb.LoadRowsRequest(chunk=chunk)]))
