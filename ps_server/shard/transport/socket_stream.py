"""The transports on sockets: bulk (payloads on the socket) and shm (payloads in memory that both sides map)."""

from __future__ import annotations

import asyncio
import enum
import os
import weakref
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

from ps_protocol import times
from ps_protocol.cluster.answers import Answer, AttachedChannel, RowsAnswer, StepAnswer, StepReply
from ps_protocol.cluster.requests import StepRequest
from ps_protocol.cluster.transport import Transport
from ps_protocol.errors import InvalidRequest
from ps_protocol.model.layout import Range
from ps_protocol.weights.memory import Room
from ps_protocol.wire.carrier import Carrier
from ps_protocol.wire.convert.step import reply_to_pieces, request_from_bytes
from ps_protocol.wire.shared_memory import Recent, SharedMemory
from ps_protocol.wire.socket_messages import (
    ATTACH_BYTES,
    INLINE_BYTES,
    LENGTH,
    MAX_MESSAGE_BYTES,
    checked_length,
    framed_pieces,
)
from ps_protocol.wire.tls_carrier import TlsCarrier
from ps_server.shard.transport.base import AT_ONCE_BYTES, AtOnce, no_segments
from ps_server.state.region import Region
from ps_server.tasks import in_thread


class Later(enum.Enum):
    """In place of a message: more has to come first."""

    LATER = enum.auto()


