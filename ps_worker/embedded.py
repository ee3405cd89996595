"""A cluster of a script's own: one coordinator and one shard, for a script that runs without an address."""

from __future__ import annotations

import atexit
import importlib.util
import os
import time
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Self

from ps_protocol.errors import ConfigError, StateLost, Unavailable
from ps_protocol.launch.commands import coordinator_command, shard_command
from ps_worker.own_server import OwnServer

#: What servers of one machine, without a job around them, must not take from the environment.
_OURS = "PS_"

_LOOPBACK = "127.0.0.1"

_NEEDED = ("ps_server", "numba")

_ALONE: Mapping[str, object] = MappingProxyType({"workers": 1})


class EmbeddedCluster:
    """Two child processes with addresses on 127.0.0.1. Called from the user's thread; ends with ``close``, with the
    interpreter, and with the process, however that ends.
    """

    def __init__(self, timeout_seconds: float, settings: Mapping[str, object] = _ALONE) -> None:
        """``settings``: of the coordinator."""
        self._settings = settings
        self._deadline = time.monotonic() + timeout_seconds
        self._pid = os.getpid()
        self._servers: list[OwnServer] = []
        #: host:port of the coordinator.
        self.address = ""

    @classmethod
    def start(cls, timeout_seconds: float, settings: Mapping[str, object] = _ALONE) -> Self:
        """Start both. Raises ConfigError where the servers are not installed, Unavailable when they do not start."""
        missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
        if missing:
            raise ConfigError(
                "connect() has no address, and cannot start a cluster of its own",
                expected="the servers of torch-ps",
                actual=f"no module named {missing[0]}",
                remedy="pip install 'torch-ps[server]', or start the script with ps-run, or give connect() an address",
            )
        embedded = cls(timeout_seconds, settings)
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
            server.end(10.0)
        self._servers.clear()

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
        common = {"metrics_port": "off", "log_level": "warning"}
        coordinator = coordinator_command({"shards": 1, **common, **self._settings}, bind=_LOOPBACK)
        self.address = self._run("coordinator", coordinator)
        self._run("shard", shard_command(0, self.address, common, bind=_LOOPBACK))

    def _run(self, program: str, command: Sequence[str]) -> str:
        """Start a server; its address, once it serves."""
        environment = {name: value for name, value in os.environ.items() if not name.startswith(_OURS)}
        environment.pop("TF_CONFIG", None)
        try:
            server = OwnServer(f"the {program} of this script's own cluster", command, environment)
        except OSError as error:
            raise Unavailable(f"the {program} of this script's own cluster cannot be started: {error}") from error
        self._servers.append(server)
        server.settle(max(0.0, self._deadline - time.monotonic()))
        if server.ended:
            raise Unavailable(server.ended, actual=server.last_lines, remedy="give connect() the address of a cluster")
        if not server.address:
            raise Unavailable(
                "the script's own cluster did not start in time", remedy="wait longer with PS_CONNECT_TIMEOUT"
            )
        return server.address
