"""One remote procedure call between two processes, as both of its sides see it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import grpc

from simulation.runtime.kernel import Handle, Process
from simulation.runtime.network import Network, Pipe

if TYPE_CHECKING:
    from simulation.runtime.servers import ServerCall

Metadata = Sequence[tuple[str, str | bytes]]

END = object()
"""Follows the last message of a direction."""

_CONNECT_SECONDS = (0.1, 0.2, 0.4, 0.8, 1.0)


class CallError(grpc.RpcError):
    """How a call failed; grpc's own is error and call in one."""

    def __init__(self, code: grpc.StatusCode, details: str, trailers: Metadata = ()) -> None:
        super().__init__(f"{code.name}: {details}")
        self._code, self._details, self._trailers = code, details, trailers

    def code(self) -> grpc.StatusCode:
        """Its status."""
        return self._code

    def details(self) -> str:
        """Its text."""
        return self._details

    def trailing_metadata(self) -> Any:
        """What the server sent with it."""
        return self._trailers


class Call:
    """One call. The client's side is told by ``on_message`` and ``on_end``, in the client's process.

    The request of a call may be lost, or arrive when the client has given up; an answer may be lost.
    """

    def __init__(
        self,
        network: Network,
        client: Process,
        address: str,
        method: str,
        metadata: Metadata,
        timeout: float | None,
        *,
        wait_for_ready: bool,
        on_message: Callable[[bytes], None],
        on_end: Callable[[CallError | None], None],
    ) -> None:
        self.client = client
        self.address, self.method, self.metadata = address, method, metadata
        self.up, self.down = Pipe(network), Pipe(network)
        self.ended = False
        #: Somebody looks whether a partition outlasts it.
        self.is_watched = False
        self.server: ServerCall | None = None
        self._network = network
        self._kernel = kernel = network.kernel
        self._wait_for_ready = wait_for_ready
        self._on_message, self._on_end = on_message, on_end
        self._attempts = 0
        #: Messages sent before the connection was there.
        self._early: list[Any] = []
        self._connected = False
        self.deadline = None if timeout is None else kernel.now + timeout
        self._timer: Handle | None = None
        if timeout is not None:
            self._timer = kernel.schedule(timeout, client, self._expire)
        self._connect()

    @property
    def server_process(self) -> Process | None:
        """Where it is served, once it has arrived."""
        return self.server.process if self.server else None

    @property
    def server_name(self) -> str:
        """Name of that process; empty before."""
        return self.server.process.name if self.server else ""

    # -- the client's side

    def send(self, message: Any) -> None:
        """Send bytes, or END."""
        if self.ended:
            return
        if not self._connected or self.server is None:
            self._early.append(message)
        else:
            self.up.send(self.client, self.server.process, self.server.receive, message)

    def cancel(self) -> None:
        """Give the call up."""
        self._finish(CallError(grpc.StatusCode.CANCELLED, "cancelled by its client"), tell=True)

    def _connect(self) -> None:
        if self.ended:
            return
        network = self._network
        server = network.servers.get(self.address)
        if server is None or not server.process.alive or server.closed:
            self._kernel.schedule(network.delay(), self.client, self._refused, "connection refused")
            return
        heals = network.heals(self.client, server.process)
        if heals > self._kernel.now:
            wait = min(heals - self._kernel.now, 1.0)
            self._kernel.schedule(wait, self.client, self._refused, "no route")
            return
        self._connected = True
        self.server = server.call(self)
        lost, late = self._kernel.random.random(), self._kernel.random.random()
        if lost < network.calls_lost:
            self._lose(late < network.calls_late)
        network.begin(self, server.process)
        early, self._early = self._early, []
        self.up.send(self.client, server.process, self.server.begin)
        for message in early:
            self.send(message)

    def _refused(self, why: str) -> None:
        if self.ended:
            return
        if not self._wait_for_ready:
            self._finish(CallError(grpc.StatusCode.UNAVAILABLE, why))
            return
        pause = _CONNECT_SECONDS[min(self._attempts, len(_CONNECT_SECONDS) - 1)]
        self._attempts += 1
        self._kernel.schedule(pause, self.client, self._connect)

    def _lose(self, late: bool) -> None:
        """Break the connection around this call: the client hears nothing, and the request may come yet."""
        draw, now = self._kernel.random.random, self._kernel.now
        if late:
            self.up.hold(now + 3 * draw())
            self.down.cut = now
        elif draw() < 0.5:
            self.up.cut = self.down.cut = now
        else:
            self.down.cut = now + draw() * 2 * self._network.delay()
        self._kernel.schedule(0.05 + 0.5 * draw(), self.client, self.client_lost)
        self._kernel.schedule(3.1 + draw(), self.server_process, self.server_lost)

    def client_lost(self) -> None:
        """The client finds the connection broken."""
        self._finish(CallError(grpc.StatusCode.UNAVAILABLE, "the connection broke"))

    def server_lost(self) -> None:
        """The server finds the connection broken."""
        if self.server:
            self.server.cancel()

    def _expire(self) -> None:
        self._finish(CallError(grpc.StatusCode.DEADLINE_EXCEEDED, "no answer in time"), tell=True)

    def _finish(self, error: CallError | None, *, tell: bool = False) -> None:
        if self.ended:
            return
        self.ended = True
        if self._timer:
            self._timer.cancel()
        if tell and self.server:
            self.up.send(self.client, self.server.process, self.server.cancel)
        if self.server:
            self._network.end(self, self.server.process)
        self._on_end(error)
        # Both refer to what holds this call: without them it is gone when nobody uses it, before any collector runs.
        del self._on_end, self._on_message

    # -- what the server sends

    def reply(self, message: bytes) -> None:
        """From the server: one message."""
        assert self.server
        self.down.send(self.server.process, self.client, self._take, message)

    def close(self, error: CallError | None) -> None:
        """From the server: the call has ended, with ``error`` or well."""
        assert self.server
        self.down.send(self.server.process, self.client, self._finish, error)

    def _take(self, message: bytes) -> None:
        if not self.ended:
            self._on_message(message)
