"""A cluster of a script's own: one coordinator and one shard, for a script that runs without an address."""

from __future__ import annotations

import atexit
import importlib.util
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from ps_protocol.errors import ConfigError, StateLost, Unavailable
from ps_protocol.launch import shim
from ps_worker.own_server import OwnServer

_POLL_SECONDS = 0.02

#: Between SIGTERM and SIGKILL. The servers keep nothing on disk, so nothing is lost.
_GRACE_SECONDS = 10.0

#: What servers of one machine, without a job around them, must not take from the environment.
_OURS = "PS_"

_NEEDED = ("ps_server", "numba")


class EmbeddedCluster:
    """Two child processes with addresses on 127.0.0.1. Called from the user's thread; ends with ``close``, with the
    interpreter, and with the process, however that ends.

    A thread of its own starts both and lives as long as the process: the kernel kills a child at the end of the thread
    that started it.
    """

    def __init__(self, timeout_seconds: float) -> None:
        self._deadline = time.monotonic() + timeout_seconds
        self._pid = os.getpid()
        self._servers: list[OwnServer] = []
        self._requests: queue.SimpleQueue[Sequence[str] | None] = queue.SimpleQueue()
        self._started: queue.SimpleQueue[subprocess.Popen[bytes] | OSError] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._keep, name="embedded cluster", daemon=True)
        #: host:port of the coordinator.
        self.address = ""

    @classmethod
    def start(cls, timeout_seconds: float) -> Self:
        """Start both. Raises ConfigError where the servers are not installed, Unavailable when they do not start."""
        missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
        if missing:
            raise ConfigError(
                "connect() has no address, and cannot start a cluster of its own",
                expected="the servers of torch-ps",
                actual=f"no module named {missing[0]}",
                remedy="pip install 'torch-ps[server]', or start the script with ps-run, or give connect() an address",
            )
        embedded = cls(timeout_seconds)
        embedded._thread.start()
        atexit.register(embedded.close)
        try:
            embedded._start_servers()
        except BaseException:
            embedded.close()
            raise
        return embedded

    def close(self) -> None:
        """End both, the shard first. Safe to repeat; does nothing in a forked child."""
        if os.getpid() != self._pid:
            return
        atexit.unregister(self.close)
        for server in reversed(self._servers):
            server.end(_GRACE_SECONDS)
        self._servers.clear()
        self._requests.put(None)

    def check(self) -> None:
        """Raises StateLost when one of the two has ended by itself: nothing starts it again."""
        for server in self._servers:
            if server.ended:
                raise StateLost(
                    server.ended,
                    actual=server.last_lines,
                    remedy="run the script again; under ps-run --data-dir a server that ends is started again",
                )

    def _start_servers(self) -> None:
        with tempfile.TemporaryDirectory(prefix="torch-ps-") as folder:
            ready = Path(folder) / "coordinator"
            self._run("coordinator", ["--shards", "1", "--workers", "1", "--ready-file", str(ready)])
            self.address = self._wait_for(ready)
            serving = Path(folder) / "shard"
            self._run("shard", ["--shard", "0", "--coordinator", self.address, "--ready-file", str(serving)])
            self._wait_for(serving)

    def _run(self, program: str, arguments: Sequence[str]) -> None:
        common = ["--bind", "127.0.0.1", "--port", "0", "--metrics-port", "off", "--log-level", "warning"]
        self._requests.put([sys.executable, "-P", "-m", f"ps_server.{program}.main", *arguments, *common])
        child = self._started.get()
        if isinstance(child, OSError):
            raise Unavailable(f"the {program} of this script's own cluster cannot be started: {child}") from child
        self._servers.append(OwnServer(f"the {program} of this script's own cluster", child))

    def _wait_for(self, ready: Path) -> str:
        """The address in the file ``ready``, once it is there."""
        while not ready.exists():
            if ended := [server for server in self._servers if server.ended]:
                raise Unavailable(
                    ended[0].ended, actual=ended[0].last_lines, remedy="give connect() the address of a cluster"
                )
            if time.monotonic() >= self._deadline:
                raise Unavailable(
                    "the script's own cluster did not start in time", remedy="wait longer with PS_CONNECT_TIMEOUT"
                )
            time.sleep(_POLL_SECONDS)
        return ready.read_text().strip()

    def _keep(self) -> None:
        """Start what is asked for; then stay until the process ends."""
        while (program := self._requests.get()) is not None:
            try:
                self._started.put(_popen(program))
            except OSError as error:
                self._started.put(error)


def _popen(program: Sequence[str]) -> subprocess.Popen[bytes]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(_OURS)}
    environment.pop("TF_CONFIG", None)
    # A group of its own: Ctrl-C in the terminal is the script's, which ends them when it is done.
    return subprocess.Popen(
        shim.command(program),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=environment,
        process_group=0,
    )
