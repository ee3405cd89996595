"""A coordinator and shards as processes of their own, killed and started again by the test, and workers as scripts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from ps_protocol.client.coordinator import CoordinatorClient
from ps_protocol.view import ClusterStatus
from tests.support.ports import free_port
from tests.support.shards import wait_until

LEASE_SECONDS = 1.0


@dataclass
class Program:
    """One server process; ``start`` again after it has ended, as an operator would."""

    command: Sequence[str]
    ready_file: Path
    process: subprocess.Popen[bytes] | None = None

    def start(self, *extra: str) -> None:
        self.launch(*extra)
        wait_until(lambda: self.ready_file.exists() or not self.alive)
        assert self.alive, "the server ended at its start"

    def launch(self, *extra: str) -> None:
        """Start without waiting until it serves."""
        assert not self.alive
        self.ready_file.unlink(missing_ok=True)
        environment = {key: value for key, value in os.environ.items() if key != "TF_CONFIG"}
        self.process = subprocess.Popen([*self.command, *extra], env=environment)

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def kill(self) -> None:
        self.send(signal.SIGKILL)
        self.wait()

    def send(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def wait(self) -> int:
        assert self.process is not None
        return self.process.wait(30)


@dataclass
class Worker:
    """A script whose lines are read one by one, and which waits for a line where it says so."""

    process: subprocess.Popen[str]
    lines: list[str] = field(default_factory=list)

    def read(self, wanted: str) -> str:
        """The next line that begins with ``wanted``."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip())
            if line.startswith(wanted):
                return line.rstrip()
        raise AssertionError(f"the worker ended before it said '{wanted}':\n" + "\n".join(self.lines))

    def tell(self, text: str = "") -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(text + "\n")
        self.process.stdin.flush()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


class Cluster:
    """Made by ``running_cluster``."""

    def __init__(self, folder: Path, shards: int, coordinator_options: Sequence[str], shard_options: Sequence[str]):
        self.folder = folder
        self.address = f"127.0.0.1:{free_port()}"
        port = self.address.rpartition(":")[2]
        timing = [
            "--lease-seconds",
            str(LEASE_SECONDS),
            "--heartbeat-seconds",
            "0.2",
            "--data-dir",
            str(folder / "data"),
        ]
        self.coordinator = self._program(
            "coordinator", "--port", port, "--shards", str(shards), *timing, *coordinator_options
        )
        self.shards = [self.shard(number, *shard_options) for number in range(shards)]
        self.workers: list[Worker] = []

    def shard(self, number: int, *options: str, name: str | None = None) -> Program:
        """Another process for shard ``number``; not started."""
        where = ["--shard", str(number), "--coordinator", self.address, "--port", "0", "--bind", "127.0.0.1"]
        return self._program("shard", *where, *options, name=name or f"shard-{number}")

    def start(self) -> None:
        for program in (self.coordinator, *self.shards):
            program.start()

    def worker(self, script: str, *arguments: str, **environment: str) -> Worker:
        process = subprocess.Popen(
            [sys.executable, "-u", "-c", script, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PS_COORDINATOR": self.address, "PS_RANK": "0", "OMP_NUM_THREADS": "1", **environment},
        )
        self.workers.append(Worker(process))
        return self.workers[-1]

    def status(self) -> ClusterStatus:
        with CoordinatorClient(self.address) as client:
            return client.get_status(5.0)

    def close(self) -> None:
        for worker in self.workers:
            worker.kill()
            for stream in (worker.process.stdin, worker.process.stdout):
                with suppress(BrokenPipeError):
                    stream.close()  # type: ignore[union-attr]
        for program in (*self.shards, self.coordinator):
            if program.alive:
                program.kill()

    def _program(self, kind: str, *options: str, name: str | None = None) -> Program:
        ready = self.folder / f"{name or kind}.ready"
        command = [sys.executable, "-m", f"ps_server.{kind}.main", "--ready-file", str(ready), "--log-level", "info"]
        return Program([*command, *options], ready)


@contextmanager
def running_cluster(
    folder: Path, shards: int = 1, *, coordinator: Sequence[str] = (), shard: Sequence[str] = ()
) -> Iterator[Cluster]:
    """A coordinator and shards that keep their state in ``folder``."""
    cluster = Cluster(folder, shards, coordinator, [*shard, "--data-dir", str(folder / "data")])
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.close()
