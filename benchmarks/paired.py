"""Step times of two checkouts side by side: ``python -m benchmarks.paired OTHER [--only "10 KB"] [--transport grpc]``.

A cluster and a worker of each tree run at the same time, and make blocks of steps in turn, so that both meet the same
machine. A row has the medians of both, the median of the ratios of the blocks (this tree / OTHER; below 1: this one is
faster) with its quartiles, the same for the CPU time of a step in the worker and in the shard, and the peak memory of
each worker above what it had before its model, in sizes of the model. With ``--workers 8`` so many workers of one model
make their steps at the same time; the time is that of a block, divided by the steps of all of them, and ``--durable``
gives the shards a data directory each. With ``--trace`` this tree also traces its steps:
``paired . --trace`` shows the cost of tracing. With ``--overlap`` the time is what an overlapped step and the zeroing
of its gradients take of the thread that computes. CPU time can be compared on a machine that others use, too: other
programs lengthen a step, but add little to its CPU time.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

SIZES = {
    "10 KB": (10_000, 300, 30),
    "1 MB": (1_000_000, 100, 24),
    "4 MB": (4_000_000, 40, 24),
    "10 MB": (10_000_000, 20, 24),
    "16 MB": (16_000_000, 12, 24),
    "100 MB": (100_000_000, 6, 20),
    "500 MB": (500_000_000, 2, 4),
}
"""Bytes of parameters, steps in a block, blocks."""

TRANSPORTS = ("shm", "bulk", "grpc")
ROOT = Path(__file__).parents[1]
START_SECONDS = 60.0
_WORKER = Path(__file__).with_name("paired_worker.py")


def main() -> int:
    """Print a row for each size and transport."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("other", type=Path, help="the checkout to compare with")
    parser.add_argument("--only", choices=SIZES, action="append", help="a size; may be repeated")
    parser.add_argument("--transport", choices=TRANSPORTS, action="append", help="a transport; may be repeated")
    parser.add_argument("--trace", action="store_true", help="this tree traces its steps, OTHER does not")
    parser.add_argument("--overlap", action="store_true", help="overlapped steps: what they take of computing")
    parser.add_argument("--workers", type=int, default=1, help="workers of each tree")
    parser.add_argument("--durable", action="store_true", help="shards write a log")
    options = parser.parse_args()
    kinds = {name: getattr(options, name) for name in ("trace", "overlap", "workers", "durable")}
    for size in options.only or SIZES:
        for transport in options.transport or TRANSPORTS:
            print(row(options.other.resolve(), size, transport, **kinds), flush=True)
    return 0


def row(
    other: Path,
    size: str,
    transport: str,
    *,
    trace: bool = False,
    overlap: bool = False,
    workers: int = 1,
    durable: bool = False,
) -> str:
    """Measure one size over one transport; ``trace``: this tree writes a trace file for each process."""
    nbytes, steps, blocks = SIZES[size]
    arguments = [transport, str(nbytes), *(["overlap"] if overlap else [])]
    with ExitStack() as stack:
        traces = stack.enter_context(tempfile.TemporaryDirectory(prefix="ps-paired-")) if trace else ""
        pairs = [
            stack.enter_context(running_pair(tree, {"PS_TRACE": folder}, _WORKER, arguments, workers, durable=durable))
            for tree, folder in ((other, ""), (ROOT, traces))
        ]
        blocks_of: tuple[list[Block], list[Block]] = ([], [])
        for block in range(blocks):
            for which in (0, 1) if block % 2 == 0 else (1, 0):
                blocks_of[which].append(pairs[which].steps(steps))
        peaks = [pair.steps(0).peak_bytes / nbytes for pair in pairs]
    parts = [f"{size:7} {transport:5} x {workers}  peak {peaks[0]:.2f} {peaks[1]:.2f}"]
    for name in ("seconds", "worker_cpu", "shard_cpu"):
        parts.append(f"{name:10} {compared(*([getattr(block, name) for block in each] for each in blocks_of))}")
    return "\n   ".join(parts)


def compared(old: Sequence[float], new: Sequence[float]) -> str:
    """Medians of seconds in milliseconds, the median of the ratios, and its quartiles."""
    low, middle, high = statistics.quantiles((after / before for before, after in zip(old, new, strict=True)), n=4)
    medians = f"other {statistics.median(old) * 1e3:8.3f} ms  this {statistics.median(new) * 1e3:8.3f} ms"
    return f"{medians}  ratio {middle:.3f} [{low:.3f} {high:.3f}]"


