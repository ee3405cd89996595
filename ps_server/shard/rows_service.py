"""Rows of tables beside steps: the calls that read some, write some and read whole buckets; and those that expire."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from google.protobuf.message import DecodeError

from ps_protocol.cluster.answers import RowsAnswer
from ps_protocol.cluster.view import Role
from ps_protocol.errors import InvalidRequest, PsError, StorageFull
from ps_protocol.logs import EventLogger
from ps_protocol.model.layout import Layout
from ps_protocol.model.tables import MAX_ROWS_BYTES, Ids, RowCount
from ps_protocol.v1 import shard_pb2 as pb
from ps_protocol.wire.chunks import LOAD_ROWS_REQUESTS, SAVE_BUCKETS_REPLIES, ChunkReceiver
from ps_protocol.wire.convert.shard import BUCKET_HEADER
from ps_server.consistency.tracker_state import pushes_to_pb, worker_from_pb
from ps_server.log.entries import RowsLoaded
from ps_server.log.messages import bytes_of
from ps_server.shard import times
from ps_server.shard.access import Fence
from ps_server.shard.byte_budget import READERS
from ps_server.shard.registry import Registry
from ps_server.shard.step.model import ShardModel
from ps_server.shard.step.pushed_rows import wanted
from ps_server.shard.transport.grpc_stream import (
    Context,
    GrpcServerTransport,
    read_first,
    read_soon,
    reader_gone,
    write,
)
from ps_server.tasks import until

if TYPE_CHECKING:
    from ps_server.tables.table import ShardTable


class RowsService:
    """Called by ShardService on the shard's event loop."""

    def __init__(self, registry: Registry, fence: Fence) -> None:
        self._registry = registry
        self._fence = fence

    async def get_rows(self, request: pb.GetRowsRequest, context: Context) -> None:
        """Rows as they are now, in every mode."""
        model = await self._registry.model(request.model, request.epoch)
        model.values.require()
        if len(request.ids) % 8:
            raise InvalidRequest("ids are not int64", expected="a multiple of 8 bytes", actual=f"{len(request.ids)}")
        asked = wanted([RowCount(request.table, len(request.ids) // 8)], model.layout)
        asked.buffer[:] = request.ids
        async with self._registry.context.answers.taken(READERS, asked.rows_bytes):
            version, rows = await model.rows.look_up(asked)
            with reader_gone():
                await GrpcServerTransport(context).send_payload(RowsAnswer(version=version), [rows])

    async def load_rows(self, context: Context) -> pb.LoadRowsReply:
        """Write rows, new ones or over those there."""
        message = _parse(await read_first(context, *self._registry.context.first_message) or b"")
        if message.WhichOneof("body") != "header":
            raise InvalidRequest("LoadRows begins with its header", actual=str(message.WhichOneof("body")))
        header = message.header
        writers = Role.WORKER, Role.EVALUATOR
        worker = await self._fence.admit(worker_from_pb(header.worker), header.membership_revision, *writers)
        model = await self._registry.model(header.model, header.epoch)
        with model.uploads.place(worker, worker.incarnation) as ended:
            ids, rows = _room(header, model.layout)
            receiver = ChunkReceiver(LOAD_ROWS_REQUESTS, [bytes_of(ids), bytes_of(rows)], "LoadRows")
            async with self._registry.context.uploads.taken(worker, ids.nbytes + rows.nbytes):
                await until(ended, receiver.receive_async(lambda: read_soon(context)))
        if not np.isfinite(rows).all():
            raise InvalidRequest(
                "rows hold NaN or infinity; nothing was written",
                variable=model.layout.shard_map.spec.tables[header.table].name,
                shard=str(model.layout.shard),
            )
        await model.rows.read(lambda tables: _check(tables[header.table], ids))
        entry = RowsLoaded(model.name, header.table, ids, rows, header.with_state, header.only_new)
        await model.rows.write(entry, ids.nbytes + rows.nbytes, check=lambda: self._fence.check(worker, *writers))
        return pb.LoadRowsReply(written=ids.size)

    async def save_buckets(self, request: pb.SaveBucketsRequest, context: Context) -> None:
        """Everything of some buckets, each as it is at one moment."""
        model = await self._registry.model(request.model, request.epoch)
        model.values.require()
        _table(model.layout, request.table)
        here = set(model.layout.buckets[request.table])
        if elsewhere := [bucket for bucket in request.buckets if bucket not in here]:
            raise InvalidRequest(
                "a bucket is not on this shard",
                variable=model.layout.shard_map.spec.tables[request.table].name,
                shard=str(model.layout.shard),
                actual=str(elsewhere[0]),
            )
        pushes: pb.KnownPushes | None = pushes_to_pb(model.known_pushes())
        buckets = ((request.table, bucket) for bucket in request.buckets)
        while group := (await model.copy_buckets(buckets))[1]:
            for table, contents in group:
                reply = pb.SaveBucketsReply(bucket=BUCKET_HEADER.all_to_pb([contents.header(table)])[0], pushes=pushes)
                await write(context, reply.SerializeToString())
                pushes = None
                for chunk in SAVE_BUCKETS_REPLIES.chunks(contents.pieces()):
                    await write(context, chunk)


def _check(table: ShardTable, ids: Ids) -> None:
    """In the executor. Raises InvalidRequest, TableFull."""
    table.check_here(ids)
    table.room_for(ids, loading=True)


def _table(layout: Layout, number: int) -> None:
    known = len(layout.shard_map.spec.tables)
    if number >= known:
        raise InvalidRequest(
            "a table does not exist", shard=str(layout.shard), expected=f"a number below {known}", actual=str(number)
        )


def _room(header: pb.LoadRowsHeader, layout: Layout) -> tuple[Ids, npt.NDArray[np.float32]]:
    _table(layout, header.table)
    spec = layout.shard_map.spec.tables[header.table]
    width = spec.width if header.with_state else spec.dim
    if header.rows * (8 + 4 * width) > MAX_ROWS_BYTES:
        raise InvalidRequest(
            "more rows than one call may bring",
            variable=spec.name,
            expected=f"at most {MAX_ROWS_BYTES // (8 + 4 * width)} rows",
            actual=str(header.rows),
            remedy="send them in several calls",
        )
    return np.empty(header.rows, np.int64), np.empty((header.rows, width), np.float32)


def _parse(data: bytes) -> pb.LoadRowsRequest:
    try:
        return pb.LoadRowsRequest.FromString(data)
    except DecodeError as error:
        raise InvalidRequest("a message is not a LoadRowsRequest", actual=f"{len(data)} bytes") from error


logger = EventLogger(__name__)


class RowExpiry:
    """One task of the shard's event loop. ``models()`` are those that are served.

    A row is never dropped while a push with its id waits for its round. The ids of dropped rows are logged, so that a
    replay needs no clock; they are dropped in small batches, between updates.
    """

    def __init__(self, models: Callable[[], Sequence[ShardModel]], clock: Callable[[], float] = time.time) -> None:
        self._models = models
        self._clock = clock

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(times.EXPIRY_SECONDS)
            for model in self._models():
                try:
                    await self.look(model)
                except StorageFull as error:
                    logger.warning("table.waits", "rows of model '%s' stay for now: %s", model.name, error)
                except PsError as error:
                    logger.debug("rows of model '%s' stay for now: %s", model.name, error)

    async def look(self, model: ShardModel) -> None:
        """Drop the expired rows of ``model``, batch by batch. Raises PsError."""
        for number in range(len(model.tables)):
            while await model.rows.expire(number, self._clock()):
                pass
