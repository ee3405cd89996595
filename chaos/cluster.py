"""The cluster of one run: coordinator, shards, workers and a relay of weights, with a link to cut between each two."""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from chaos.plan import Targets
from chaos.processes import Process
from chaos.proxy import Proxy
from chaos.readers import NAME
from chaos.training import read_counter
from ps_protocol.client.worker_requests import LostServer, WorkerRequests
from ps_protocol.launch.ports import free_port
from ps_protocol.security.roles import AccessRole
from ps_protocol.security.security import Security
from ps_protocol.security.settings import SecuritySettings
from ps_server.certs import CertificateFolder

_TRANSPORTS: Mapping[str, Sequence[str]] = {
    "grpc": ("--no-shm", "--bulk-ports", "off"),
    "bulk": ("--no-shm",),
    "shm": ("--bulk-ports", "off"),
}
"""What shards are given, so that there is this one, and gRPC, under which every stream begins."""

TRANSPORTS = tuple(_TRANSPORTS)


@dataclass(frozen=True, slots=True)
class Size:
    """How large, and how fast."""

    shards: int = 2
    workers: int = 3
    lease_seconds: float = 3.0
    #: A step takes at least so long, as if an accelerator computed.
    step_seconds: float = 0.05
    #: With TLS, client certificates and tokens.
    secure: bool = True
    #: Of the workers' steps.
    transport: str = "grpc"


class Cluster:
    """Used by one thread. Nothing runs before ``start``."""

    def __init__(self, folder: Path, data: Path, size: Size) -> None:
        """``folder`` gets the logs, ``data`` what the servers keep."""
        self.size = size
        self.folder = folder
        self.data = data
        self.address = f"127.0.0.1:{free_port()}"
        #: Tells which shards have lost their places; None before the start.
        self._requests: WorkerRequests | None = None
        self._certificates: CertificateFolder | None = None
        if size.secure:
            self._certificates = CertificateFolder(folder / "tls")
            self._certificates.make(size.shards, [])
        shards = {f"shard {n}": f"127.0.0.1:{free_port()}" for n in range(size.shards)}
        #: What stands between a role and the coordinator, or between all workers and a shard.
        self.links = {f"workers–{name}": Proxy(address) for name, address in shards.items()}
        callers = [*shards, "relay", *(f"worker {n}" for n in range(size.workers))]
        self.links |= {f"{name}–coordinator": Proxy(self.address) for name in callers}
        self.coordinator = self._process(
            "coordinator", lambda life: self._coordinator(), **self.settings("coordinator").environment
        )
        self.shards = [self._shard(n, name, address) for n, (name, address) in enumerate(shards.items())]
        self.workers = [self._worker(n) for n in range(size.workers)]
        #: Of the relay.
        self.relay_address = f"127.0.0.1:{free_port()}"
        self.relay = self._relay()

    @property
    def processes(self) -> dict[str, Process]:
        """All of them, by name."""
        return {process.name: process for process in (self.coordinator, *self.shards, *self.workers, self.relay)}

    def targets(self, disk: str | None) -> Targets:
        """What faults can hit."""
        servers = [process.name for process in (self.coordinator, *self.shards)]
        return Targets(list(self.processes), servers, list(self.links), disk)

    def start(self) -> None:
        """Start everything."""
        for process in self.processes.values():
            process.start()
        security = Security(self.settings("worker", AccessRole.WORKER), AccessRole.WORKER)
        self._requests = WorkerRequests(self.address, security)

    def look_after(self) -> None:
        """Kill servers that hang, as launchers do, and start again what has ended."""
        for lost in self._lost():
            for process in self.shards:
                if process.name == f"shard {lost.index}" and process.pid == lost.pid:
                    process.replace(lost.how)
        if why := self.coordinator.hangs():
            self.coordinator.replace(why)
        for process in self.processes.values():
            process.look_after()

    def _lost(self) -> Sequence[LostServer]:
        """The shards that the coordinator has lost, as far as it can be asked."""
        return self._requests.take().lost if self._requests is not None else ()

    @property
    def steps(self) -> list[int]:
        """Acknowledged steps of each worker, over all its lives."""
        return [
            sum(read_counter(self._counter(worker.name, life)) for life in range(1, worker.lives + 1))
            for worker in self.workers
        ]

    def close(self) -> None:
        """End everything at once."""
        if self._requests is not None:
            self._requests.close()
        for link in self.links.values():
            link.close()
        for process in self.processes.values():
            process.stop(signal.SIGKILL)

    def settings(self, name: str, role: AccessRole | None = None) -> SecuritySettings:
        """What a process shows with the certificate ``name``; ``role``: of a client."""
        return self._certificates.settings(name, role=role) if self._certificates else SecuritySettings()

    def _process(self, name: str, command: Callable[[int], Sequence[str]], **environment: str) -> Process:
        log = self.folder / f"{name.replace(' ', '-')}.log"
        return Process(name, command, log, environment, shows_life=name == "coordinator")

    def _coordinator(self) -> Sequence[str]:
        lease = self.size.lease_seconds
        timing = ("--lease-seconds", str(lease), "--heartbeat-seconds", str(lease / 5))
        port = self.address.rpartition(":")[2]
        what = ("--shards", str(self.size.shards), "--data-dir", str(self.data), "--seed", "1")
        return "-m", "ps_server.coordinator.main", "--port", port, *what, *timing

    def _shard(self, number: int, name: str, address: str) -> Process:
        where = ("--port", address.rpartition(":")[2], "--advertise", self.links[f"workers–{name}"].address)
        whom = ("--shard", str(number), "--coordinator", self.links[f"{name}–coordinator"].address)
        # Snapshots often enough to be met by faults.
        kept = ("--data-dir", str(self.data), "--snapshot-seconds", "10", "--threads", "1")
        command = ("-m", "ps_server.shard.main", *where, *whom, *kept, *_TRANSPORTS[self.size.transport])
        return self._process(name, lambda life: command, **self.settings(f"shard-{number}").environment)

    def _worker(self, number: int) -> Process:
        name = f"worker {number}"
        told = {"PS_COORDINATOR": self.links[f"{name}–coordinator"].address, "PS_RANK": str(number)}
        told["PS_LINEAGE"] = name
        told |= self.settings("worker", AccessRole.WORKER).environment
        how = str(self.size.step_seconds), self.size.transport
        return self._process(name, lambda life: ("-m", "chaos.training", str(self._counter(name, life)), *how), **told)

    def _relay(self) -> Process:
        where = ("weights", "relay", NAME, "--port", self.relay_address.rpartition(":")[2], "--metrics-port", "off")
        whom = ("--coordinator", self.links["relay–coordinator"].address)
        command = ("-c", "from ps_server.entry import psctl; psctl()", *whom, *where)
        return self._process("relay", lambda life: command, **self.settings("relay").environment)

    def _counter(self, name: str, life: int) -> Path:
        return self.folder / f"{name.replace(' ', '-')}-{life}.steps"
