"""The HTTP server of one process's metrics: plain requests for one page, on threads of its own."""

from __future__ import annotations

import json
import logging
import selectors
import socket
import ssl
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import MappingProxyType
from typing import Any

from ps_protocol import times
from ps_protocol.errors import ConfigError, PermissionDenied, PsError, Retryable, Unauthenticated
from ps_protocol.metrics.common import read_security
from ps_protocol.metrics.definition import Read
from ps_protocol.metrics.exposition import exposition
from ps_protocol.security.binding import HostNames, is_loopback
from ps_protocol.security.roles import VIEWING
from ps_protocol.security.security import OFF, Security
from ps_protocol.text import printable

logger = logging.getLogger(__name__)

CONNECTIONS = 16
"""Requests that are served at once. For a further one that connection is closed which has been without a whole request
for longest; where all have one, the further one is closed.
"""


JOB_LABEL = "ps_job"
"""The label with the name of the job. Not ``job``: Prometheus sets that one, to the name of its own configuration."""

_JSON = "application/json; charset=utf-8"
_TEXT = "text/plain; charset=utf-8"
_WILDCARDS = frozenset({"", "0.0.0.0", "::"})


@dataclass(frozen=True, slots=True)
class Target:
    """Another process that serves metrics."""

    #: host:port
    address: str
    #: Its role; the label ``component`` in Prometheus.
    component: str


Targets = Callable[[], Sequence[Target]]
"""Called from any thread. Raises Unavailable where it cannot answer."""


class MetricsServer:
    """Serves ``/metrics``, and ``/targets`` where there are any, until ``close``. Called from one thread."""

    def __init__(
        self,
        bind: str,
        port: int,
        read: Read,
        constant: Mapping[str, str],
        targets: Targets | None = None,
        *,
        security: Security = OFF,
        component: str = "",
        advertise: str = "",
    ) -> None:
        """Listens from now on; port 0 takes any free one. ``constant`` are labels of every sample.

        ``component``: the role of this process among ``targets``. ``advertise``: the host that clients reach this at,
        if it is not ``bind``.

        Raises ConfigError when the address cannot be listened on.
        """
        self._server = _listening(bind, port)
        host = advertise or (socket.gethostname() if bind in _WILDCARDS else bind)
        bound = self._server.server_address[1]
        #: host:port for clients; the name of the host where the server listens on all addresses.
        self.address = self._server.address = f"[{host}]:{bound}" if ":" in host else f"{host}:{bound}"
        self._server.read, self._server.constant, self._server.targets = read, dict(constant), targets
        self._server.component = component
        self._server.security, self._server.context = security, security.server_context()
        if is_loopback(bind) and not security.authenticates:
            self._server.names = HostNames(bind, advertise)
        #: Closed here, readable there.
        self._closing, told = socket.socketpair()
        self._thread = threading.Thread(target=self._server.serve_until, args=(told,), name="metrics", daemon=True)
        self._thread.start()

    def label(self, **labels: str) -> None:
        """From now on every sample has these labels, too."""
        self._server.constant = {**self._server.constant, **labels}

    @property
    def url(self) -> str:
        """Where the metrics are."""
        return f"{'https' if self._server.context else 'http'}://{self.address}/metrics"

    def close(self) -> None:
        """Accept nothing more. Repeatable."""
        self._closing.close()
        self._thread.join()
        self._server.server_close()


