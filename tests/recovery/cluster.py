"""A coordinator, shards and workers as processes of their own, killed, frozen and started again by the test."""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ps_protocol.client.coordinator import CoordinatorClient
from ps_protocol.cluster.view import ClusterStatus, Role
from ps_protocol.launch.ports import free_port
from tests.recovery.zygote import COORDINATOR, PATIENCE_SECONDS, SHARD, WORKER, Forked, Zygote
from tests.support.shards import wait_until

LEASE_SECONDS = 5.0
"""A process of a busy machine may be held up for seconds."""

LOST = (
    "is not a member any more: "
    rf"(its connection ended, and no heartbeat came|its lease of {LEASE_SECONDS:g} s ended)"
)
"""What a member says that has heard nothing of its coordinator for so long: its connection may end before the lease."""


@dataclass
class Program:
    """One server process; ``start`` again after it has ended, as an operator would."""

    zygote: Zygote
    kind: str
    arguments: Sequence[str]
    folder: Path
    name: str
    process: Forked | None = None

    @property
    def ready_file(self) -> Path:
        return self.folder / f"{self.name}.ready"

    @property
    def said(self) -> str:
        """Everything it has logged, over all its lives."""
        return self.log.read_text()

    @property
    def log(self) -> Path:
        return self.folder / f"{self.name}.log"

    def start(self, **environment: str) -> None:
        self.launch(**environment)
        wait_until(lambda: self.ready_file.exists() or not self.alive)
        assert self.alive, self.said

    def launch(self, **environment: str) -> None:
        """Start without waiting until it serves."""
        assert not self.alive
        self.ready_file.unlink(missing_ok=True)
        arguments = [*self.arguments, "--ready-file", str(self.ready_file), "--log-level", "info"]
        with Path(os.devnull).open() as nothing, self.log.open("a") as log:
            files = (nothing.fileno(), log.fileno(), log.fileno())
            self.process = self.zygote.start(self.kind, arguments, {"TF_CONFIG": "", **environment}, files)

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    @property
    def stopped(self) -> bool:
        return self.running.stopped

    @property
    def running(self) -> Forked:
        assert self.process is not None
        return self.process

    def kill(self) -> None:
        self.send(signal.SIGKILL)
        self.wait()

    def send(self, number: signal.Signals) -> None:
        self.running.send(number)

    def wait(self) -> int:
        return self.running.wait()


@dataclass
class Worker:
    """A training process whose lines are read one by one, and which waits for a line where it was told to."""

    process: Forked
    input: int
    output: int
    log: Path
    lines: list[str] = field(default_factory=list)
    _rest: bytes = b""

    def read(self, wanted: str) -> str:
        """The next line that begins with ``wanted``."""
        for line in self._next_lines():
            if line.startswith(wanted):
                return line
        raise AssertionError(f"the worker ended before it said '{wanted}'; {self.lines[-3:]}; {self.said}")

    def _next_lines(self) -> Iterator[str]:
        while True:
            while b"\n" in self._rest:
                line, _, self._rest = self._rest.partition(b"\n")
                self.lines.append(line.decode())
                yield self.lines[-1]
            said = select.poll()
            said.register(self.output, select.POLLIN)
            if not said.poll(PATIENCE_SECONDS * 1000):
                raise AssertionError(f"the worker says nothing any more; {self.lines[-3:]}; {self.said}")
            if not (data := os.read(self.output, 1 << 16)):
                return
            self._rest += data

    def number(self, wanted: str) -> int:
        return int(self.read(wanted).split()[1])

    @property
    def said(self) -> str:
        """What it has logged."""
        return self.log.read_text()

    @property
    def steps(self) -> int:
        """Steps it has said to be done. Reads nothing."""
        return sum(line.startswith("step ") for line in self.lines)

    def tell(self) -> None:
        os.write(self.input, b"\n")

    def kill(self) -> None:
        self.process.send(signal.SIGKILL)
        self.wait()

    def wait(self) -> int:
        return self.process.wait()

    def drain(self) -> int:
        """Read what is left of a process that ends or has ended; its exit code."""
        for _ in self._next_lines():
            pass
        return self.wait()

    def close(self) -> None:
        self.kill()
        os.close(self.input)
        os.close(self.output)


