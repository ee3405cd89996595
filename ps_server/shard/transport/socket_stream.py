"""The transports on sockets: bulk (payloads on the socket) and shm (payloads in memory that both sides map)."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from ps_protocol import times
from ps_protocol.cluster.answers import Answer, AttachedChannel, RowsAnswer, StepAnswer, StepReply
from ps_protocol.cluster.requests import StepRequest
from ps_protocol.cluster.transport import Transport
from ps_protocol.errors import InvalidRequest
from ps_protocol.model.layout import Range
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
from ps_server.shard.execution.tasks import in_thread
from ps_server.shard.transport.base import AtOnce, no_segments
from ps_server.state.region import Region

INLINE_TRANSFER_BYTES = 1 << 20
"""Up to this size a transfer is tried on the event loop; it takes less time than handing it to a thread."""


class SocketServerTransport:
    """A ServerTransport on one connected socket.

    Messages and small payloads are moved on the event loop without ever waiting there; large payloads by two threads
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
        #: Of an answer that the socket did not take whole.
        self._unsent: list[memoryview | bytes] = []
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

    # -- reading

    async def receive(self, at_once: AtOnce | None = None) -> StepRequest | None:
        """The next message; None when the worker closed the connection between two."""
        while True:
            try:
                data = self._carrier.message_now(self._most_bytes)
            except BlockingIOError:
                self._at_once = at_once
                try:
                    await self._until_readable(idle=True)
                finally:
                    self._at_once = self._readable = None  # an error in it refers to what was being dealt with
                if (left := self._left) is not None:
                    self._left = None
                    return left
                continue
            if data is None:
                break
            message = request_from_bytes(data)
            if at_once is None or not at_once(message):
                return message
        head = bytearray(LENGTH.size)
        if not await self._fill(memoryview(head), may_end=True):
            return None
        body = bytearray(checked_length(head, self._most_bytes))
        await self._fill(memoryview(body))
        return request_from_bytes(bytes(body))

    async def receive_payload(self, pieces: Sequence[memoryview]) -> None:
        """The bytes, without framing."""
        if sum(map(len, pieces)) <= INLINE_TRANSFER_BYTES:
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
                while (data := self._carrier.message_now(self._most_bytes)) is not None:
                    if not at_once(message := request_from_bytes(data)):
                        self._left = message
                        break
            except BlockingIOError:
                return
            except Exception as error:  # noqa: BLE001 -- it belongs to the task that waits
                readable.set_exception(error)
                return
        readable.set_result(None)

    def _unwatch(self) -> None:
        if self._watched:
            self._watched = False
            self._loop.remove_reader(self._carrier.fileno())

    # -- writing

    async def send(self, reply: StepReply) -> None:
        """One message."""
        await self._send(reply)

    def send_at_once(self, answer: StepAnswer, payload: Sequence[memoryview]) -> bool:
        """In one write; a copy of the rest is kept."""
        answer.payload_bytes = sum(map(len, payload))
        rest = self._carrier.send_now(framed_pieces(reply_to_pieces(answer, payload)))
        self._unsent = [bytes(piece) for piece in rest] if rest else rest
        return not rest

    async def send_rest(self) -> None:
        """In a thread, for the worker does not read."""
        rest, self._unsent = self._unsent, []
        await self._in_thread(lambda: self._carrier.send_all(rest))

    async def send_parameters(self, answer: StepAnswer, region: Region, ranges: Sequence[Range]) -> None:
        """As any payload; but what is large and can be shared is lent until the worker has read it."""
        pieces = region.pieces(ranges)
        shared = region.segment if self.kind == Transport.SHM else None
        answer.payload_bytes = sum(map(len, pieces))
        if shared is not None and answer.payload_bytes > INLINE_BYTES:
            await self._lend(answer, region, shared)
        else:
            await self._send(answer, pieces)

    async def send_payload(self, answer: Answer, payload: Sequence[memoryview]) -> None:
        """The result with its payload in it or behind it."""
        answer.payload_bytes = sum(map(len, payload))
        await self._send(answer, payload)

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

    async def _lend(self, answer: StepAnswer, region: Region, segment: SharedMemory) -> None:
        number = self._sent.find(lambda sent: sent() is region)
        descriptors = []
        if number is None:
            self._numbers = number = self._numbers + 1
            segment.seal()
            self._sent.put(number, weakref.ref(region))
            descriptors = [segment.fd]
        answer.segment = number
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
        now = len(parts) if size <= INLINE_TRANSFER_BYTES else 1
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
        for waiting in (self._readable, self._release):
            if waiting is not None and not waiting.done():
                waiting.set_exception(ConnectionAbortedError("the connection is closed"))
                waiting.exception()  # seen: it may not be awaited
        # Anything that still refers to this transport, such as a traceback, keeps no memory of the worker.
        self._segments, self._pushed_room, self._rows_room = (), None, None
        self._carrier.shut_down()
        self._threads.shutdown(wait=False)
        self._loop.run_in_executor(None, self._dispose)

    def _dispose(self) -> None:
        self._threads.shutdown(wait=True)
        self._carrier.close()