@dataclass(frozen=True, slots=True)
class Block:
    """Some steps."""

    #: The median of a step; of several workers the time of all, divided by their steps.
    seconds: float
    #: CPU time of the processes, of one step.
    worker_cpu: float
    shard_cpu: float
    #: Of the first worker, above what it had before its model.
    peak_bytes: float


@dataclass(frozen=True, slots=True)
class Pair:
    """Workers and their shard, each a process."""

    workers: Sequence[subprocess.Popen[str]]
    shard: subprocess.Popen[str]

    def steps(self, count: int) -> Block:
        """Have each worker make ``count`` steps."""
        return self.ask(str(count), count)

    def ask(self, line: str, count: int) -> Block:
        """Have the workers do what ``line`` says, ``count`` steps each."""
        before, began = self._cpu_seconds(), time.perf_counter()
        for worker in self.workers:
            _tell(worker, line)
        answers = [_answer(worker) for worker in self.workers]
        steps = max(1, count) * len(self.workers)
        of_all = (time.perf_counter() - began) / steps
        workers, shard = ((now - begin) / steps for now, begin in zip(self._cpu_seconds(), before, strict=True))
        first = answers[0]
        return Block(first["median"] if len(answers) == 1 else of_all, workers, shard, first["peak"])

    def _cpu_seconds(self) -> tuple[float, float]:
        return sum(cpu_seconds(worker.pid) for worker in self.workers), cpu_seconds(self.shard.pid)


def cpu_seconds(pid: int) -> float:
    """CPU time of a process that is alive, of the threads that it has now, to the nanosecond."""
    tasks = Path(f"/proc/{pid}/task")
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks.iterdir()) / 1e9


@contextmanager
def running_pair(
    tree: Path,
    more: Mapping[str, str],
    program: Path,
    arguments: Sequence[str],
    workers: int = 1,
    *,
    durable: bool = False,
) -> Iterator[Pair]:
    """Workers that train on a cluster of their own, all of ``tree``, with ``more`` in the environment.

    A worker runs ``program`` with the address of the coordinator and ``arguments``.
    """
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ps-paired-")))
        quiet = ("--log-level", "error", "--port", "0", "--ready-file")
        sizes = ("--shards", "1", "--workers", str(workers), "--mode", "async")
        data = ("--data-dir", str(folder / "data")) if durable else ()
        coordinator = folder / "coordinator"
        stack.enter_context(_process(tree, more, "-m", "ps_server.coordinator.main", *quiet, str(coordinator), *sizes))
        address = _written(coordinator)
        ready, place = folder / "shard", ("--shard", "0", "--coordinator", address, "--threads", "1", *data)
        shard = stack.enter_context(_process(tree, more, "-m", "ps_server.shard.main", *quiet, str(ready), *place))
        _written(ready)
        started = [stack.enter_context(_process(tree, more, str(program), address, *arguments)) for _ in range(workers)]
        for worker in started:
            assert worker.stdout is not None
            if worker.stdout.readline() != "ready\n":
                raise RuntimeError(f"a worker of {tree} did not start")
        yield Pair(started, shard)


@contextmanager
def _process(tree: Path, more: Mapping[str, str], *arguments: str) -> Iterator[subprocess.Popen[str]]:
    paths = {"PYTHONPATH": f"{tree}{os.pathsep}{tree / 'protos'}"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    command = [sys.executable, *arguments]
    process = subprocess.Popen(command, cwd=tree, env={**os.environ, **paths, **more}, text=True, **pipes)
    try:
        yield process
    finally:
        process.terminate()
        process.wait()


def _written(file: Path) -> str:
    deadline = time.monotonic() + START_SECONDS
    while not file.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{file.name} was not ready within {START_SECONDS:g} s")
        time.sleep(0.02)
    return file.read_text().strip()


def _tell(worker: subprocess.Popen[str], line: str) -> None:
    assert worker.stdin is not None
    worker.stdin.write(f"{line}\n")
    worker.stdin.flush()


def _answer(worker: subprocess.Popen[str]) -> dict[str, float]:
    assert worker.stdout is not None
    answer: dict[str, float] = json.loads(worker.stdout.readline())
    return answer


if __name__ == "__main__":
    sys.exit(main())
