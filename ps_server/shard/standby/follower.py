"""Follows the log of a primary: writes its records to its own log, applies them, and acknowledges them."""

from __future__ import annotations

import asyncio
from asyncio import to_thread
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

import grpc

from ps_protocol import PROTOCOL_VERSION
from ps_protocol.cluster.view import Member
from ps_protocol.errors import InternalError, Unavailable
from ps_protocol.logs import EventLogger
from ps_protocol.rpc.channel import OpenChannel, open_async_channel
from ps_protocol.rpc.client_errors import translate
from ps_protocol.v1 import shard_pb2 as pb
from ps_protocol.wire.chunks import FOLLOW_REPLIES, ChunkReceiver
from ps_protocol.wire.convert import model as convert_model
from ps_protocol.wire.convert.shard import BUCKET_HEADER, STATE_HEADER
from ps_server.consistency.tracker_state import pushes_from_pb
from ps_server.log.reader import RecordParser
from ps_server.log.record import Header
from ps_server.log.recovery import recover
from ps_server.log.snapshots import ModelPart, SnapshotWriter
from ps_server.shard.durability.snapshotter import PassiveReplica
from ps_server.shard.durability.storage import Storage
from ps_server.shard.execution.executor import ShardExecutor
from ps_server.state.apply import Replay
from ps_server.state.blocks import Block
from ps_server.tasks import cancelled, finished

logger = EventLogger(__name__)

_METHOD = "/ps_protocol.v1.Shard/Follow"

Call = grpc.aio.StreamStreamCall[bytes, bytes]


@dataclass(frozen=True, slots=True)
class StandbyPlace:
    """The standby as a member of the cluster."""

    member: Member
    #: A view that includes it.
    revision: int


