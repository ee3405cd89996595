"""Fetches slices and row buckets that move to a shard: decides which come from which shard, and has memory for them."""

from __future__ import annotations

import asyncio
import math
from collections import defaultdict
from collections.abc import Collection, Coroutine, Iterable, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc
import torch
from torch import Tensor

from ps_protocol import times
from ps_protocol.errors import InternalError, InvalidRequest, Unavailable
from ps_protocol.model.layout import Layout, SliceSpan, aligned
from ps_protocol.model.payload_headers import StateHeader
from ps_protocol.model.spec import ShardMap
from ps_protocol.rpc.client_errors import translate
from ps_protocol.v1 import shard_pb2 as pb
from ps_protocol.wire.chunks import SAVE_BUCKETS_REPLIES, SAVE_REPLIES, ChunkedStream, ChunkReceiver
from ps_protocol.wire.convert.shard import BUCKET_HEADER, STATE_HEADER
from ps_server.consistency import TrackerState
from ps_server.consistency.tracker_state import pushes_from_pb
from ps_server.log.entries import StagedReshard
from ps_server.model_differences import in_structure, raise_differences
from ps_server.optimizers.state import StateEntry, StateKey, tensor_bytes
from ps_server.shard.peers import ShardPeers
from ps_server.state.region import torch_dtype
from ps_server.state.reshard import rows_of
from ps_server.tables.bucket_contents import BucketContents

T = TypeVar("T")

_SAVE = "/ps_protocol.v1.Shard/Save"
_SAVE_BUCKETS = "/ps_protocol.v1.Shard/SaveBuckets"


@dataclass(frozen=True, slots=True)
class TransferPlan:
    """What comes to one shard from one other."""

    source: int
    #: Slices as (index there, next index here), in the order here.
    slices: tuple[tuple[int, int], ...] = ()
    #: Buckets by number of their table, rising.
    buckets: tuple[tuple[int, tuple[int, ...]], ...] = ()


