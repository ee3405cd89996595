"""Where workers connect beside the gRPC stream: a Unix socket and a TCP port; a one-time token admits."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
import tempfile
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from ps_protocol.cluster.answers import AttachedChannel, RefusedChannel, SideChannel
from ps_protocol.cluster.requests import AttachRequest, ConfirmRequest, StepRequest
from ps_protocol.cluster.transport import Transport
from ps_protocol.errors import ConfigError, InvalidRequest, PsError
from ps_protocol.files import OwnFolder
from ps_protocol.logs import EventLogger
from ps_protocol.model.layout import Layout
from ps_protocol.security.security import OFF, Security
from ps_protocol.security.settings import BulkSecurity
from ps_protocol.weights.memory import Room
from ps_protocol.wire.carrier import PlainCarrier
from ps_protocol.wire.shared_memory import SharedMemory
from ps_protocol.wire.socket_messages import TOKEN_BYTES
from ps_protocol.wire.tls_carrier import TlsCarrier
from ps_protocol.wire.unix_peer import check_peer
from ps_server.limits import SIDE_HANDSHAKES, TOKEN_TIME, LimitCounts
from ps_server.serving.log_limit import LogLimit
from ps_server.shard.config import SideChannelConfig
from ps_server.shard.transport.base import ServerTransport
from ps_server.shard.transport.grpc_stream import GrpcServerTransport
from ps_server.shard.transport.socket_stream import SocketServerTransport
from ps_server.state.region import Region
from ps_server.tasks import first_of

logger = EventLogger(__name__)
logging.getLogger(__name__).addFilter(LogLimit())

MAX_GRADIENT_SEGMENTS = 2
"""A worker needs one, or two when it fills one while the other is applied."""

HANDSHAKE_THREADS = 2
"""TLS handshakes that compute at a time; those that wait for their peer take no thread."""

ROOM_BYTES = 128 << 20
"""Address space for rows in shared memory, each way; pages come as they are written. What is larger is sent."""


Lend = Callable[[int], Sequence[Region]]


class Offer:
    """The side channels offered to one stream. Lives on the event loop."""

    def __init__(self, layout: Layout | None, lend: Lend, memory: Room | None = None) -> None:
        #: None: nothing is pushed here.
        self.layout = layout
        #: What is handed over in the place of memory for pushes. It is not used for something else meanwhile.
        self.memory = memory
        #: Gives regions for gradients that the worker maps, called in a helper thread.
        self.lend = lend
        self.channels: list[SideChannel] = []
        #: The transport the worker has confirmed.
        self.confirmed: asyncio.Future[SocketServerTransport] = asyncio.get_running_loop().create_future()

    def confirm(self, transport: SocketServerTransport) -> bool:
        """The worker uses ``transport`` from now on; False when it is too late for that."""
        if self.confirmed.done():
            return False
        self.confirmed.set_result(transport)
        return True

    async def taken(self, seconds: float) -> SocketServerTransport | None:
        """The side channel, once the client has confirmed it; None: it has not in this time."""
        await first_of(self.confirmed, seconds=seconds)
        return self.confirmed.result() if self.confirmed.done() else None

    async def chosen(self, anchor: GrpcServerTransport) -> ServerTransport:
        """What the worker begins to use: a side channel, or the stream itself. Raises as ``ServerTransport`` does."""
        first = anchor.begun()
        await first_of(first, self.confirmed)
        if self.confirmed.done():
            return self.confirmed.result()
        self.confirmed.cancel()
        first.result()
        return anchor


#: How a new connection is checked and shows its token. Raises PsError, OSError.
_Begin = Callable[[SocketServerTransport, socket.socket], Awaitable[Offer]]


class SideChannels:
    """Owns the listening sockets and the tokens. One per shard process, on its event loop."""

    def __init__(self, config: SideChannelConfig, security: Security = OFF, counts: LimitCounts | None = None) -> None:
        """Listens from here on. Raises ConfigError when no port of the range is free."""
        self._config = config
        self._counts = counts or LimitCounts()
        self._shm_uid = security.settings.shm_uid
        #: None: the bulk transport's payloads are in clear.
        self._context = security.server_context() if security.settings.bulk is BulkSecurity.TLS else None
        #: Handshakes compute on so many threads at a time.
        self._handshakes = asyncio.Semaphore(HANDSHAKE_THREADS)
        self._tokens: dict[bytes, tuple[Offer, Transport]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        #: Connections that have not shown a token, oldest first.
        self._strangers: dict[SocketServerTransport, None] = {}
        self._counts.track(SIDE_HANDSHAKES, config.max_handshakes, lambda: len(self._strangers))
        self._unix = PrivateSocket.listen(for_others=self._shm_uid is not None) if config.shm else None
        self._tcp = _listen_tcp(config.bind, config.ports) if config.ports else None
        if self._unix is not None:
            self._spawn(self._accept(self._unix.listener, self._open_shared))
        if self._tcp is not None:
            self._spawn(self._accept(self._tcp, self._open_bulk))

    @property
    def token_seconds(self) -> float:
        """How long a token is valid."""
        return self._config.token_seconds

    @property
    def shares_memory(self) -> bool:
        """Whether processes of this host may map memory of this one."""
        return self._unix is not None

    @property
    def port(self) -> int | None:
        """TCP port of the bulk transport."""
        return self._tcp.getsockname()[1] if self._tcp else None

    async def close(self) -> None:
        """Stop listening and drop connections that have not been confirmed."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._unix is not None:
            self._unix.close()
        if self._tcp is not None:
            self._tcp.close()

    @contextmanager
    def offer(
        self,
        transports: Sequence[Transport | None],
        layout: Layout | None = None,
        lend: Lend = lambda number: (),
        memory: Room | None = None,
    ) -> Iterator[Offer]:
        """Offer what the worker asked for and this shard has. At the end of the block the tokens expire.

        ``layout``: of the model whose gradients come there; None: none do. ``lend`` gives regions for gradients that
        the worker maps, as ``LentRegions.take`` of this worker. ``memory``, which has a segment, is what a reader maps.
        """
        offer = Offer(layout, lend, memory)
        tokens = []
        for transport in dict.fromkeys(transports):
            token = secrets.token_bytes(TOKEN_BYTES)
            channel = self._channel(transport, token, offer)
            if channel is not None and transport is not None:
                tokens.append(token)
                self._tokens[token] = offer, transport
                offer.channels.append(channel)
        expiry = asyncio.get_running_loop().call_later(self._config.token_seconds, self._forget, tokens)
        try:
            yield offer
        finally:
            expiry.cancel()
            self._forget(tokens)
            # Cancelled: a worker that confirms from now on is too late. When done already, this does nothing.
            offer.confirmed.cancel()
            if not offer.confirmed.cancelled():
                offer.confirmed.result().close()

    def _channel(self, transport: Transport | None, token: bytes, offer: Offer) -> SideChannel | None:
        if transport is Transport.SHM and self._unix is not None:
            if offer.memory is not None or (offer.layout is not None and offer.layout.holds_any):
                return SideChannel(transport, token, name=str(self._unix.path))
            return None
        if transport is Transport.BULK and self.port is not None:
            return SideChannel(transport, token, port=self.port, tls=self._context is not None)
        return None

    def _forget(self, tokens: Sequence[bytes]) -> None:
        for token in tokens:
            self._tokens.pop(token, None)

    async def _accept(self, listener: socket.socket, begin: _Begin) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(listener)
            except OSError as error:
                logger.warning("caller.refused", "cannot take a connection: %s", error)
                await asyncio.sleep(1.0)  # out of descriptors, most likely: trying at once would spin
                continue
            transport = SocketServerTransport(PlainCarrier(connection), self._config.stall_seconds)
            # The one that has waited longest has had the most time to show its token.
            if len(self._strangers) >= self._config.max_handshakes:
                self._counts.add(SIDE_HANDSHAKES)
                oldest = next(iter(self._strangers))
                del self._strangers[oldest]
                oldest.close()
            self._strangers[transport] = None
            self._spawn(self._admit(transport, partial(begin, transport, connection)))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _open_shared(self, transport: SocketServerTransport, connection: socket.socket) -> Offer:
        message = await transport.receive()
        check_peer(connection, self._shm_uid)  # now: what it sent has been read, so it will read the refusal
        return await self._attach(transport, message, Transport.SHM)

    async def _open_bulk(self, transport: SocketServerTransport, connection: socket.socket) -> Offer:
        if self._context is not None:
            await transport.secure(TlsCarrier(connection, self._context, "the peer"), self._handshakes)
        return await self._attach(transport, await transport.receive(), Transport.BULK)

    async def _admit(self, transport: SocketServerTransport, begin: Callable[[], Awaitable[Offer]]) -> None:
        """``begin`` to Attached, then Confirm; anything else closes the connection."""
        confirmed = False
        try:
            async with asyncio.timeout(self._config.token_seconds):
                offer = await begin()
                self._strangers.pop(transport, None)
                message = await transport.receive()
            if isinstance(message, ConfirmRequest):
                confirmed = offer.confirm(transport)
        except PsError as error:
            logger.warning("caller.refused", "refused a side channel: %s", error)
            await _say(transport, error)
        except TimeoutError:
            self._counts.add(TOKEN_TIME)
            logger.debug("a side channel was not taken up in %g s", self._config.token_seconds)
        except OSError as error:
            logger.debug("a side channel was not taken up: %s", error)
        except Exception:
            # a defect, which one connection must not make thousands of lines of
            logger.exception("request.failed", "a side channel failed")
        finally:
            self._strangers.pop(transport, None)
            if not confirmed:
                transport.close()

    async def _attach(self, transport: SocketServerTransport, message: StepRequest | None, kind: Transport) -> Offer:
        if message is None:
            raise ConnectionResetError("closed before Attach")
        if not isinstance(message, AttachRequest):
            raise InvalidRequest("a side channel begins with Attach", actual=type(message).__name__)
        found = self._tokens.pop(message.token, None)
        if found is None or found[1] is not kind:
            raise InvalidRequest(
                "a side channel's token is wrong, used, or expired",
                expected="the token of the last Opened, once, within seconds, on the socket it is for",
                remedy="open the stream again",
            )
        transport.admit()
        offer, _ = found
        if kind is Transport.BULK:
            await transport.send(AttachedChannel())
            return offer
        if offer.memory is not None:
            await transport.hand_over(offer.memory)
            return offer
        segments = await asyncio.to_thread(offer.lend, min(message.segments or 1, MAX_GRADIENT_SEGMENTS))
        await transport.share(segments, _rooms(offer.layout))
        return offer


