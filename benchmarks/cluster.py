"""Real coordinator and shard processes for a measurement."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.processes import ChildFailed, end_with_parent

START_SECONDS = 60.0


@dataclass
class BenchCluster:
    """One coordinator and its shards, each a process; ended by pid when the context ends."""

    address: str
    #: Process of the coordinator.
    coordinator: int
    #: Processes of the shards.
    shards: list[int] = field(default_factory=list)
    #: What they were started with.
    commands: list[list[str]] = field(default_factory=list)

    _processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    _start: Callable[[str, list[str]], tuple[Path, subprocess.Popen[bytes]]] = field(kw_only=True)

    def kill_shard(self, index: int) -> None:
        """End it as ``kill -9`` does."""
        self._processes[index].kill()
        self._processes[index].wait()

    def start_shard(self, index: int, seconds: float = START_SECONDS) -> None:
        """Start a killed one again; returns when it serves, after so many ``seconds`` at most."""
        ready, self._processes[index] = self._start(f"shard-{index}", self.commands[index])
        self.shards[index] = self._processes[index].pid
        _ready(ready, self._processes[index], seconds)

    def add_shard(self) -> int:
        """Start one more, which holds nothing yet; returns its number when it serves."""
        number = len(self.commands)
        command = [*self.commands[-1], "--add"]
        command[command.index("--shard") + 1] = str(number)
        self.add(command)
        return number

    def add(self, command: list[str]) -> None:
        """Start one more process; returns when it is ready."""
        self.commands.append(command)
        ready, process = self._start(f"shard-{len(self._processes)}", command)
        self._processes.append(process)
        _ready(ready, process)
        self.shards.append(process.pid)


@contextmanager
def running_cluster(
    shards: int = 1,
    workers: int = 1,
    *,
    threads: int = 1,
    bind: str = "127.0.0.1",
    mode: Sequence[str] = ("--mode", "async"),
    options: Sequence[str] = (),
    coordinator_options: Sequence[str] = (),
) -> Iterator[BenchCluster]:
    """Coordinator and shards on free ports of ``bind``; shards get ``options``. Raises ChildFailed."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ps-bench-")))

        def start(name: str, command: list[str]) -> tuple[Path, subprocess.Popen[bytes]]:
            ready = folder / name
            ready.unlink(missing_ok=True)
            process = subprocess.Popen(
                [*command, "--ready-file", str(ready)], env=dict(os.environ), preexec_fn=end_with_parent
            )
            stack.callback(_end, process)
            return ready, process

        sizes = ("--shards", str(shards), "--workers", str(workers), *mode, *coordinator_options)
        ready, process = start("coordinator", _program("ps_server.coordinator.main", "--bind", bind, *sizes))
        cluster = BenchCluster(_ready(ready, process), process.pid, _start=start)
        started = []
        for index in range(shards):
            place = ("--shard", str(index), "--coordinator", cluster.address, "--threads", str(threads))
            command = _program("ps_server.shard.main", "--bind", bind, *place, *options)
            cluster.commands.append(command)
            started.append(start(f"shard-{index}", command))
        for ready, process in started:
            _ready(ready, process)
            cluster.shards.append(process.pid)
            cluster._processes.append(process)
        yield cluster


@contextmanager
def coordinator_process(folder: Path, shards: int, workers: int) -> Iterator[str]:
    """A coordinator alone; its address. Raises ChildFailed."""
    ready = folder / "coordinator"
    sizes = ("--shards", str(shards), "--workers", str(workers), "--mode", "async")
    command = _program("ps_server.coordinator.main", "--bind", "127.0.0.1", *sizes)
    process = subprocess.Popen([*command, "--ready-file", str(ready)], preexec_fn=end_with_parent)
    try:
        yield _ready(ready, process)
    finally:
        _end(process)


def _program(module: str, *arguments: str) -> list[str]:
    return [sys.executable, "-m", module, "--log-level", "warning", "--port", "0", *arguments]


def _ready(file: Path, process: subprocess.Popen[bytes], seconds: float = START_SECONDS) -> str:
    pause = threading.Event()
    for _ in range(int(seconds / 0.02)):
        if file.exists():
            return file.read_text().strip()
        if process.poll() is not None:
            raise ChildFailed(f"{file.name} ended with code {process.returncode}")
        pause.wait(0.02)
    raise ChildFailed(f"{file.name} was not ready within {seconds:g} s")


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
