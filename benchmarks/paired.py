"""Step times of two checkouts side by side: ``python -m benchmarks.paired OTHER [--only "10 KB"] [--transport grpc]``.

A cluster and a worker of each tree run at the same time, and make blocks of steps in turn, so that both meet the same
machine. A row has the medians of both, the median of the ratios of the blocks (this tree / OTHER; below 1: this one is
faster) with its quartiles, and the peak memory of each worker above what it had before its model, in sizes of the
model. With ``--trace`` this tree also traces its steps: ``paired . --trace`` shows the cost of tracing.
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
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

SIZES = {
    "10 KB": (10_000, 300, 30),
    "1 MB": (1_000_000, 100, 24),
    "100 MB": (100_000_000, 6, 20),
    "500 MB": (500_000_000, 2, 4),
}
"""Bytes of parameters, steps in a block, blocks."""

TRANSPORTS = ("shm", "bulk", "grpc")
ROOT = Path(__file__).parents[1]
START_SECONDS = 60.0


def main() -> int:
    """Print a row for each size and transport."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("other", type=Path, help="the checkout to compare with")
    parser.add_argument("--only", choices=SIZES, action="append", help="a size; may be repeated")
    parser.add_argument("--transport", choices=TRANSPORTS, action="append", help="a transport; may be repeated")
    parser.add_argument("--trace", action="store_true", help="this tree traces its steps, OTHER does not")
    options = parser.parse_args()
    for size in options.only or SIZES:
        for transport in options.transport or TRANSPORTS:
            print(row(options.other.resolve(), size, transport, trace=options.trace), flush=True)
    return 0


def row(other: Path, size: str, transport: str, *, trace: bool = False) -> str:
    """Measure one size over one transport; ``trace``: this tree writes a trace file for each process."""
    nbytes, steps, blocks = SIZES[size]
    with ExitStack() as stack:
        traces = stack.enter_context(tempfile.TemporaryDirectory(prefix="ps-paired-")) if trace else ""
        workers = [
            stack.enter_context(_worker(tree, transport, nbytes, {"PS_TRACE": folder}))
            for tree, folder in ((other, ""), (ROOT, traces))
        ]
        medians: tuple[list[float], list[float]] = ([], [])
        for block in range(blocks):
            for which in (0, 1) if block % 2 == 0 else (1, 0):
                medians[which].append(_ask(workers[which], steps)["median"])
        peaks = [_ask(worker, 0)["peak"] / nbytes for worker in workers]
    low, middle, high = statistics.quantiles((new / old for old, new in zip(*medians, strict=True)), n=4)
    old, new = (statistics.median(each) * 1e3 for each in medians)
    return (
        f"{size:7} {transport:5} other {old:8.3f} ms  this {new:8.3f} ms  ratio {middle:.3f} [{low:.3f} {high:.3f}]"
        f"  peak {peaks[0]:.2f} {peaks[1]:.2f}"
    )


@contextmanager
def _worker(tree: Path, transport: str, nbytes: int, more: Mapping[str, str]) -> Iterator[subprocess.Popen[str]]:
    """A worker of ``tree`` that trains on a cluster of its own, with ``more`` in the environment."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ps-paired-")))
        quiet = ("--log-level", "error", "--port", "0", "--ready-file")
        sizes = ("--shards", "1", "--workers", "1", "--mode", "async")
        coordinator = folder / "coordinator"
        stack.enter_context(_process(tree, more, "-m", "ps_server.coordinator.main", *quiet, str(coordinator), *sizes))
        address = _written(coordinator)
        shard, place = folder / "shard", ("--shard", "0", "--coordinator", address, "--threads", "1")
        stack.enter_context(_process(tree, more, "-m", "ps_server.shard.main", *quiet, str(shard), *place))
        _written(shard)
        child = Path(__file__).with_name("paired_worker.py")
        worker = stack.enter_context(_process(tree, more, str(child), address, transport, str(nbytes)))
        assert worker.stdout is not None
        if worker.stdout.readline() != "ready\n":
            raise RuntimeError(f"the worker of {tree} did not start")
        yield worker


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


def _ask(worker: subprocess.Popen[str], steps: int) -> dict[str, float]:
    assert worker.stdin is not None
    assert worker.stdout is not None
    worker.stdin.write(f"{steps}\n")
    worker.stdin.flush()
    answer: dict[str, float] = json.loads(worker.stdout.readline())
    return answer


if __name__ == "__main__":
    sys.exit(main())
