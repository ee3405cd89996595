"""The connection to the coordinator: waits for it, and repeats calls with growing pauses while it does not answer."""

from __future__ import annotations

import math
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import grpc

from ps_protocol import retry, times
from ps_protocol.cluster.address import split_address
from ps_protocol.errors import InvalidRequest, PsError, Unauthenticated, Unavailable
from ps_protocol.rpc.channel import open_channel
from ps_protocol.rpc.client_errors import is_answer, translate
from ps_protocol.rpc.reach import why_unreachable
from ps_protocol.security.security import OFF, CredentialsReplaced, Security
from ps_protocol.v1 import coordinator_pb2 as pb
from ps_protocol.v1.coordinator_pb2_grpc import CoordinatorStub


class CoordinatorConnection:
    """Calls by the name of their RPC. Any thread may use it. Errors are ps_protocol.errors."""

    def __init__(self, address: str, security: Security = OFF) -> None:
        self.address = address
        self._security = security
        #: For messages about the connection.
        self.peer = f"the coordinator at {address}"
        self._channel = open_channel(address, security)
        #: For calls with a stream of answers.
        self.stub: Any = CoordinatorStub(self._channel)  # type: ignore[no-untyped-call]
        self._closed = threading.Event()
        self._lock = threading.Lock()
        #: Calls that broke off and were made again.
        self.repeated = 0

    def close(self) -> None:
        """Close the connection; calls in progress fail with Unavailable."""
        self._closed.set()
        self._channel.close()

    def wait_until_reachable(self, timeout_seconds: float, on_wait: Callable[[str], None] = lambda text: None) -> None:
        """Return once the coordinator answers; call ``on_wait`` every few seconds.

        Raises Unavailable, naming address and remedy, after ``timeout_seconds``, which may be infinite.
        """
        begin = time.monotonic()
        while True:
            left = begin + timeout_seconds - time.monotonic()
            try:
                self.once("GetStatus", pb.GetStatusRequest(), min(left, times.HINT_SECONDS), wait_for_ready=True)
                return
            except Unavailable:
                if self._closed.is_set():
                    raise
                passed = time.monotonic() - begin
                why = self._why("it")
                if isinstance(why, Unauthenticated):
                    raise self._why(self.peer) from None
                if passed >= timeout_seconds:
                    # Without the earlier errors: their tracebacks add nothing.
                    raise Unavailable(
                        f"{self.peer} did not answer within {timeout_seconds:g} s: {why.message}",
                        remedy=f"start it there (ps-coordinator or ps-run), or give the right address: PS_COORDINATOR; "
                        f"{why.remedy}",
                    ) from None
                most = f", up to {timeout_seconds:g} s" if math.isfinite(timeout_seconds) else ""
                on_wait(f"waiting for {self.peer} since {passed:.0f} s{most}: {why.message}")
                self._closed.wait(retry.COORDINATOR.first_seconds)

    def connect(self, timeout_seconds: float) -> None:
        """Return once the coordinator answers, for commands that a person waits for; a relay does, too.

        Raises Unavailable with the reason: at once for an unknown name and a port where nothing listens, after
        ``timeout_seconds`` for an address that does not answer.
        """
        host, port = split_address(self.address)
        try:
            socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except socket.gaierror:
            raise self._why(self.peer) from None
        try:
            with suppress(InvalidRequest):  # a relay refuses the call, and may take the command's own
                self.once("GetStatus", pb.GetStatusRequest(), timeout_seconds)
        except Unavailable:
            raise self._why(self.peer) from None

    def _why(self, peer: str) -> PsError:
        """Why ``peer``, the coordinator, does not answer."""
        return why_unreachable(peer, self.address, security=self._security)

    def once(
        self,
        method: str,
        request: Any,
        timeout_seconds: float,
        *,
        wait_for_ready: bool = False,
        metadata: Sequence[tuple[str, str | bytes]] = (),
    ) -> Any:
        """One try of ``timeout_seconds``. ``wait_for_ready``: it waits that long also while no coordinator is there.

        A call that is refused for a certificate or token that was replaced meanwhile is repeated with the new ones.
        """
        deadline = time.monotonic() + timeout_seconds
        while True:
            try:
                left = deadline - time.monotonic()
                return self._once(method, request, left, wait_for_ready=wait_for_ready, metadata=metadata)
            except CredentialsReplaced:
                pause = retry.COORDINATOR.first_seconds
                if time.monotonic() + pause >= deadline or self._closed.wait(pause):
                    raise

    def _once(self, method: str, request: Any, timeout_seconds: float, **options: Any) -> Any:
        if self._closed.is_set():
            raise Unavailable(f"the connection to {self.peer} was closed")
        try:
            return getattr(self.stub, method)(request, timeout=max(timeout_seconds, 0.001), **options)
        except grpc.RpcError as error:
            raise translate(error, self.peer) from error
        except ValueError as error:
            # gRPC raises this for a call on a channel that another thread closes at the same time.
            if not self._closed.is_set():
                raise
            raise Unavailable(f"the connection to {self.peer} was closed") from error

    def call(
        self,
        method: str,
        request: Any,
        timeout_seconds: float,
        *,
        metadata: Sequence[tuple[str, str | bytes]] = (),
        on_wait: Callable[[str], None] = lambda text: None,
        try_seconds: float = math.inf,
    ) -> Any:
        """Repeated until it is answered; ``on_wait`` is called with why it is not. Raises Unavailable after
        ``timeout_seconds``.

        With ``try_seconds``, of one try, it is a first call: what a certificate or TLS on one side prevents is raised
        at once, as Unauthenticated.
        """
        attempts = retry.Attempts(retry.COORDINATOR.within(timeout_seconds))
        is_first = math.isfinite(try_seconds)
        while True:
            try:
                seconds = min(try_seconds, attempts.left_seconds)
                return self.once(method, request, seconds, wait_for_ready=True, metadata=metadata)
            except Unavailable as error:
                why: PsError = error
                if is_first and not self._closed.is_set() and not is_answer(error):
                    why = self._why(self.peer)
                pause = attempts.pause_after(error)
                # A call after a pause to the end would have no time, and its error would say less.
                if (
                    isinstance(why, Unauthenticated)
                    or pause is None
                    or pause >= attempts.left_seconds
                    or self._closed.wait(pause)
                ):
                    raise why from error.__cause__
                on_wait(f"waiting: {why.message}")
                with self._lock:
                    self.repeated += 1