class Cluster:
    """Made by the fixture ``launch``. ``coordinator_address`` and ``advertise`` lead through a proxy, if given."""

    def __init__(
        self,
        zygote: Zygote,
        folder: Path,
        shards: int = 1,
        *,
        lease_seconds: float = LEASE_SECONDS,
        coordinator: Sequence[str] = (),
        shard: Sequence[str] = (),
    ):
        self.zygote = zygote
        self.folder = folder
        self.data = folder / "data"
        self.address = f"127.0.0.1:{free_port()}"
        port = self.address.rpartition(":")[2]
        timing = ["--lease-seconds", str(lease_seconds), "--heartbeat-seconds", str(lease_seconds / 5)]
        where = ["--port", port, "--shards", str(shards), "--data-dir", str(self.data)]
        self.coordinator = Program(zygote, COORDINATOR, [*where, *timing, *coordinator], folder, "coordinator")
        self.others: list[Program] = []
        #: Shards write and read checkpoints where the coordinator does.
        self.checkpoints = [part for pair in pairwise(coordinator) if pair[0] == "--checkpoint-dir" for part in pair]
        self.shards = [self.shard(number, *shard) for number in range(shards)]
        self.workers: list[Worker] = []

    def shard(
        self, number: int, *options: str, name: str = "", data: Path | None = None, coordinator: str = ""
    ) -> Program:
        """Another process for shard ``number``; not started."""
        where = ["--shard", str(number), "--coordinator", coordinator or self.address, "--bind", "127.0.0.1"]
        kept = ["--data-dir", str(data or self.data), "--threads", "1", *self.checkpoints]
        program = Program(
            self.zygote, SHARD, [*where, *kept, *options], self.folder, name or f"shard-{number}-{len(self.others)}"
        )
        self.others.append(program)
        return program

    def start(self, **environment: str) -> None:
        for program in (self.coordinator, *self.shards):
            program.launch(**environment)
        for program in (self.coordinator, *self.shards):
            wait_until(lambda program=program: program.ready_file.exists() or not program.alive)
            assert program.alive, program.said

    def worker(
        self, rank: int = 0, coordinator: str = "", inside: Mapping[str, str] = MappingProxyType({}), **options: Any
    ) -> Worker:
        """A training process; ``inside`` is for ``inside.obey``, ``options`` are those of ``scripts.Work``."""
        theirs_in, ours_in = os.pipe()
        ours_out, theirs_out = os.pipe()
        log = self.folder / f"worker-{len(self.workers)}.log"
        environment = {"TF_CONFIG": "", "PS_COORDINATOR": coordinator or self.address, "PS_RANK": str(rank), **inside}
        environment.setdefault("PS_LINEAGE", f"worker {rank}")
        with log.open("w") as errors:
            files = (theirs_in, theirs_out, errors.fileno())
            process = self.zygote.start(WORKER, [json.dumps(options)], environment, files)
        os.close(theirs_in)
        os.close(theirs_out)
        self.workers.append(Worker(process, ours_in, ours_out, log))
        return self.workers[-1]

    def status(self) -> ClusterStatus:
        with CoordinatorClient(self.address) as client:
            return client.get_status(5.0)

    def wait_for_members(self, role: Role, *indexes: int) -> None:
        """Until the members of ``role`` are these."""
        wait_until(lambda: sorted(self.status().view.live(role)) == sorted(indexes))

    def close(self) -> None:
        for worker in self.workers:
            worker.close()
        for program in (*self.others, self.coordinator):
            if program.alive:
                program.kill()
        # Logs of many megabytes; what the processes have said stays.
        shutil.rmtree(self.data, ignore_errors=True)


def joins_and_leaves(cluster: Cluster) -> Worker:
    """A worker of tag 2 that has made a step: every shard knows what the coordinator decided before it joined."""
    joined = cluster.worker(2, tag=2, steps=1)
    joined.read("ledger")
    assert joined.wait() == 0
    return joined