class SocketServerTransport:
    """A ServerTransport on one connected socket.

    Messages and payloads up to 1 MB are moved on the event loop without ever waiting there; larger ones by two threads
    of its own, one each way, so that pushers do not wait for each other.
    """

    def __init__(self, carrier: Carrier, stall_seconds: float = times.PATIENCE_SECONDS) -> None:
        """``carrier`` is connected."""
        carrier.prepare(stall_seconds)
        self.kind = Transport.BULK
        self._carrier = carrier
        self._stall_seconds = stall_seconds
        self._loop = asyncio.get_running_loop()
        self._threads = ThreadPoolExecutor(2, "transport")
        self._readable: asyncio.Future[None] | None = None
        #: Of the task that waits for the next message; and the message that it is woken for.
        self._at_once: AtOnce | None = None
        self._left: StepRequest | None = None
        #: A message that is dealt with at once, and what has not come of the payload behind it.
        self._begun: tuple[StepRequest, list[memoryview]] | None = None
        #: When the last bytes of it came, and what looks whether they still come.
        self._came_at = 0.0
        self._look: asyncio.TimerHandle | None = None
        #: Of an answer that the socket did not take whole, with descriptors that have not gone either.
        self._unsent: tuple[list[memoryview | bytes], Sequence[int]] = [], ()
        #: shm: where answers that are sent at once have their parameters.
        self._copy: Region | None = None
        self._watched = False
        self._closed = False
        #: Of a message that comes in: little until the token has been shown.
        self._most_bytes = ATTACH_BYTES
        self._segments: Sequence[Region] = ()
        #: Where the worker writes rows that it pushes, and where rows that it asked for are written.
        self._pushed_room: SharedMemory | None = None
        self._rows_room: SharedMemory | None = None
        #: Regions whose memory the worker has; it is not kept alive here.
        self._sent: Recent[weakref.ref[Region]] = Recent()
        self._numbers = 0
        self._release: asyncio.Future[None] | None = None

    async def secure(self, tls: TlsCarrier, turns: asyncio.Semaphore) -> None:
        """Go on under TLS on the same socket: the handshake waits on the event loop, and computes in a thread in
        turns. Raises Unauthenticated, ConnectionError.
        """
        tls.prepare(self._stall_seconds)
        complete = [False]

        def go_on() -> None:
            complete[0] = tls.handshake()

        while True:
            async with turns:
                await self._in_thread(go_on)
            if complete[0]:
                self._carrier = tls
                return
            await self._until_readable(idle=True)

    def admit(self) -> None:
        """Its token was right: messages may have full length from now on."""
        self._most_bytes = MAX_MESSAGE_BYTES

    async def share(self, segments: Sequence[Region], rooms: Sequence[SharedMemory] = ()) -> None:
        """Become an shm transport: answer Attach with the worker's gradient ``segments``, which are its alone.

        ``rooms``: memory for rows of its pushes, and for rows it asks for.
        """
        self.kind = Transport.SHM
        self._segments = segments
        descriptors = [region.segment.fd for region in segments if region.segment]
        if rooms:
            self._pushed_room, self._rows_room = rooms
            descriptors += [room.fd for room in rooms]
        segment_bytes = segments[0].layout.region_bytes if segments else 0
        await self._send(AttachedChannel(segment_bytes, len(rooms[0].bytes) if rooms else 0), descriptors=descriptors)

    async def hand_over(self, room: Room) -> None:
        """Answer Attach with the memory of ``room``, which nobody writes while it is lent. Raises OSError."""
        assert room.segment is not None
        room.segment.seal()
        descriptor = room.segment.lend()
        try:
            await self._send(AttachedChannel(len(room.data)), descriptors=[descriptor])
        finally:
            os.close(descriptor)

    # -- reading

    async def receive(self, at_once: AtOnce | None = None) -> StepRequest | None:
        """The next message; None when the worker closed the connection between two."""
        while True:
            message = self._next_now(at_once)
            if message is Later.LATER:
                self._at_once = at_once
                try:
                    await self._until_readable(idle=True)
                finally:
                    self._at_once = self._readable = None  # an error in it refers to what was being dealt with
                if (left := self._left) is not None:
                    self._left = None
                    return left
                continue
            if message is None:
                break
            return message
        head = bytearray(LENGTH.size)
        if not await self._fill(memoryview(head), may_end=True):
            return None
        body = bytearray(checked_length(head, self._most_bytes))
        await self._fill(memoryview(body))
        return request_from_bytes(bytes(body))

    def _next_now(self, at_once: AtOnce | None) -> StepRequest | Later | None:
        """The next message that ``at_once`` leaves to a task; None: it has to be received in parts."""
        carrier = self._carrier
        try:
            while True:
                if self._begun is None:
                    data = carrier.message_now(self._most_bytes)
                    if data is None:
                        return None
                    message = request_from_bytes(data)
                    if at_once is None or (pieces := at_once.begin(message)) is None:
                        return message
                    if pieces:
                        self._begun = message, [*pieces]
                if self._begun is not None:
                    message, missing = self._begun
                    self._fill_now(missing)
                    self._begun = None
                if at_once is None or not at_once.end():
                    return message
                if not carrier.ahead:
                    return Later.LATER
        except BlockingIOError:
            return Later.LATER

    def _fill_now(self, missing: list[memoryview]) -> None:
        """Read a payload as far as it has come; what is left is ``missing``. Raises as ``_next_now``."""
        try:
            while missing:
                got = self._carrier.receive_now(missing[0])
                if got == 0:
                    raise ConnectionResetError("the worker closed the connection in the middle of a push")
                self._came_at = self._loop.time()
                if got < len(missing[0]):
                    missing[0] = missing[0][got:]
                else:
                    del missing[0]
        except BlockingIOError:
            if self._look is None:
                self._look = self._loop.call_later(self._stall_seconds, self._look_for_stall)
            raise

    def _look_for_stall(self) -> None:
        """Now and then while a payload comes that no task waits for. It costs nothing where payloads come whole."""
        self._look = None
        if self._begun is None:
            return
        deadline = self._came_at + self._stall_seconds
        if self._loop.time() < deadline:
            self._look = self._loop.call_at(deadline, self._look_for_stall)
        elif self._readable is not None and not self._readable.done():
            self._readable.set_exception(ConnectionAbortedError("the worker stalled in the middle of a push"))

    async def receive_payload(self, pieces: Sequence[memoryview]) -> None:
        """The bytes, without framing."""
        if sum(map(len, pieces)) <= AT_ONCE_BYTES:
            for piece in pieces:
                await self._fill(piece)
        else:
            await self._in_thread(lambda: self._carrier.receive_into(pieces))

    def gradients(self, segment: int) -> Region:
        """The gradient segment of this number, from 1."""
        if self.kind != Transport.SHM:
            raise no_segments(self.kind)
        if not 1 <= segment <= len(self._segments):
            raise InvalidRequest(
                "a push names a gradient segment that does not exist",
                expected=f"1 to {len(self._segments)}",
                actual=str(segment),
            )
        return self._segments[segment - 1]

    def pushed_rows(self, size: int) -> memoryview:
        """What the worker has written at the beginning of its memory for rows."""
        room = self._pushed_room.bytes if self._pushed_room else memoryview(b"")
        if size > len(room):
            raise InvalidRequest(
                "a push has more rows in shared memory than fit there",
                expected=f"at most {len(room)} bytes",
                actual=f"{size} bytes",
            )
        return room[:size]

    async def _fill(self, view: memoryview, *, may_end: bool = False) -> bool:
        """Read ``view`` full; False when the connection ends before its first byte and ``may_end``."""
        at = 0
        while at < len(view):
            try:
                got = self._carrier.receive_now(view[at:])
            except BlockingIOError:
                await self._until_readable(idle=may_end and at == 0)
                continue
            if got == 0:
                if may_end and at == 0:
                    return False
                raise ConnectionResetError("the worker closed the connection in the middle of a message")
            at += got
        return True

    async def _until_readable(self, *, idle: bool) -> None:
        """Wait for bytes: between messages as long as it takes, within one as long as a peer may stall."""
        self._readable = self._loop.create_future()
        if self._closed:
            raise ConnectionAbortedError("the connection is closed")
        if not self._watched:
            self._watched = True
            self._loop.add_reader(self._carrier.fileno(), self._on_readable)
            self._carrier.keep_blocking()  # uvloop has made it non-blocking; the threads count on the opposite
        if idle:
            await self._readable
            return
        try:
            async with asyncio.timeout(self._stall_seconds):
                await self._readable
        except TimeoutError as error:
            raise ConnectionAbortedError("the worker stalled in the middle of a message") from error

    def _on_readable(self) -> None:
        """Wakes the reading task where it has something to do: a message that is dealt with at once is not given it."""
        readable = self._readable
        if readable is None or readable.done():
            # Bytes that are not awaited yet: watched again when they are.
            self._unwatch()
            return
        if (at_once := self._at_once) is not None:
            try:
                left = self._next_now(at_once)
            except Exception as error:  # noqa: BLE001 -- it belongs to the task that waits
                readable.set_exception(error)
                return
            if left is Later.LATER:
                return
            self._left = left
        readable.set_result(None)

    def _unwatch(self) -> None:
        if self._watched:
            self._watched = False
            self._loop.remove_reader(self._carrier.fileno())

    # -- writing

    async def send(self, reply: StepReply) -> None:
        """One message."""
        await self._send(reply)

    def send_at_once(self, answer: StepAnswer, region: Region, ranges: Sequence[Range]) -> bool:
        """In one write, a copy of the rest is kept; or, where memory is shared, through a copy that the worker maps."""
        payload, descriptors = region.pieces(ranges), None
        answer.payload_bytes = size = len(payload[0]) if len(payload) == 1 else sum(map(len, payload))
        if size <= INLINE_BYTES:
            parts = framed_pieces(reply_to_pieces(answer, payload))
        elif (descriptors := self._copied(answer, region, ranges)) is not None:
            parts = framed_pieces(reply_to_pieces(answer))
        else:
            parts = [*framed_pieces(reply_to_pieces(answer)), *payload]
        rest = self._carrier.send_now(parts, descriptors or ())
        if rest:
            self._unsent = [bytes(piece) for piece in rest], descriptors or ()
        return not rest

    def _copied(self, answer: StepAnswer, region: Region, ranges: Sequence[Range]) -> tuple[int, ...] | None:
        """Copy what ``answer``, to a push, brings to memory of this stream alone; returns descriptors that go with it.

        The worker has read what was there before it sends its next push: nobody waits for it. None: nothing is copied,
        for it is large, or no memory is shared.
        """
        if self.kind is not Transport.SHM or len(region.bytes) > AT_ONCE_BYTES:
            return None
        if (copy := self._copy) is None:
            copy = self._copy = Region(region.layout)
        if copy.segment is None:
            return None
        for begin, end in ranges:
            copy.bytes[begin:end] = region.bytes[begin:end]
        answer.segment, descriptors = self._number(copy, copy.segment)
        answer.copied = True
        return descriptors

    async def send_rest(self) -> None:
        """In a thread, for the worker does not read."""
        (rest, descriptors), self._unsent = self._unsent, ([], ())
        await self._in_thread(lambda: self._carrier.send_all(rest, descriptors))

    async def send_parameters(self, answer: StepAnswer, region: Region, ranges: Sequence[Range]) -> None:
        """As any payload; but what can be shared is copied for the worker, or above 1 MB lent until it has read it."""
        pieces = region.pieces(ranges)
        shared = region.segment if self.kind == Transport.SHM else None
        answer.payload_bytes = sum(map(len, pieces))
        if shared is not None and answer.payload_bytes > INLINE_BYTES:
            # A worker may ask for values while it has not read the answer to its last push.
            if answer.sequence and (descriptors := self._copied(answer, region, ranges)) is not None:
                await self._send(answer, descriptors=descriptors)
            else:
                await self._lend(answer, region, shared)
        else:
            await self._send(answer, pieces)

    async def send_payload(self, answer: Answer, payload: Sequence[memoryview]) -> None:
        """The result with its payload in it or behind it."""
        answer.payload_bytes = sum(map(len, payload))
        await self._send(answer, payload)

    async def send_bytes(self, pieces: Iterable[memoryview]) -> None:
        """Send ``pieces`` as they are, without framing; returns when they are not read any more.

        Those that are made one by one are made in the thread that sends them; what that raises is raised here.
        """

        def send() -> None:
            if isinstance(pieces, Sequence):
                self._carrier.send_all(pieces)
                return
            for piece in pieces:
                self._carrier.send_all([piece])

        await self._in_thread(send)

    def room(self, size: int) -> memoryview | None:
        """The memory for rows, for the next ``send_rows``."""
        if self._rows_room is None or size > len(self._rows_room.bytes) or size <= INLINE_BYTES:
            return None
        return self._rows_room.bytes[:size]

    async def send_rows(self, rows: RowsAnswer, values: memoryview, *, in_room: bool) -> None:
        """As any payload; what is in shared memory is lent until the worker has read it."""
        if not in_room:
            await self.send_payload(rows, [values])
            return
        rows.payload_bytes, rows.in_room = len(values), True
        self._release = self._loop.create_future()
        await self._send(rows)
        await self._release

    def released(self) -> None:
        """The worker has read what was lent to it last."""
        if self._release is not None and not self._release.done():
            self._release.set_result(None)

    def _number(self, region: Region, segment: SharedMemory) -> tuple[int, tuple[int, ...]]:
        """What the worker knows ``region`` by, and the descriptor that goes with the number for the first time."""
        if (number := self._sent.find(lambda sent: sent() is region)) is not None:
            return number, ()
        self._numbers = number = self._numbers + 1
        segment.seal()
        self._sent.put(number, weakref.ref(region))
        return number, (segment.fd,)

    async def _lend(self, answer: StepAnswer, region: Region, segment: SharedMemory) -> None:
        answer.segment, descriptors = self._number(region, segment)
        self._release = self._loop.create_future()
        await self._send(answer, descriptors=descriptors)
        await self._release

    async def _send(self, reply: StepReply, pieces: Sequence[memoryview] = (), descriptors: Sequence[int] = ()) -> None:
        size = sum(map(len, pieces))
        small = size <= INLINE_BYTES
        parts = framed_pieces(reply_to_pieces(reply, pieces if small else ())) + ([] if small else [*pieces])
        if descriptors:
            # New memory is rarely shared; what goes with it may have to wait.
            await self._in_thread(lambda: self._carrier.send_all(parts, descriptors))
            return
        # A large payload would keep the loop busy even where the socket takes it at once.
        now = len(parts) if size <= AT_ONCE_BYTES else 1
        if rest := self._carrier.send_now(parts[:now]) + parts[now:]:
            await self._in_thread(lambda: self._carrier.send_all(rest))

    async def _in_thread(self, work: Callable[[], None]) -> None:
        if self._closed:  # its threads take no work any more
            raise ConnectionAbortedError("the connection is closed")
        await in_thread(work, self._threads, hurry=self.close)

    def close(self) -> None:
        """End the connection; pending calls raise ConnectionError. Safe to repeat."""
        if self._closed:
            return
        self._closed = True
        self._unwatch()
        if self._look is not None:
            self._look.cancel()
        for waiting in (self._readable, self._release):
            if waiting is not None and not waiting.done():
                waiting.set_exception(ConnectionAbortedError("the connection is closed"))
                waiting.exception()  # seen: it may not be awaited
        # Anything that still refers to this transport, such as a traceback, keeps no memory of the worker.
        self._segments, self._pushed_room, self._rows_room, self._copy, self._begun = (), None, None, None, None
        self._carrier.shut_down()
        self._threads.shutdown(wait=False)
        self._loop.run_in_executor(None, self._dispose)

    def _dispose(self) -> None:
        self._threads.shutdown(wait=True)
        self._carrier.close()
