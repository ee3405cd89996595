"""Serves the log of a shard to its standby: a copy of the state if needed, then every record."""

from __future__ import annotations

import asyncio
from asyncio import to_thread
from collections.abc import Sequence

from google.protobuf.message import DecodeError

from ps_protocol import PROTOCOL_VERSION, times
from ps_protocol.cluster.view import ClusterView, Role
from ps_protocol.errors import (
    Fenced,
    InvalidRequest,
    ModelMoved,
    ModelReleased,
    ProtocolVersionMismatch,
    PsError,
    Unavailable,
)
from ps_protocol.logs import EventLogger
from ps_protocol.v1 import shard_pb2 as pb
from ps_protocol.wire.chunks import FOLLOW_REPLIES
from ps_protocol.wire.convert import model as convert_model
from ps_protocol.wire.convert.shard import BUCKET_HEADER, STATE_HEADER
from ps_protocol.wire.frames import encode_chunk
from ps_server.consistency.tracker_state import pushes_to_pb
from ps_server.log.durable import DurableLog
from ps_server.log.messages import describe_buckets
from ps_server.log.reader import LogReader
from ps_server.optimizers.state import describe, tensor_bytes
from ps_server.serving.authorization import check_member
from ps_server.shard.durability.replication import Replication, Tell
from ps_server.shard.registry import Registry
from ps_server.shard.step.model import ShardModel
from ps_server.shard.transport.grpc_stream import Context, read, read_soon, write
from ps_server.state.blocks import blocks_of, buckets_of
from ps_server.tasks import Conditions, cancelled, run_together, seen

logger = EventLogger(__name__)


class LogFeed:
    """Called by the service, on the shard's event loop. One standby at a time: a new stream ends the one before."""

    def __init__(self, shard: int, registry: Registry, log: DurableLog, replication: Replication) -> None:
        self._shard = shard
        self._registry = registry
        self._log = log
        self._replication = replication
        self._news = asyncio.Event()
        self._heard = Conditions()
        self._woken = False
        self._running: asyncio.Task[None] | None = None
        self._start = pb.FollowStart()
        self._incarnation = 0
        #: The last record sent whole to the standby, which can acknowledge no later one.
        self._sent = 0
        self._timer: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()

    def on_view(self, view: ClusterView) -> None:
        """End the stream of a standby that is no longer a member."""
        standby = view.live(Role.STANDBY).get(self._shard)
        alive = standby is not None and standby.incarnation == self._start.incarnation
        if self._running and not alive and view.revision >= self._start.membership_revision:
            self._running.cancel()

    def begin(self, incarnation: int, tell: Tell) -> None:
        """The shard has joined as ``incarnation`` and may be followed."""
        self._incarnation = incarnation
        self._replication.begin(tell)

    async def close(self, error: PsError) -> None:
        """End the stream. Pushes that wait for a standby are not acknowledged."""
        self._replication.close(error)
        await self.stop()
        await self._replication.ended()
        if self._timer:
            self._timer.cancel()

    async def serve(self, context: Context) -> None:
        """Serve one stream of a standby. Raises PsError."""
        start = await started(context)
        self._check(start)
        await self._registry.membership(start.membership_revision)
        # Check before ending the stream of another standby: a stranger must not end it.
        self._check_standby(start)
        await self.stop()
        self._check(start)
        self._check_standby(start)
        self._start = start
        self._running = asyncio.create_task(self._serve(context, start), name="feed")
        seen(self._running)  # its caller may be gone
        try:
            await asyncio.wait([self._running])
            if self._running.cancelled():
                raise Unavailable("this shard ended the stream: its standby is gone, or has another one")
            self._running.result()
        finally:
            self._running.cancel()

    @property
    def followed(self) -> bool:
        """Whether a standby's stream is open."""
        return self._running is not None and not self._running.done()

    @property
    def lag(self) -> int | None:
        """Records of the log that the standby does not have yet; None without one. Any thread may ask."""
        held = self.held_number
        return None if held is None else max(0, self._log.number - held)

    @property
    def held_number(self) -> int | None:
        """The last record that the standby has; None without one. Any thread may ask."""
        return self._replication.acknowledged if self.followed else None

    async def hand_over(self) -> None:
        """Wait until the standby has the whole log, is lost, or a time limit has passed. Nothing is appended
        meanwhile.
        """
        log, replication = self._log, self._replication
        await self._heard.until(lambda: not self.followed or replication.acknowledged >= log.number, times.END_SECONDS)

    async def stop(self) -> None:
        """End the stream that is open, if one is."""
        if (running := self._running) is not None:
            await cancelled(running)

    def _check(self, start: pb.FollowStart) -> None:
        check_primary(start, self._shard, self._incarnation if self._replication.begun else 0)
        if start.protocol_version != PROTOCOL_VERSION:
            raise ProtocolVersionMismatch(
                "standby and shard speak different versions of the protocol",
                shard=str(self._shard),
                expected=str(PROTOCOL_VERSION),
                actual=str(start.protocol_version),
                remedy="install the same torch-ps on both sides",
            )
        if start.shard != self._shard:
            raise InvalidRequest(
                "a standby of another shard",
                shard=str(self._shard),
                expected=f"a standby of shard {self._shard}",
                actual=f"a standby of shard {start.shard}",
            )

    def _check_standby(self, start: pb.FollowStart) -> None:
        """Raises Fenced unless the follower is the standby that the cluster's view names for this shard."""
        check_member(Role.STANDBY, self._shard, start.incarnation)
        standby = self._registry.view.live(Role.STANDBY).get(self._shard)
        if standby is None or standby.incarnation != start.incarnation:
            raise Fenced(
                f"incarnation {start.incarnation} is not the standby of shard {self._shard}",
                shard=str(self._shard),
                expected=f"incarnation {standby.incarnation}"
                if standby
                else "a process that has joined as its standby",
                actual=f"incarnation {start.incarnation}",
                remedy="its lease ended or a newer process took its place: start it again with --standby",
            )

    async def _serve(self, context: Context, start: pb.FollowStart) -> None:
        log, replication = self._log, self._replication
        if self._timer:
            self._timer.cancel()
        begin = min(start.number, log.whole) + 1
        log.read_from = min(log.read_from or begin, begin)
        self._sent = 0
        replication.follows(start.directory)
        log.on_append = self._appended
        try:
            await run_together(self._hear(context), self._send(context, start))
        finally:
            log.on_append = None
            self._heard.wake()
            replication.lost()
            self._timer = self._loop.call_later(times.PATIENCE_SECONDS, self._let_go)

    def _let_go(self) -> None:
        self._log.read_from = None

    async def _hear(self, context: Context) -> None:
        acknowledged = 0
        while (data := await read(context)) is not None:
            message = _parsed(data)
            if message.WhichOneof("body") != "acknowledged":
                raise InvalidRequest("a standby only acknowledges", actual=str(message.WhichOneof("body")))
            if not acknowledged <= message.acknowledged <= self._sent:
                raise InvalidRequest(
                    "a standby acknowledges records that it was not sent, or takes back what it acknowledged",
                    shard=str(self._shard),
                    expected=f"{acknowledged} to {self._sent}",
                    actual=str(message.acknowledged),
                )
            acknowledged = message.acknowledged
            self._replication.acknowledge(acknowledged)
            self._log.read_from = acknowledged + 1
            self._heard.wake()

    async def _send(self, context: Context, start: pb.FollowStart) -> None:
        reader = LogReader(self._log, start.number)
        try:
            if await to_thread(reader.is_behind, start.writer):
                self._sent = start.number
                await _write(context, following=pb.Following(number=start.number))
                logger.info("standby", "shard %d: its standby follows from record %d", self._shard, start.number + 1)
            else:
                reader.close()
                self._sent = await self._copy(context)
                reader = LogReader(self._log, self._sent)
            await self._records(context, reader)
        finally:
            reader.close()

    async def _records(self, context: Context, reader: LogReader) -> None:
        position = 0
        while True:
            self._news.clear()
            while data := await to_thread(reader.read) if self._far(reader) else reader.read():
                self._sent = reader.whole
                await write(context, encode_chunk(FOLLOW_REPLIES.field, position, [data]))
                position += len(data)
            await self._news.wait()

    def _far(self, reader: LogReader) -> bool:
        """Whether the next read may have to come from the disk."""
        return self._log.whole - reader.number > 100

    def _appended(self) -> None:
        """In the executor."""
        if not self._woken:
            self._woken = True
            self._loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        self._woken = False
        self._news.set()

    # -- the copy

    async def _copy(self, context: Context) -> int:
        """Send every model in pieces while training continues; returns the last record before the copy began.

        The pieces are of different ages; the records that follow make them consistent. Raises Unavailable if values
        were loaded meanwhile, which invalidates the copy.
        """
        if self._registry.waiting_models:
            raise Unavailable(f"shard {self._shard} holds models that the cluster has not placed yet")
        if any(model.is_pending for model in self._registry.placed):
            raise Unavailable(f"slices of shard {self._shard} move: its standby copies the state then")
        begun, models = self._log.whole, self._registry.placed
        loads = [model.loads for model in models]
        self._log.read_from = begun + 1
        logger.info("standby", "shard %d: copies %d models to its standby", self._shard, len(models))
        await _write(context, following=pb.Following(number=begun, copy=True))
        try:
            for model in models:
                await _copy_model(context, model)
        except (ModelMoved, ModelReleased) as error:
            raise Unavailable(
                "slices moved during the copy, or a model was released", remedy="the standby begins another one"
            ) from error
        if loads != [model.loads for model in models]:
            raise Unavailable("values were loaded during the copy", remedy="the standby begins another one")
        await _write(context, copied=pb.Copied(through=self._log.whole))
        return begun