def transfer_plan(held: ShardMap, wanted: ShardMap, shard: int) -> list[TransferPlan]:
    """What ``shard`` lacks of ``wanted``, by the shard that has it, in order of number.

    Raises ModelMismatch for another model, InvalidRequest for a map that does not follow or cuts slices differently.
    """
    raise_differences(
        f"shard {shard} was given another model under the name '{held.spec.name}'",
        in_structure(held.spec, wanted.spec),
        "see the log of the coordinator",
    )
    if wanted.epoch != held.epoch + 1:
        raise InvalidRequest(
            f"the next shard map of model '{held.spec.name}' is not the next",
            shard=str(shard),
            expected=f"epoch {held.epoch + 1}",
            actual=f"epoch {wanted.epoch}",
            remedy="try again",
        )
    slices: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
    for source, there, here in _slices(held, wanted, shard):
        slices[source].append((there, here))
    buckets: defaultdict[int, defaultdict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for source, table, bucket in _buckets(held, wanted, shard):
        buckets[source][table].append(bucket)
    return [
        TransferPlan(
            source, tuple(slices[source]), tuple((t, tuple(numbers)) for t, numbers in buckets[source].items())
        )
        for source in sorted(slices.keys() | buckets.keys())
    ]


def _slices(held: ShardMap, wanted: ShardMap, shard: int) -> Iterator[tuple[int, int, int]]:
    """Source, index there, next index here."""
    own = {rows_of(span) for span in Layout.of(held, shard).slices}
    sources = {piece.shard for piece in held.slices} - {shard}
    places = {
        rows_of(span): (source, index)
        for source in sources
        for index, span in enumerate(Layout.of(held, source).slices)
    }
    for index, span in enumerate(Layout.of(wanted, shard).slices):
        if rows_of(span) in own:
            continue
        if rows_of(span) not in places:
            raise InvalidRequest(
                "the next shard map cuts a variable otherwise: slices only move",
                variable=span.variable.name,
                shard=str(shard),
                actual=f"rows [{span.slice.row_begin}, {span.slice.row_end})",
            )
        yield (*places[rows_of(span)], index)


def _buckets(held: ShardMap, wanted: ShardMap, shard: int) -> Iterator[tuple[int, int, int]]:
    """Source, table, bucket."""
    for table, (before, after) in enumerate(zip(held.tables, wanted.tables, strict=True)):
        for bucket, (source, target) in enumerate(zip(before, after, strict=True)):
            if target == shard != source:
                yield source, table, bucket


class IncomingBlock:
    """Of one model in one batch; cut from the front. Used on the event loop."""

    def __init__(self, memory: bytearray) -> None:
        #: All of it, for the next batch when nobody reads what was cut.
        self.memory = memory
        self._used = 0

    def cut(self, size_bytes: int) -> memoryview:
        """Memory with unspecified content; new where there is not enough."""
        begin = aligned(self._used)
        if begin + size_bytes > len(self.memory):
            return memoryview(bytearray(size_bytes))
        self._used = begin + size_bytes
        return memoryview(self.memory)[begin : self._used]

    def tensor(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """The same as a tensor."""
        count = math.prod(shape)
        if not count:
            return torch.empty(tuple(shape), dtype=dtype)
        return torch.frombuffer(self.cut(count * dtype.itemsize), dtype=dtype).view(tuple(shape))


class IncomingMemory:
    """Of one shard; ``take`` and ``give`` on its event loop, ``make`` anywhere. What is taken is its taker's alone."""

    def __init__(self) -> None:
        self._free = bytearray()

    def make(self, size_bytes: int) -> None:
        """Have so many bytes, all their pages touched."""
        if len(self._free) < size_bytes:
            self._free = bytearray(size_bytes)

    def take(self) -> IncomingBlock:
        """All there is."""
        taken, self._free = self._free, bytearray()
        return IncomingBlock(taken)

    def give(self, block: IncomingBlock) -> None:
        """What was cut from ``block`` is not read any more, and nothing writes to it."""
        self._free = max(block.memory, self._free, key=len)

    def clear(self) -> None:
        """Keep nothing."""
        self._free = bytearray()


def coming_slices(held: Layout, wanted: Layout) -> list[SliceSpan]:
    """The slices of ``wanted`` that are not in ``held``."""
    here = {rows_of(span) for span in held.slices}
    return [span for span in wanted.slices if rows_of(span) not in here]


async def fetch(
    held: ShardMap, wanted: ShardMap, shard: int, members: Collection[int], sources: ShardPeers, memory: IncomingBlock
) -> StagedReshard:
    """Everything that comes to ``shard``, from ``members``, the live shards; those it comes from must be paused.

    ``sources``: the channels to them. ``memory``: for values, and for state as far as it suffices; the result keeps it.
    All are asked at the same time.

    Raises as ``transfer_plan``, and Unavailable, also for a source that is no live shard.
    """
    layout = Layout.of(wanted, shard)
    parcels = transfer_plan(held, wanted, shard)
    for parcel in parcels:
        if parcel.source not in members:
            raise Unavailable(
                f"slices come from shard {parcel.source}, which is away",
                shard=str(shard),
                remedy="start it, then move again",
            )
    incoming = tuple(index for parcel in parcels for _, index in parcel.slices)
    values = memory.cut(sum(_size(layout, index) for index in incoming))
    calls, begin = list[Coroutine[Any, Any, _Parcel]](), 0
    for parcel in parcels:
        end = begin + sum(_size(layout, index) for _, index in parcel.slices)
        calls.append(_fetched(held, parcel, sources, memory, values[begin:end]))
        begin = end
    found = await _all_of(calls)
    entries = [entry for each in found for entry in each.entries]
    buckets = [bucket for each in found for bucket in each.buckets]
    # Any source will do: they stand at one point. The lowest number, so that it is the same each time.
    tracker = next((each.tracker for each in found if each.tracker), None)
    return StagedReshard(wanted, incoming, values, entries, tracker, buckets)


@dataclass(frozen=True, slots=True)
class _Parcel:
    """What came from one shard."""

    entries: Sequence[StateEntry]
    buckets: Sequence[tuple[int, BucketContents]]
    tracker: TrackerState | None


async def _fetched(
    held: ShardMap, parcel: TransferPlan, sources: ShardPeers, memory: IncomingBlock, values: memoryview
) -> _Parcel:
    async with AsyncExitStack() as stack:
        channel = await sources.channel(parcel.source)
        source = _Source(held, parcel, sources.name(parcel.source), channel, stack, memory)
        entries = await source.slices(values) if parcel.slices else []
        buckets: list[tuple[int, BucketContents]] = []
        for table, numbers in parcel.buckets:
            buckets += [(table, contents) for contents in await source.buckets(table, numbers)]
        return _Parcel(entries, buckets, source.tracker)


async def _all_of(calls: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """The results of all; at the first error the others are cancelled, and nothing goes on when it is raised."""
    tasks = [asyncio.create_task(call, name="fetch") for call in calls]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _size(layout: Layout, index: int) -> int:
    return layout.slices[index].end - layout.slices[index].begin


class _Source:
    """One shard that things come from, for one ``fetch``. Raises Unavailable, InternalError, what that shard raises."""

    def __init__(
        self,
        held: ShardMap,
        parcel: TransferPlan,
        name: str,
        channel: grpc.aio.Channel,
        stack: AsyncExitStack,
        memory: IncomingBlock,
    ) -> None:
        self._held = held
        self._parcel = parcel
        self._name = name
        self._channel = channel
        self._stack = stack
        self._memory = memory
        #: What it knows of pushes.
        self.tracker: TrackerState | None = None

    async def slices(self, into: memoryview) -> list[StateEntry]:
        """Values of its slices into ``into``; returns their state under next indexes."""
        slices = [there for there, _ in self._parcel.slices]
        call = self._call(_SAVE, pb.SaveRequest(model=self._held.spec.name, epoch=self._held.epoch, slices=slices))
        header = pb.SaveReply.FromString(await self._next(call)).header
        entries = self._allocate(STATE_HEADER.all_from_pb(header.state))
        pieces = [into, *(tensor_bytes(tensor) for _, tensor in entries)]
        await self._receive(call, SAVE_REPLIES, pieces, header.payload_bytes)
        self._knows(header)
        return entries

    async def buckets(self, table: int, numbers: Sequence[int]) -> list[BucketContents]:
        """What it has of these buckets."""
        held = self._held
        call = self._call(
            _SAVE_BUCKETS,
            pb.SaveBucketsRequest(model=held.spec.name, epoch=held.epoch, table=table, buckets=numbers),
        )
        found = []
        for number in numbers:
            reply = pb.SaveBucketsReply.FromString(await self._next(call))
            (header,) = BUCKET_HEADER.all_from_pb([reply.bucket])
            if reply.WhichOneof("body") != "bucket" or header.bucket != number:
                raise self._unexpected(f"bucket {number}", reply.WhichOneof("body") or "nothing")
            payload = memoryview(bytearray(header.payload_bytes))
            await self._receive(call, SAVE_BUCKETS_REPLIES, [payload], header.payload_bytes)
            found.append(BucketContents.read(held.spec.tables[table], header, payload))
            self._knows(reply)
        return found

    def _knows(self, message: pb.SaveHeader | pb.SaveBucketsReply) -> None:
        if message.HasField("pushes"):
            self.tracker = pushes_from_pb(message.pushes)

    def _call(self, method: str, request: Any) -> grpc.aio.UnaryStreamCall[bytes, bytes]:
        stub: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = self._channel.unary_stream(method)
        call = stub(request.SerializeToString(), timeout=times.MOVE_SECONDS)
        self._stack.callback(call.cancel)
        return call

    async def _next(self, call: grpc.aio.UnaryStreamCall[bytes, bytes]) -> bytes:
        try:
            data: Any = await call.read()
        except grpc.RpcError as failed:
            raise translate(failed, self._name) from failed
        except asyncio.CancelledError:
            # Of a channel that was closed. A handler that ends with it would never answer its caller.
            if (task := asyncio.current_task()) is None or task.cancelling():
                raise
            raise Unavailable(f"the connection to {self._name} was closed", remedy="try again") from None
        if data is grpc.aio.EOF:
            raise InternalError("a shard ended its answer before it was whole")
        return bytes(data)

    async def _receive(
        self,
        call: grpc.aio.UnaryStreamCall[bytes, bytes],
        stream: ChunkedStream,
        into: Sequence[memoryview],
        announced_bytes: int,
    ) -> None:
        if announced_bytes != (expected_bytes := sum(map(len, into))):
            raise self._unexpected(f"{expected_bytes} bytes", f"{announced_bytes} bytes")
        receiver = ChunkReceiver(stream, into, f"shard {self._parcel.source}", InternalError)
        await receiver.receive_async(lambda: self._next(call))

    def _allocate(self, state: Sequence[StateHeader]) -> list[StateEntry]:
        indexes = dict(self._parcel.slices)
        entries: list[StateEntry] = []
        for item in state:
            if item.slice_index not in indexes or min(item.shape, default=0) < 0 or math.prod(item.shape) >= 1 << 40:
                raise self._unexpected("state of the slices asked for", f"'{item.name}' of slice {item.slice_index}")
            tensor = self._memory.tensor(item.shape, torch_dtype(item.dtype))
            entries.append((StateKey(indexes[item.slice_index], item.name), tensor))
        return entries

    def _unexpected(self, expected: str, actual: str) -> InternalError:
        return InternalError(
            f"shard {self._parcel.source} sent something else than what was asked for", expected=expected, actual=actual
        )
