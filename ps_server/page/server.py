"""Serves the page on a thread and an event loop of its own, so that viewers do not slow the coordinator."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from ps_protocol import times
from ps_protocol.cluster.history import JobHistory
from ps_protocol.errors import ConfigError
from ps_protocol.logs import EventLogger
from ps_protocol.security.security import Security
from ps_server.page.access import CERTIFICATE, PageAccess, certificate_of
from ps_server.page.app import page_app
from ps_server.page.broadcast import VIEWERS, Broadcast
from ps_server.serving.grpc_server import join_address

logger = EventLogger(__name__)

_CONNECTIONS = 4 * VIEWERS


WAITING = VIEWERS
"""The most connections without a whole request; one more closes the one that has waited longest."""

_BACKLOG = 128


class PageServer:
    """Listens from its construction to ``close``, both from any thread."""

    def __init__(self, bind: str, port: int, source: Callable[[], Awaitable[JobHistory]], security: Security) -> None:
        """``source`` is awaited on the page's loop. Port 0: any free one.

        Raises ConfigError when the address cannot be listened on, or may not: see Security.check_bind.
        """
        security.check_bind(bind, "the page")
        self._listener = _listen(bind, port)
        host, port = self._listener.getsockname()[:2]
        named = socket.gethostname() if host in ("0.0.0.0", "::") else host
        #: Where browsers find it.
        self.url = f"http{'s' if security.tls else ''}://{join_address(named, port)}/"
        self._source = source
        self._access = PageAccess(security, bind)
        self._security = security
        self._server: uvicorn.Server | None = None
        self._broadcast: Broadcast | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ps-page", daemon=True)
        self._thread.start()
        self._ready.wait()

    def close(self) -> None:
        """End all connections; returns when the thread has ended."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._stop)
        self._thread.join()
        self._listener.close()

    def _stop(self) -> None:
        if self._broadcast is not None:
            self._broadcast.close()
        if self._server is not None:
            self._server.should_exit = True

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except Exception:
            logger.exception("request.failed", "the page has ended; the job continues without it")
        finally:
            self._ready.set()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._broadcast = Broadcast(self._source)
        config = uvicorn.Config(
            page_app(self._broadcast, self._access),
            http=_PeerProtocol,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="warning",
            access_log=False,
            server_header=False,
            limit_concurrency=_CONNECTIONS,
            timeout_keep_alive=5,
            timeout_graceful_shutdown=1,
        )
        config.load()
        # A browser has no certificate, most of the time: it shows a token, which PageAccess wants then.
        config.ssl = self._security.server_context(asks=True)
        self._server = _ThreadServer(config)
        self._ready.set()
        await self._server.serve(sockets=[self._listener])


class _ThreadServer(uvicorn.Server):
    """Leaves the signals of the process to the coordinator."""

    def install_signal_handlers(self) -> None:
        """None."""

    def capture_signals(self) -> Any:
        """None."""
        from contextlib import nullcontext

        return nullcontext()


class _PeerProtocol(H11Protocol):
    """Puts the certificate of the peer into the scope of each request. Closes connections that make none."""

    _limit: asyncio.TimerHandle | None = None
    _waits_since = 0.0

    @property
    def waits(self) -> bool:
        """Whether the client has yet to send a request, or the rest of one."""
        return self.cycle is None or self.cycle.response_complete or self.cycle.more_body

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A connection has opened; under TLS, its handshake is done."""
        super().connection_made(transport)
        self._expect()
        waiting = [each for each in self.connections if isinstance(each, _PeerProtocol) and each.waits]
        if len(waiting) > WAITING:
            longest = min(waiting, key=lambda each: each._waits_since)
            # No longer counted: ``connection_lost`` is called later.
            self.connections.discard(longest)
            longest.transport.abort()
        certificate = certificate_of(transport.get_extra_info("ssl_object"))
        if certificate:
            self.app = _with_certificate(self.app, certificate)

    def connection_lost(self, exc: Exception | None) -> None:
        """It is closed."""
        super().connection_lost(exc)
        if self._limit is not None:
            self._limit.cancel()

    def on_response_complete(self) -> None:
        """Another request may come."""
        super().on_response_complete()
        self._expect()

    def _expect(self) -> None:
        """The time for the next request begins."""
        if self._limit is not None:
            self._limit.cancel()
        self._waits_since = self.loop.time()
        self._limit = self.loop.call_later(times.REQUEST_SECONDS, self._end_if_late)

    def _end_if_late(self) -> None:
        if self.waits:
            self.transport.abort()


def _with_certificate(app: Any, certificate: bytes) -> ASGIApp:
    async def call(scope: Scope, receive: Receive, send: Send) -> None:
        await app({**scope, CERTIFICATE: certificate}, receive, send)

    return call


def _listen(bind: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(bind or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
        return socket.create_server((bind, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        raise ConfigError(
            f"the page cannot listen on {join_address(bind, port)}: {error.strerror or error}",
            remedy="give another --page-port (0 takes any free one), or leave it out",
        ) from error
