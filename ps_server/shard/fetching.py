"""Gets the slices and buckets that come to this shard from the shards that hold them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any

import grpc
import torch

from ps_protocol import convert
from ps_protocol.channel import CLIENT_OPTIONS
from ps_protocol.client.errors import translate
from ps_protocol.errors import InternalError, Unavailable
from ps_protocol.frames import STATE_CHUNK_FIELD, Scatter, parse_chunk
from ps_protocol.layout import Layout
from ps_protocol.model import ShardMap
from ps_protocol.v1 import shard_pb2 as pb
from ps_protocol.view import Member
from ps_server.consistency import TrackerMemento
from ps_server.log import Prepared
from ps_server.optimizers import StateEntry, StateKey, tensor_bytes, torch_dtype
from ps_server.shard.arrivals import Arrivals, arrivals
from ps_server.tables import BucketContents

FETCH_SECONDS = 60.0
"""How long another shard may take to send what comes from it."""

_SAVE = "/ps_protocol.v1.Shard/Save"
_SAVE_BUCKETS = "/ps_protocol.v1.Shard/SaveBuckets"


async def fetch(held: ShardMap, wanted: ShardMap, shard: int, members: Mapping[int, Member]) -> Prepared:
    """Everything that comes to ``shard``, from ``members``, the live shards by number; the sources must stand still.

    Raises as ``arrivals``, and Unavailable, also for a source that is no live shard.
    """
    layout = Layout.of(wanted, shard)
    parcels = arrivals(held, wanted, shard)
    incoming = tuple(index for parcel in parcels for _, index in parcel.slices)
    values = memoryview(bytearray(sum(_size(layout, index) for index in incoming)))
    entries: list[StateEntry] = []
    buckets: list[tuple[int, BucketContents]] = []
    tracker: TrackerMemento | None = None
    begin = 0
    for parcel in parcels:
        if parcel.source not in members:
            raise Unavailable(
                f"slices come from shard {parcel.source}, which is away",
                shard=str(shard),
                remedy="start it, then move again",
            )
        end = begin + sum(_size(layout, index) for _, index in parcel.slices)
        async with AsyncExitStack() as stack:
            source = _Source(held, parcel, members[parcel.source].address, stack)
            if parcel.slices:
                entries += await source.slices(values[begin:end])
            for table, numbers in parcel.buckets:
                buckets += [(table, contents) for contents in await source.buckets(table, numbers)]
        # Any source will do: they stand at one point. The lowest number, so that it is the same each time.
        tracker = tracker or source.tracker
        begin = end
    return Prepared(wanted, incoming, values, entries, tracker, buckets)


def _size(layout: Layout, index: int) -> int:
    return layout.slices[index].end - layout.slices[index].begin


class _Source:
    """One shard that things come from, for one ``fetch``. Raises Unavailable, InternalError, what that shard raises."""

    def __init__(self, held: ShardMap, parcel: Arrivals, address: str, stack: AsyncExitStack) -> None:
        self._held = held
        self._parcel = parcel
        self._address = address
        self._stack = stack
        #: What it knows of pushes.
        self.tracker: TrackerMemento | None = None

    async def slices(self, into: memoryview) -> list[StateEntry]:
        """Values of its slices into ``into``; returns their state under next indexes."""
        slices = [there for there, _ in self._parcel.slices]
        call = await self._call(
            _SAVE, pb.SaveRequest(model=self._held.spec.name, epoch=self._held.epoch, slices=slices)
        )
        header = pb.SaveReply.FromString(await self._next(call)).header
        entries = self._allocate(header.state)
        await self._receive(call, [into, *(tensor_bytes(tensor) for _, tensor in entries)], header.payload_bytes)
        self._knows(header.tracker)
        return entries

    async def buckets(self, table: int, numbers: Sequence[int]) -> list[BucketContents]:
        """What it has of these buckets."""
        held = self._held
        call = await self._call(
            _SAVE_BUCKETS,
            pb.SaveBucketsRequest(model=held.spec.name, epoch=held.epoch, table=table, buckets=numbers),
        )
        found = []
        for number in numbers:
            reply = pb.SaveBucketsReply.FromString(await self._next(call))
            if reply.WhichOneof("body") != "bucket" or reply.bucket.bucket != number:
                raise self._unexpected(f"bucket {number}", reply.WhichOneof("body") or "nothing")
            payload = memoryview(bytearray(reply.bucket.payload_bytes))
            await self._receive(call, [payload], reply.bucket.payload_bytes)
            found.append(BucketContents.read(held.spec.tables[table], reply.bucket, payload))
            self._knows(reply.tracker)
        return found

    def _knows(self, tracker: str) -> None:
        if tracker:
            self.tracker = TrackerMemento.from_json(json.loads(tracker))

    async def _call(self, method: str, request: Any) -> grpc.aio.UnaryStreamCall[bytes, bytes]:
        channel = await self._stack.enter_async_context(grpc.aio.insecure_channel(self._address, CLIENT_OPTIONS))
        stub: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream(method)
        call = stub(request.SerializeToString(), timeout=FETCH_SECONDS)
        self._stack.callback(call.cancel)
        return call

    async def _next(self, call: grpc.aio.UnaryStreamCall[bytes, bytes]) -> bytes:
        try:
            data: Any = await call.read()
        except grpc.RpcError as failed:
            raise translate(failed, f"shard {self._parcel.source} at {self._address}") from failed
        if data is grpc.aio.EOF:
            raise InternalError("a shard ended its answer before it was whole")
        return bytes(data)

    async def _receive(
        self, call: grpc.aio.UnaryStreamCall[bytes, bytes], into: Sequence[memoryview], announced_bytes: int
    ) -> None:
        scatter = Scatter(into)
        if announced_bytes != scatter.expected_bytes:
            raise self._unexpected(f"{scatter.expected_bytes} bytes", f"{announced_bytes} bytes")
        while not scatter.complete:
            chunk = parse_chunk(STATE_CHUNK_FIELD, await self._next(call))
            if chunk is None:
                raise self._unexpected("a chunk", "another message")
            scatter.write(*chunk)

    def _allocate(self, state: Sequence[pb.StateTensor]) -> list[StateEntry]:
        indexes = dict(self._parcel.slices)
        entries: list[StateEntry] = []
        for item in state:
            if item.slice not in indexes or min(item.shape, default=0) < 0 or math.prod(item.shape) >= 1 << 40:
                raise self._unexpected("state of the slices asked for", f"'{item.name}' of slice {item.slice}")
            dtype = torch_dtype(convert.dtype_from_pb(item.dtype))
            entries.append((StateKey(indexes[item.slice], item.name), torch.empty(tuple(item.shape), dtype=dtype)))
        return entries

    def _unexpected(self, expected: str, actual: str) -> InternalError:
        return InternalError(
            f"shard {self._parcel.source} sent something else than what was asked for", expected=expected, actual=actual
        )
