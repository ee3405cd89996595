"""What runs in Ray's processes: an actor for each server, whose program is its child, and one for each worker."""

from __future__ import annotations

import os
import queue
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ps_protocol.client.coordinator import EXIT_UNSAVED
from ps_protocol.errors import Unavailable
from ps_protocol.launch import shim
from ps_protocol.launch.life import LifePipe, StopWatch
from ps_worker.own_server import OwnServer
from ps_worker.ray.commands import TIMEOUTS, server_command, server_environment
from ps_worker.ray.plan import PATIENCE_SECONDS, RayPlan, ServerKind, ServerName

_WATCH_SECONDS = 1.0

SERVER_CALLS = 4
"""Calls of one ``ServerActor`` at a time: ``serve``, ``address``, ``process`` and ``stop``."""


class ServerActor:
    """One server. The driver calls ``serve`` once, and the others beside it, from other threads of the actor.

    The server dies with the actor, however that ends: the kernel kills a child at the end of the thread that started
    it, and that thread waits for the child.
    """

    def __init__(self, name: ServerName, plan: RayPlan, host: str) -> None:
        """``host``: the address to listen on; empty: that of the node."""
        self._name = name
        self._plan = plan
        self._host = host
        self._server: OwnServer | None = None
        #: Of a coordinator: nobody else can say that it hangs.
        self._life = LifePipe(time.monotonic()) if name.kind is ServerKind.COORDINATOR else None
        #: host:port; empty where the server ended before it served.
        self._address = ""
        self._stops = StopWatch(time.monotonic())
        #: Why it hung, and was killed.
        self._hung = ""
        self._began = threading.Event()
        self._stopped = False

    def __repr__(self) -> str:
        """What Ray puts before its output."""
        return str(self._name)

    def serve(self, coordinator: str) -> str:
        """Run the server until it ends; returns how it ended, and its last lines. ``coordinator``: host:port.

        Raises OSError when there is no process for it.
        """
        # A pipe, and no file: an actor that is killed leaves none. A standby writes to it again when it takes over.
        readable, writable = os.pipe()
        with os.fdopen(readable) as told:
            try:
                try:
                    command = server_command(self._plan, self._name, self._host or _node(), coordinator)
                    server = self._start(command, writable)
                finally:
                    os.close(writable)
                while not select.select([told], [], [], _WATCH_SECONDS)[0]:
                    self._end_hanging(server)
                self._address = told.readline().strip()
                if not self._address:
                    # It has ended, and how is known once its output has.
                    server.join()
            finally:
                self._began.set()
            while not server.join(_WATCH_SECONDS):
                self._end_hanging(server)
        how = server.ended or f"{self._name} was stopped"
        if self._hung:
            how = f"{self._name} hung and was killed: {self._hung}"
        return f"{how}; {server.last_lines}"

    def address(self, timeout_seconds: float) -> str:
        """host:port, once the server serves. Raises Unavailable, with its last lines, where it ends or takes longer."""
        began = self._began.wait(timeout_seconds)
        if self._address:
            return self._address
        lines = self._server.last_lines if self._server is not None else "its process has not started"
        if began:
            ended = self._server.ended if self._server is not None else f"{self._name} cannot be started"
            raise Unavailable(ended or f"{self._name} was stopped", actual=lines, remedy="correct what its log says")
        raise Unavailable(
            f"{self._name} did not start within {timeout_seconds:.0f} s",
            actual=lines,
            remedy="wait longer with RayCluster(start_timeout_seconds=…)",
        )

    def process(self) -> tuple[str, int]:
        """The host of the server and the number of its process, once it serves; 0 where it ended before."""
        self._began.wait()
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

    def _end_hanging(self, server: OwnServer) -> None:
        now = time.monotonic()
        why = self._stops.hangs(server.pid, now) if self._life is None else self._life.hangs(now)
        if why and not self._hung:
            self._hung = why
            server.kill()

    def _start(self, command: Sequence[str], ready: int) -> OwnServer:
        """``ready``: the descriptor to which the server writes its address."""
        program = [sys.executable, "-P", "-m", *command, "--ready-file", f"/dev/fd/{ready}"]
        started: queue.SimpleQueue[OwnServer | OSError] = queue.SimpleQueue()
        threading.Thread(target=self._keep, args=(program, ready, started), name=str(self._name), daemon=True).start()
        server = started.get()
        if isinstance(server, OSError):
            raise server
        self._server = server
        if self._stopped:
            server.end(0.0)
        return server

    def _keep(self, program: Sequence[str], ready: int, started: queue.SimpleQueue[OwnServer | OSError]) -> None:
        life, environment = self._life, server_environment(os.environ, self._plan)
        try:
            child = subprocess.Popen(
                shim.command(program),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=environment if life is None else {**environment, **life.variables},
                process_group=0,
                pass_fds=(ready,) if life is None else (ready, life.write_end),
            )
        except OSError as error:
            started.put(error)
            return
        if life is not None:
            life.started()
        server = OwnServer(str(self._name), child)
        started.put(server)
        server.join()


class WorkerActor:
    """One worker: a function of the user in the main thread of a process of its own."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def __repr__(self) -> str:
        """What Ray puts before its output."""
        return f"worker {self._rank}"

    def run(self, train_fn: Callable[..., Any], arguments: Sequence[Any], environment: Mapping[str, str]) -> Any:
        """What ``train_fn`` returns, with the variables by which ``connect()`` finds the job."""
        os.environ.update(environment)
        for name in TIMEOUTS:
            os.environ.setdefault(name, f"{PATIENCE_SECONDS:g}")
        return train_fn(*arguments)


def _node() -> str:
    """The address of this node of the Ray cluster."""
    # Here, because this module is imported where Ray is not installed, too.
    from ray.util import get_node_ip_address

    return str(get_node_ip_address())