class _Connection:
    """One that is served on a thread of its own, and ended by the thread of the server when it takes too long."""

    def __init__(self, request: socket.socket) -> None:
        # A socket of its own: TLS takes the other one over, and its descriptor may be another connection's by then.
        self._socket = request.dup()
        self.asks = True
        self.ends = time.monotonic() + times.REQUEST_SECONDS

    def answer(self) -> None:
        """Its request is whole."""
        self.asks, self.ends = False, time.monotonic() + times.REQUEST_SECONDS

    def end(self) -> None:
        """Whatever its thread waits for fails."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Its thread has ended."""
        self._socket.close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    #: Closing does not wait for slow clients.
    block_on_close = False
    request_queue_size = 16
    #: Of ``handle_request``: there is one.
    timeout = 0

    read: Read
    constant: Mapping[str, str]
    targets: Targets | None
    address: str
    component: str
    security: Security
    context: ssl.SSLContext | None
    #: Those under which this may be asked; None: under any.
    names: HostNames | None = None

    def __init__(self, family: socket.AddressFamily, address: Any) -> None:
        self.address_family = family
        self._places = threading.BoundedSemaphore(CONNECTIONS)
        self._lock = threading.Lock()
        #: Those that have a place, oldest first.
        self._served: dict[threading.Thread, _Connection] = {}
        super().__init__(address, _Handler)

    def serve_until(self, told: socket.socket) -> None:
        """Serve until the other end of ``told`` is closed. Returns at once, whereas ``serve_forever`` polls."""
        with told, selectors.DefaultSelector() as selector:
            selector.register(self, selectors.EVENT_READ)
            selector.register(told, selectors.EVENT_READ)
            pause: float | None = None
            while True:
                ready = selector.select(pause)
                if any(key.fileobj is told for key, _ in ready):
                    return
                self._end_late()
                if ready:
                    self.handle_request()
                # A connection that was just taken is among those served a little later.
                pause = times.REQUEST_SECONDS / 10 if ready or self._served else None

    def _end_late(self) -> None:
        now = time.monotonic()
        with self._lock:
            for each in self._served.values():
                if now > each.ends:
                    each.end()

    def _make_room(self) -> bool:
        """Whether another connection is admitted; the one that was idle for longest is closed for it."""
        if self._places.acquire(blocking=False):
            return True
        with self._lock:
            oldest = next((each for each in self._served.values() if each.asks), None)
            if oldest is not None:
                oldest.end()
        return oldest is not None and self._places.acquire(timeout=times.CONNECT_SECONDS)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve one connection on a thread, if another one is admitted."""
        if not self._make_room():
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Serve one connection."""
        thread, connection = threading.current_thread(), None
        try:
            connection = _Connection(request)
            with self._lock:
                self._served[thread] = connection
            request.settimeout(times.REQUEST_SECONDS)
            if self.context is not None:
                request = self.context.wrap_socket(request, server_side=True)
            super().process_request_thread(request, client_address)
        except OSError as error:  # of TLS, too
            logger.debug("no connection for metrics from %s: %s", client_address, error)
            self.shutdown_request(request)
        finally:
            if connection is not None:
                with self._lock:
                    del self._served[thread]
                connection.close()
            self._places.release()

    def answers(self) -> None:
        """The present thread has a whole request."""
        with self._lock:
            self._served[threading.current_thread()].answer()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is no event; anything else is logged."""
        logger.debug("a request for metrics from %s failed", client_address, exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    server_version, sys_version = "torch-ps", ""

    def do_GET(self) -> None:
        """Answer one request."""
        path = self.path.partition("?")[0]
        self.server.answers()
        if not self._may_name():
            self._answer(HTTPStatus.MISDIRECTED_REQUEST, b"metrics are not served under that name\n", _TEXT)
            return
        try:
            self._admit()
            if path == "/metrics":
                accept = self.headers.get("Accept", "")
                samples = [*self.server.read(), *read_security(self.server.security)]
                self._answer(HTTPStatus.OK, *exposition(samples, self.server.constant, accept))
            elif path == "/targets" and self.server.targets is not None:
                own = Target(self.server.address, self.server.component)
                self._answer(HTTPStatus.OK, _discovery([own, *self.server.targets()], self.server.constant), _JSON)
            else:
                known = "/metrics" if self.server.targets is None else "/metrics, /targets"
                self._answer(HTTPStatus.NOT_FOUND, f"nothing is here; known: {known}\n".encode(), _TEXT)
        except (Unauthenticated, PermissionDenied) as error:
            self.server.security.refused.add(error)
            self._refuse(error)
        except Retryable as error:
            self._answer(HTTPStatus.SERVICE_UNAVAILABLE, f"{error}\n".encode(), _TEXT)

    do_HEAD = do_GET  # noqa: N815 -- the name is given

    def _may_name(self) -> bool:
        """Whether the request names this host, where that matters."""
        return self.server.names is None or self.server.names.allow(self.headers.get("Host", ""))

    def _admit(self) -> None:
        """Raises Unauthenticated or PermissionDenied for a caller that may not see metrics."""
        security, connection = self.server.security, self.connection
        der = connection.getpeercert(binary_form=True) if isinstance(connection, ssl.SSLSocket) else None
        certificate = ssl.DER_cert_to_PEM_cert(der).encode() if der else b""
        caller = security.authenticate(authorization=self.headers.get("Authorization", ""), certificate=certificate)
        security.authorize(caller, VIEWING, "reading metrics")

    def _refuse(self, error: PsError) -> None:
        unknown = isinstance(error, Unauthenticated)
        status = HTTPStatus.UNAUTHORIZED if unknown else HTTPStatus.FORBIDDEN
        self._answer(status, f"{error}\n".encode(), _TEXT, {"WWW-Authenticate": "Bearer"} if unknown else {})

    def _answer(
        self, status: HTTPStatus, body: bytes, content_type: str, more: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        for name, value in more.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are logged at level debug."""
        logger.debug("%s: %s", self.address_string(), printable(format % args))


def _discovery(found: Sequence[Target], constant: Mapping[str, str]) -> bytes:
    """The format of Prometheus' HTTP service discovery. All targets are of the job that ``constant`` names."""
    of_job = {JOB_LABEL: constant[JOB_LABEL]} if JOB_LABEL in constant else {}
    groups = [{"targets": [each.address], "labels": {"component": each.component} | of_job} for each in found]
    return json.dumps(groups).encode()


def _listening(bind: str, port: int) -> _Server:
    try:
        found = socket.getaddrinfo(bind or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        return _Server(found[0][0], found[0][4])
    except OSError as error:
        raise ConfigError(
            f"cannot serve metrics on {bind}:{port}: {error.strerror or error}",
            remedy="give another --metrics-port (0 takes any free one; off serves none)",
        ) from error