def check_primary(start: pb.FollowStart, shard: int, incarnation: int) -> None:
    """Raises Unavailable unless the standby means this ``shard``, which has joined as ``incarnation``.

    The address of a shard that has ended may belong to another one now, also to one of another job, whose standby it is
    not: it asks again until its own is there, or lost.
    """
    if not incarnation or start.primary != incarnation:
        raise Unavailable(f"shard {shard} is not followed as incarnation {start.primary}")


async def started(context: Context) -> pb.FollowStart:
    """The first message of a standby. Raises InvalidRequest."""
    message = _parsed(await read_soon(context) or b"")
    if message.WhichOneof("body") != "start":
        raise InvalidRequest("a standby begins with FollowStart", actual=str(message.WhichOneof("body")))
    return message.start


def _parsed(data: bytes) -> pb.FollowRequest:
    try:
        return pb.FollowRequest.FromString(data)
    except DecodeError as error:
        raise InvalidRequest("a message is not a FollowRequest", actual=f"{len(data)} bytes: {error}") from error


async def _copy_model(context: Context, model: ShardModel) -> None:
    part = await model.describe()
    await _write(
        context,
        model=pb.ModelCopy(
            shard_map=convert_model.SHARD_MAP.to_pb(part.shard_map),
            initialised=part.initialised,
            pushes=pushes_to_pb(part.tracker),
            tracker_number=part.tracker_number,
        ),
    )
    blocks = blocks_of(model.layout)
    buffer = memoryview(bytearray(max((block.end - block.begin for block in blocks), default=0)))
    for block in blocks:
        number, values, entries = await model.copy_block(block, buffer)
        pieces = [values, *(tensor_bytes(tensor) for _, tensor in entries)]
        header = pb.BlockCopy(
            first=block.first,
            last=block.last,
            begin=block.begin,
            end=block.end,
            number=number,
            state=STATE_HEADER.all_to_pb(describe(entries)),
            payload_bytes=sum(map(len, pieces)),
        )
        await _write(context, block=header)
        await _write_payload(context, pieces)
    wanted = buckets_of(model.layout)
    while True:
        number, group = await model.copy_buckets(wanted)
        if not group:
            return
        await _write(
            context, buckets=pb.BucketsCopy(buckets=BUCKET_HEADER.all_to_pb(describe_buckets(group)), number=number)
        )
        await _write_payload(context, [piece for _, contents in group for piece in contents.pieces()])


async def _write_payload(context: Context, pieces: Sequence[memoryview]) -> None:
    for chunk in FOLLOW_REPLIES.chunks(pieces):
        await write(context, chunk)


async def _write(context: Context, **body: object) -> None:
    await write(context, pb.FollowReply(**body).SerializeToString())  # type: ignore[arg-type]
