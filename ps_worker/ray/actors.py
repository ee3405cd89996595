"""What runs in Ray's processes: an actor for each server, whose program is its child, and one for each worker."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ps_protocol.client.coordinator import EXIT_UNSAVED
from ps_protocol.errors import Unavailable
from ps_protocol.launch.life import LifePipe, StopWatch
from ps_protocol.times import LONG_PATIENCE_SECONDS
from ps_worker.own_server import OwnServer
from ps_worker.ray.plan import (
    TIMEOUTS,
    RayPlan,
    ServerKind,
    ServerName,
    server_command,
    server_environment,
)

SERVER_CALLS = 4
"""Calls of one ``ServerActor`` at a time: ``serve``, ``address``, ``process`` and ``stop``."""


class ServerActor:
    """One server. The driver calls ``serve`` once, and the others beside it, from other threads of the actor.

    The server dies with the actor, however that ends.
    """

    def __init__(self, name: ServerName, plan: RayPlan, host: str) -> None:
        """``host``: the address to listen on; empty: that of the node."""
        self._name = name
        self._plan = plan
        self._host = host
        #: None: not started, or it cannot be.
        self._server: OwnServer | None = None
        self._tried = threading.Event()
        self._stopped = False

    def __repr__(self) -> str:
        """What Ray puts before its output."""
        return str(self._name)

    def serve(self, coordinator: str) -> str:
        """Run the server until it ends; returns how it ended, and its last lines. ``coordinator``: host:port.

        Raises OSError when there is no process for it.
        """
        try:
            command = server_command(self._plan, self._name, self._host or _node(), coordinator)
            watch = LifePipe if self._name.kind is ServerKind.COORDINATOR else StopWatch
            self._server = OwnServer(str(self._name), command, server_environment(os.environ, self._plan), watch)
        finally:
            self._tried.set()
        if self._stopped:
            self._server.end(0.0)
        self._server.join()
        return f"{self._server.ended or f'{self._name} was stopped'}; {self._server.last_lines}"

    def address(self, timeout_seconds: float) -> str:
        """host:port, once the server serves. Raises Unavailable, with its last lines, where it ends or takes longer."""
        deadline = time.monotonic() + timeout_seconds
        settled, server = self._tried.wait(timeout_seconds), self._server
        if server is not None:
            settled = server.settle(max(0.0, deadline - time.monotonic()))
            if server.address:
                return server.address
        lines = server.last_lines if server is not None else "its process has not started"
        if settled:
            ended = server.ended if server is not None else f"{self._name} cannot be started"
            raise Unavailable(ended or f"{self._name} was stopped", actual=lines, remedy="correct what its log says")
        raise Unavailable(
            f"{self._name} did not start within {timeout_seconds:.0f} s",
            actual=lines,
            remedy="wait longer with RayCluster(start_timeout_seconds=…)",
        )

    def process(self) -> tuple[str, int]:
        """The host of the server and the number of its process, once it serves; 0 where it cannot be started."""
        self._tried.wait()
        if self._server is not None:
            self._server.settle()
        return socket.gethostname(), self._server.pid if self._server is not None else 0

    def stop(self, grace_seconds: float) -> str:
        """End the server: it writes what it keeps, and is killed ``grace_seconds`` later. Returns at its end: empty, or
        its last lines where it is a coordinator that could not have its last checkpoint written.
        """
        self._stopped = True
        if self._server is None:
            return ""
        code = self._server.end(grace_seconds)
        return self._server.last_lines if code == EXIT_UNSAVED else ""


class WorkerActor:
    """One worker: a function of the user in the main thread of a process of its own."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def __repr__(self) -> str:
        """What Ray puts before its output."""
        return f"worker {self._rank}"

    def run(self, train_fn: Callable[..., Any], arguments: Sequence[Any], environment: Mapping[str, str]) -> Any:
        """What ``train_fn`` returns, with the variables by which ``connect()`` finds the job."""
        if environment.get("PS_PER_HOST") == "sync":
            environment = {**environment, "PS_PER_HOST": os.environ.get("PS_PER_HOST", "sync")}
        os.environ.update(environment)
        for name in TIMEOUTS:
            os.environ.setdefault(name, f"{LONG_PATIENCE_SECONDS:g}")
        return train_fn(*arguments)


def _node() -> str:
    """The address of this node of the Ray cluster."""
    # Here, because this module is imported where Ray is not installed, too.
    from ray.util import get_node_ip_address

    return str(get_node_ip_address())
