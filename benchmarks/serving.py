"""Look-ups of a serving process while workers train: ``python -m benchmarks.serving``.

Two asynchronous workers train a table by a power law without a pause; the process that serves asks for 1,000 ids by
the same law, every few milliseconds: from its own copy of the table, which follows the training (``ps_worker.feed``),
or from the shards, as an evaluator. Shown are the median, the 99th percentile and the longest time of a look-up, and
how many rows the copy takes in meanwhile.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import click
import numpy as np
import torch
from torch import nn

import ps_worker
from benchmarks import report
from benchmarks.cluster import running_cluster
from benchmarks.processes import Child
from benchmarks.tables.ids import DIM, Ids, power_law, scattered
from benchmarks.tables.rates import fill, optimizer_of
from ps_protocol.errors import Unavailable
from ps_worker import rows
from ps_worker.feed import TableCopy, follow_table

RESULTS = Path(__file__).parent / "results" / "serving.json"
COPY, SHARDS = "its own copy", "the shards"
ASKED_SECONDS = 0.005
"""99 % of the look-ups in a copy may take as long."""

IDS = 1000
TABLE = "rows"

_BATCH_IDS = 10_000
_PAUSE_SECONDS = 0.003


class Training:
    """A worker that trains from ``start`` to ``stop``, in a thread of its own."""

    def __init__(self, address: str, rank: int, table_rows: int) -> None:
        self._rank, self._rows = rank, table_rows
        self._stop = threading.Event()
        self._cluster = ps_worker.connect(address, rank=rank, device="cpu")
        self._table = self._cluster.embedding(DIM, name=TABLE, optimizer=rows.RowWiseAdagrad(lr=0.01))
        self._optimizer = optimizer_of(self._cluster, self._table)
        self._steps = 0
        self._thread = threading.Thread(target=self._train)

    def fill(self) -> None:
        """Train each id once, so that it has a row."""
        fill(self._table, self._optimizer, 0, self._rows)

    def start(self) -> None:
        """Train until ``stop``."""
        self._thread.start()

    def stop(self) -> int:
        """The steps that were made."""
        self._stop.set()
        self._thread.join()
        return self._steps

    def close(self) -> None:
        """Leave the job."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()
        self._cluster.close()

    def _train(self) -> None:
        rng, known = np.random.default_rng(self._rank), scattered(0, self._rows)
        while not self._stop.is_set():
            ids = torch.from_numpy(known[power_law(rng, _BATCH_IDS, self._rows)])
            self._table(ids).square().mean().backward()
            self._optimizer.step()
            self._optimizer.zero_grad()
            self._steps += 1


class Serving:
    """The process that serves."""

    def __init__(self, address: str, table_rows: int) -> None:
        self._address, self._known = address, scattered(0, table_rows)
        self._rng = np.random.default_rng(100)
        self._taken = 0
        # As docs/recommenders.md has it.
        sys.setswitchinterval(0.001)

    def from_copy(self, count: int) -> tuple[list[float], int]:
        """Seconds of each of ``count`` look-ups in a copy, and the rows that came meanwhile."""
        copy, whole = TableCopy(), threading.Event()

        def follow() -> None:
            try:
                for change in follow_table(self._address, TABLE):
                    copy.apply(change)
                    self._taken += change.ids.size
                    if change.whole:
                        whole.set()
            except Unavailable:
                if not whole.is_set():
                    raise
                # The job has ended, and its shards before this was told.

        threading.Thread(target=follow, daemon=True).start()
        whole.wait()

        self._seconds(copy.rows, count // 10)
        before = self._taken
        return self._seconds(copy.rows, count), self._taken - before

    def from_shards(self, count: int) -> tuple[list[float], int]:
        """Seconds of each of ``count`` look-ups on the shards."""
        with ps_worker.connect(self._address, role="evaluator", device="cpu") as cluster:
            table = cluster.embedding(DIM, name=TABLE, optimizer=rows.RowWiseAdagrad(lr=0.01))
            # The same model as that of the workers.
            next(cluster.follow(nn.ModuleList([table, nn.Linear(1, 1)])))

            @torch.no_grad()
            def look_up(ids: Ids) -> None:
                table(torch.from_numpy(ids))

            self._seconds(look_up, count // 10)
            return self._seconds(look_up, count), 0

    def _seconds(self, look_up: Callable[[Ids], object], count: int) -> list[float]:
        taken = []
        for _ in range(count):
            ids = self._known[power_law(self._rng, IDS, self._known.size)]
            begun = time.perf_counter()
            look_up(ids)
            taken.append(time.perf_counter() - begun)
            time.sleep(_PAUSE_SECONDS)
        return taken


@contextmanager
def training(address: str, rank: int, table_rows: int) -> Iterator[Training]:
    """The role of a worker."""
    held = Training(address, rank, table_rows)
    try:
        yield held
    finally:
        held.close()


@contextmanager
def serving(address: str, table_rows: int) -> Iterator[Serving]:
    """The role of the process that serves."""
    yield Serving(address, table_rows)


def measure(table_rows: int, count: int, workers: int) -> dict[str, dict[str, float]]:
    """By where the rows come from: seconds of a look-up, rows that came a second, and steps of the workers a second."""
    found = {}
    for name, method in ((COPY, "from_copy"), (SHARDS, "from_shards")):
        with ExitStack() as stack:
            address = stack.enter_context(running_cluster(workers=workers)).address
            crew = [stack.enter_context(Child(training, address, rank, table_rows)) for rank in range(workers)]
            server = stack.enter_context(Child(serving, address, table_rows))
            for child in (*crew, server):
                child.ready()
            crew[0].call("fill")
            for child in crew:
                child.call("start")
            begun = time.perf_counter()
            taken, came = server.call(method, count)
            passed = time.perf_counter() - begun
            steps = sum(child.call("stop") for child in crew)
        found[name] = {
            "median": statistics.median(taken),
            "99 %": float(np.percentile(taken, 99)),
            "longest": max(taken),
            "rows a second": came / (sum(taken) + _PAUSE_SECONDS * count),
            "steps a second": steps / passed,
        }
    return found


def table(found: dict[str, dict[str, float]]) -> list[str]:
    """Lines of Markdown."""
    lines = [
        "| rows come from | median | 99 % | longest | rows that came | steps of workers |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for name, each in found.items():
        times = " | ".join(f"{each[which] * 1e3:.2f} ms" for which in ("median", "99 %", "longest"))
        lines.append(f"| {name} | {times} | {each['rows a second']:,.0f}/s | {each['steps a second']:.0f}/s |")
    return lines


@click.command()
@click.option("--rows", "table_rows", type=click.IntRange(1), default=1_000_000, show_default=True)
@click.option("--count", type=click.IntRange(10), default=3000, show_default=True, help="Look-ups that are timed.")
@click.option("--workers", type=click.IntRange(1), default=2, show_default=True)
@click.option("--output", type=click.Path(dir_okay=False, path_type=Path), default=RESULTS, help="JSON of everything.")
def main(table_rows: int, count: int, workers: int, output: Path) -> None:
    """Time look-ups of 1,000 ids while workers train; print a table in Markdown, keep it as JSON."""
    found = measure(table_rows, count, workers)
    click.echo(f"{', '.join(report.machine().values())}; load {os.getloadavg()[0]:.1f} at the end\n")
    click.echo("\n".join(table(found)))
    reached = found[COPY]["99 %"] <= ASKED_SECONDS
    click.echo(f"\n99 % in a copy, asked ≤ {ASKED_SECONDS * 1e3:g} ms: {'reached' if reached else 'not reached'}")
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps({"machine": report.machine(), "look-ups": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