class LogFollower:
    """Used on the shard's event loop. It owns the directory and the models while it follows.

    Between two tasks of the executor its state is consistent and contains every record of its log, except during a
    copy: then it has no state.
    """

    def __init__(
        self, shard: int, storage: Storage, executor: ShardExecutor, open_channel: OpenChannel = open_async_channel
    ) -> None:
        """``storage`` keeps every update. Raises InternalError for one that does not.

        ``open_channel`` opens a channel to the shard, with the credentials of this standby.
        """
        if storage.kept is None:
            raise InternalError("a standby needs a directory for every update")
        self.shard = shard
        self._storage = storage
        self._folder, self._log = storage.kept
        self._executor = executor
        self._open_channel = open_channel
        self._replay = Replay(shard, storage.recovered, row_memory=storage.row_memory)
        #: Its state comes from another process's log.
        self.followed = False
        self._failure: BaseException | None = None
        self._acknowledged = asyncio.Event()

    @property
    def incarnation(self) -> int:
        """The incarnation whose state it has, from the first record up to ``number``; 0: it has no state."""
        return self._folder.identity.incarnation

    @property
    def number(self) -> int:
        """The last record it has."""
        return self._log.whole

    async def follow(self, primary: Member, place: StandbyPlace) -> None:
        """Follow until cancelled. Raises Unavailable when the stream ends; PsError or OSError if following fails."""
        self._check()
        async with _stream(primary, self.shard, self._open_channel) as call:
            start = pb.FollowStart(
                shard=self.shard,
                protocol_version=PROTOCOL_VERSION,
                incarnation=place.member.incarnation,
                directory=self._storage.directory,
                membership_revision=place.revision,
                primary=primary.incarnation,
                number=self._log.number if self.incarnation else 0,
                writer=self._log.last_writer if self.incarnation else 0,
            )
            await call.write(pb.FollowRequest(start=start).SerializeToString())
            following = (await self._read(call, "following")).following
            self.followed = True
            parser = RecordParser()
            if following.copy:
                await self._copy(call, parser, primary.incarnation, following.number)
            else:
                await self._go_on(primary.incarnation)
            logger.info(
                "standby", "shard %d: follows %s from record %d", self.shard, primary.address, self._log.number + 1
            )
            await self._begin_snapshots()
            saying = asyncio.create_task(self._say(call))
            try:
                self._acknowledged.set()
                while True:
                    await self._take(list(parser.feed(await self._chunk(call))), whole=True)
            finally:
                await cancelled(saying)

    async def _go_on(self, incarnation: int) -> None:
        """Continue: the state is a prefix of the log of ``incarnation``."""
        if not self.incarnation:
            self._storage.recovered.clear()
            await self._executor.submit(lambda: self._empty(0), 1 << 62)
            self._replay = Replay(self.shard, self._storage.recovered, row_memory=self._storage.row_memory)
        self._folder.belongs_to(incarnation)

    async def settled(self) -> None:
        """Returns when nothing is being applied. Raises InternalError if applying failed: read the directory again."""
        await self._executor.submit(lambda: None, 1 << 62)
        self._check()

    def _check(self) -> None:
        if self._failure is not None:
            raise InternalError(f"the followed state cannot be continued: {self._failure}") from self._failure

    # -- records

    async def _take(self, records: Sequence[tuple[Header, memoryview]], *, whole: bool) -> None:
        """Write records; if there is a ``whole`` state, apply them. Raises StorageFull, OSError."""
        if not records:
            return
        size = sum(header.record_bytes for header, _ in records)
        loop = asyncio.get_running_loop()
        await self._log.reserve(size)

        def work() -> None:
            try:
                for header, body in records:
                    self._log.append_copy(header, body)
                if whole:
                    loop.call_soon_threadsafe(self._acknowledged.set)
                    for header, body in records:
                        message = bytes(body[: header.message_bytes])
                        self._replay.take(header.number, message, body[header.message_bytes :])
            except BaseException as error:
                # The log and the models may be at different records.
                self._failure = error
                raise

        try:
            await finished(self._executor.submit(work, 2 * size))
        finally:
            self._log.release(size)

    async def _say(self, call: Call) -> None:
        """Acknowledge what has been written."""
        with suppress(asyncio.InvalidStateError):  # the stream has ended; its reader notices
            while True:
                await self._acknowledged.wait()
                self._acknowledged.clear()
                await call.write(pb.FollowRequest(acknowledged=self._log.whole).SerializeToString())

    async def _begin_snapshots(self) -> None:
        await self._storage.give_up_snapshots()
        models, executor = self._replay.models, self._executor
        self._storage.take_snapshots(
            lambda: [PassiveReplica(model, executor, self._applied) for model in list(models.values())]
        )

    def _applied(self) -> int:
        """In the executor: the last record applied to the models. Raises InternalError if unknown."""
        self._check()
        return self._log.number

    # -- the copy

    async def _copy(self, call: Call, parser: RecordParser, incarnation: int, number: int) -> None:
        """Replace the state by a copy of that of ``incarnation``. If this process ends, it has a whole copy or none."""
        await self._storage.give_up_snapshots()
        self._storage.recovered.clear()
        await self._executor.submit(lambda: self._empty(number), 1 << 62)
        writer = await to_thread(SnapshotWriter, self._folder.snapshots, number)
        try:
            through = await self._receive(call, writer)
            while self._log.number < through:
                await self._take(list(parser.feed(await self._chunk(call))), whole=False)
            await finished(to_thread(self._log.flush, number))
            await finished(to_thread(writer.commit, through, log_goes_on=True))
        finally:
            await finished(to_thread(writer.close))
        await finished(to_thread(self._folder.holds_snapshot, through))
        self._folder.belongs_to(incarnation)
        rows = self._storage.row_memory
        found = await self._executor.submit(lambda: recover(self._folder, log_goes_on=True, row_memory=rows), 1 << 62)
        self._storage.recovered.update(found.models)
        self._replay = Replay(self.shard, self._storage.recovered, row_memory=self._storage.row_memory)

    def _empty(self, number: int) -> None:
        self._log.settle()
        self._folder.begin_copy()
        self._log.reset(number)

    async def _receive(self, call: Call, writer: SnapshotWriter) -> int:
        """Receive models, blocks and buckets; returns the record at which they are consistent."""
        while True:
            message = await self._read(call, "model", "block", "buckets", "copied")
            match message.WhichOneof("body"):
                case "model":
                    tracker = pushes_from_pb(message.model.pushes)
                    shard_map = convert_model.SHARD_MAP.from_pb(message.model.shard_map)
                    initialised, after = message.model.initialised, message.model.tracker_number
                    writer.begin_model(ModelPart(shard_map, initialised, tracker, after))
                case "block":
                    await self._block(call, writer, message.block)
                case "buckets":
                    await self._buckets(call, writer, message.buckets)
                case _:
                    return message.copied.through

    async def _block(self, call: Call, writer: SnapshotWriter, header: pb.BlockCopy) -> None:
        data = await self._payload(call, header.payload_bytes)
        block = Block(header.first, header.last, header.begin, header.end)
        await finished(
            to_thread(writer.write_copy, block, header.number, [data], STATE_HEADER.all_from_pb(header.state))
        )

    async def _buckets(self, call: Call, writer: SnapshotWriter, header: pb.BucketsCopy) -> None:
        data = await self._payload(call, sum(bucket.payload_bytes for bucket in header.buckets))
        await finished(
            to_thread(writer.write_buckets, header.number, BUCKET_HEADER.all_from_pb(header.buckets), [data])
        )

    async def _payload(self, call: Call, size_bytes: int) -> memoryview:
        data = memoryview(bytearray(size_bytes))
        await ChunkReceiver(FOLLOW_REPLIES, [data], f"shard {self.shard}", InternalError).receive_async(
            lambda: _next(call)
        )
        return data

    # -- messages

    async def _read(self, call: Call, *expected: str) -> pb.FollowReply:
        message = pb.FollowReply.FromString(await _next(call))
        if message.WhichOneof("body") not in expected:
            raise InternalError(
                f"shard {self.shard} sent its standby something else than was due",
                expected=" or ".join(expected),
                actual=str(message.WhichOneof("body")),
            )
        return message

    async def _chunk(self, call: Call) -> memoryview:
        chunk = FOLLOW_REPLIES.parse(await _next(call))
        if chunk is None:
            raise InternalError(f"shard {self.shard} sent its standby something else than a chunk")
        return chunk[1]


@asynccontextmanager
async def _stream(primary: Member, shard: int, open_channel: OpenChannel) -> AsyncIterator[Call]:
    """A stream to ``primary``. Raises PsError when it breaks."""
    async with open_channel(primary.address) as channel:
        call: Call = channel.stream_stream(_METHOD)()
        try:
            yield call
        except grpc.RpcError as failed:
            raise translate(failed, f"shard {shard} at {primary.address}") from failed
        finally:
            call.cancel()


async def _next(call: Call) -> bytes:
    """The next message. Raises Unavailable when the stream has ended."""
    data: Any = await call.read()
    if data is grpc.aio.EOF:
        raise Unavailable("the shard ended the stream to its standby")
    return bytes(data)
