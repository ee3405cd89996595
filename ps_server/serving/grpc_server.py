"""Start and stop of a gRPC server: bind, health, reflection, ready file, signals, grace time."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import socket
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import uvloop
from grpc_health.v1 import health, health_pb2, health_pb2_grpc  # type: ignore[import-untyped]
from grpc_reflection.v1alpha import reflection  # type: ignore[import-untyped]

from ps_protocol import times
from ps_protocol.errors import ConfigError
from ps_protocol.files import PUBLIC_MODE, replace_file
from ps_protocol.logs import EventLogger
from ps_protocol.rpc.channel import MAX_MESSAGE_BYTES, listen, new_server
from ps_server.limits import LimitCounts, ServerLimits
from ps_server.serving.authorization import Authorization
from ps_server.serving.call_limits import CallLimits
from ps_server.serving.malformed import MalformedRequests

logger = EventLogger(__name__)


#: Adds one service to a server that is not started yet.
Register = Callable[[grpc.aio.Server], None]

_DEFAULT_LIMITS = ServerLimits()

_WILDCARDS = frozenset({"", "0.0.0.0", "::"})


@dataclass(frozen=True)
class RunningServer:
    """A server that answers calls. Used on the event loop that started it."""

    #: host:port for clients; the host name if the server listens on all addresses.
    address: str
    port: int
    _server: grpc.aio.Server = field(repr=False)
    _health: health.aio.HealthServicer = field(repr=False)
    #: Checks the callers of its streams until it stops.
    _looking: asyncio.Task[None] | None = field(repr=False)

    async def stop(self, grace_seconds: float = times.END_SECONDS) -> None:
        """Report NOT_SERVING, accept no new calls, cancel those still running after ``grace_seconds``. Repeatable."""
        await self._health.enter_graceful_shutdown()
        await self._server.stop(grace_seconds)
        if self._looking:
            self._looking.cancel()


def join_address(host: str, port: int) -> str:
    """``host:port``, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


async def start(
    bind: str,
    port: int,
    services: Sequence[tuple[str, Register]],
    max_request_bytes: int = MAX_MESSAGE_BYTES,
    authorization: Authorization | None = None,
    *,
    limits: ServerLimits = _DEFAULT_LIMITS,
    limit_counts: LimitCounts | None = None,
) -> RunningServer:
    """Serve ``services``, (full protobuf name, register) pairs, with health and reflection, on ``bind``:``port``.

    Port 0 takes any free port. A message of more than ``max_request_bytes`` is refused unread. ``authorization``
    decides who may call, and has the certificate. ``limits`` are those of clients; ``limit_counts`` counts refusals.
    Raises ConfigError when it cannot listen on the address, or may not without TLS and tokens.
    """
    authorization = authorization or Authorization()
    security = authorization.security
    check_free(bind, port)
    security.check_bind(bind, "this server")
    counts = limit_counts or LimitCounts()
    calls = CallLimits(limits, counts)
    server = new_server([calls, authorization, MalformedRequests()], max_request_bytes, limits.server_options)
    servicer = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    for _, register in services:
        register(server)
    names = [name for name, _ in services]
    if security.reflects:
        reflection.enable_server_reflection([*names, health.SERVICE_NAME, reflection.SERVICE_NAME], server)
    try:
        bound = listen(server, join_address(bind or "::", port), security)
    except RuntimeError as error:
        raise _cannot_listen(bind, port, str(error)) from error
    await server.start()
    for name in ("", *names):
        await servicer.set(name, health_pb2.HealthCheckResponse.SERVING)
    host = socket.gethostname() if bind in _WILDCARDS else bind
    looking = asyncio.create_task(authorization.streams.run()) if security.authenticates else None
    return RunningServer(join_address(host, bound), bound, server, servicer, looking)


def _raise_descriptors() -> None:
    """Raise the limit of open files to the maximum: each connection of a worker takes one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(ValueError, OSError):  # more than the kernel lets any process have
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def check_free(bind: str, port: int) -> None:
    """Bind once before gRPC does, which would not report the reason of a failure. Raises ConfigError."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            bind or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        raise _cannot_listen(bind, port, error.strerror or str(error)) from error


def _cannot_listen(bind: str, port: int, reason: str) -> ConfigError:
    return ConfigError(
        f"cannot listen on {join_address(bind, port)}: {reason}",
        remedy="give another --port (0 takes any free one), and as --bind an address of this machine",
    )


def write_ready_file(path: Path, address: str) -> None:
    """Put ``address`` into the file ``path`` atomically, so that a reader never sees a part of it; or write it to the
    pipe ``path``, such as /dev/fd/5. Raises ConfigError where that cannot be, also where nobody reads the pipe.
    """
    try:
        if path.is_fifo():
            with os.fdopen(os.open(path, os.O_WRONLY | os.O_NONBLOCK), "w") as pipe:
                pipe.write(address + "\n")
        else:
            replace_file(path, f"{address}\n".encode(), PUBLIC_MODE, durable=False)
    except OSError as error:
        raise ConfigError(
            f"the ready file {path} cannot be written: {error.strerror}",
            remedy="give a path in a folder that this user may write, or a pipe that is read",
        ) from error


def run(main: Callable[[asyncio.Event], Coroutine[Any, Any, None]]) -> None:
    """Run ``main(stop)`` on uvloop until it returns. Called by entry points, from the main thread.

    SIGINT and SIGTERM set ``stop``, upon which ``main`` stops its servers and returns; a second signal ends the
    process at once.
    """

    async def supervised() -> None:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        numbers = (signal.SIGINT, signal.SIGTERM)

        def on_signal(number: signal.Signals) -> None:
            logger.info("server.stopping", "%s: stopping", number.name)
            stop.set()
            for each in numbers:
                loop.remove_signal_handler(each)

        for number in numbers:
            loop.add_signal_handler(number, on_signal, number)
        try:
            await main(stop)
        finally:
            for number in numbers:
                loop.remove_signal_handler(number)

    _raise_descriptors()
    uvloop.run(supervised())