def _rooms(layout: Layout | None) -> list[SharedMemory]:
    """Memory for rows of pushes, and for rows asked for; none where the model has no tables, or there is none."""
    if layout is None or not layout.shard_map.spec.tables:
        return []
    try:
        return [SharedMemory.create(ROOM_BYTES, whole=False) for _ in range(2)]
    except OSError:
        return []


async def _say(transport: SocketServerTransport, error: PsError) -> None:
    try:
        await transport.send(RefusedChannel(error))
    except ConnectionError:
        pass  # it will find the connection closed


def _listen_tcp(bind: str, ports: Sequence[int]) -> socket.socket:
    """Raises ConfigError when no port of ``ports`` can be listened on."""
    reason = ""
    for port in ports:
        try:
            family = socket.getaddrinfo(bind or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
            listener = socket.socket(family, socket.SOCK_STREAM)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((bind, port))
        except OSError as error:
            reason = error.strerror or str(error)
            continue
        listener.listen(128)
        listener.setblocking(False)
        return listener
    raise ConfigError(
        f"cannot listen on {bind} for bulk transfers: {reason}",
        expected=f"a free port of {ports[0]}-{ports[-1]}" if ports[0] else "any free port",
        remedy="give another --bulk-ports, as 7200-7299, or off",
    )


PREFIX = "torch-ps-shm-"
"""Of the folders' names."""

NAME = "socket"

_MAX_PATH_BYTES = 107
"""Of the address of a Unix socket."""

_BASES = (tempfile.gettempdir, lambda: "/dev/shm")  # where the other is too long a path


class PrivateSocket:
    """A listener in a folder that it owns. The folder of a process that was killed is removed by the next shard."""

    def __init__(self, path: Path, listener: socket.socket, folder: OwnFolder) -> None:
        """See ``listen``."""
        self.path = path
        self.listener = listener
        self._folder = folder

    @classmethod
    def listen(cls, *, for_others: bool = False) -> PrivateSocket | None:
        """Listen on a new path; None where the system has no room for one.

        ``for_others``: other users may connect too, and are asked who they are; the path is still a secret.
        """
        for base in _BASES:
            try:
                folder = OwnFolder(PREFIX, Path(base()))
            except OSError as error:
                logger.debug("no socket for shared memory below %s: %s", base(), error)
                continue
            try:
                return cls(folder.path / NAME, _bound(folder.path / NAME, for_others), folder)
            except OSError as error:
                logger.debug("no socket for shared memory in %s: %s", folder.path, error)
                folder.close()
        return None

    def close(self) -> None:
        """Stop listening, and remove the folder."""
        self.listener.close()
        self._folder.close()


def _bound(path: Path, for_others: bool) -> socket.socket:
    if len(os.fsencode(path)) > _MAX_PATH_BYTES:
        raise OSError(f"{path} is longer than a socket's path may be")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(str(path))
        path.chmod(0o666 if for_others else 0o600)
        path.parent.chmod(0o711 if for_others else 0o700)
        listener.listen(128)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener
