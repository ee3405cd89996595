"""Rows per second where a part of a table's rows is in memory, beside the same table all in memory, and the disk.

``python -m benchmarks.tables.memory``: a row of Markdown for each operation. Both tables are up at the same time and
take turns. A step has the different ones of 10,000 ids, by a power law or evenly, drawn again each time. With even ids,
the table takes turns with a bare loop, too, that reads and writes as many records of a file.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
import urllib.request
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from numba import njit, types

from benchmarks import ours
from benchmarks.cluster import running_cluster
from benchmarks.processes import Child
from benchmarks.tables.ids import DIM, Ids, power_law, scattered
from benchmarks.tables.rates import fill, optimizer_of
from benchmarks.tables.small import cpu_seconds
from benchmarks.timing import Loop
from ps_protocol.client.coordinator import CoordinatorClient
from ps_protocol.cluster.view import Role
from ps_server.tables.record_file import record_bytes
from ps_worker import rows

ROWS, PART, DRAWN = 2_000_000, 0.1, 10_000
PULL, PUSH, STEP, PREFETCHED = "pulled", "pushed", "pulled and pushed", "pulled and pushed, prefetched"
OPERATIONS = (PULL, PUSH, STEP, PREFETCHED)
POWER, EVEN = "power law", "even"

#: Of a row, in memory in any case: id, last use, place, and its part of a map.
_INDEX_BYTES = 20 + 9
_ROW_BYTES = 4 * 2 * DIM + 9
_ROUNDS, _STEPS = 5, 40
#: Batches that cluster.prefetch may ask for before their turn, and some more.
_AHEAD = 8
#: Steps before anything is measured: what is used often is in memory then.
_MOST_WARM_UPS = 2_000
_DISK_ROUNDS = 40
_AT_ONCE_BYTES = 256 << 10

_pread: Any = types.ExternalFunction("pread", types.int64(types.int32, types.uintp, types.uintp, types.int64))
_advise: Any = types.ExternalFunction("posix_fadvise", types.int32(types.int32, types.int64, types.int64, types.int32))


@njit
def _read_all(descriptor: Any, records: Any, size: Any, buffer: Any, announce: Any) -> None:
    if announce:
        for record in records:
            _advise(descriptor, record * size, size, 3)
    for record in records:
        _pread(descriptor, buffer, size, record * size)


class MemoryLoop(Loop):
    """A ``Loop`` whose batches are drawn before they are timed: no batch comes twice."""

    def __init__(self, draw: Callable[[], torch.Tensor], *arguments: Any) -> None:
        super().__init__(*arguments)
        self.batches: deque[torch.Tensor] = deque()
        self._draw = draw

    def run(self, operation: str, count: int, warm_up: int = 0) -> list[float]:
        """As that of a ``Loop``."""
        while len(self.batches) < count + warm_up + _AHEAD:
            self.batches.append(self._draw())
        return super().run(operation, count, warm_up)

    def rows_at_once(self) -> float:
        """Different ids of one operation, in the mean."""
        return statistics.mean(len(self._draw()) for _ in range(50))


@contextmanager
def worker(address: str, table_rows: int, law: str) -> Iterator[MemoryLoop]:
    """The role of the process that is timed."""
    with ours.connected(address, 0, ours.SHM) as connection, ours.undisturbed() as check:
        table = connection.embedding(DIM, name="table", optimizer=rows.Adagrad(lr=0.01))
        optimizer = optimizer_of(connection, table)
        rng = np.random.default_rng(0)
        # What is used often lies anywhere among the rows.
        numbers = rng.permutation(table_rows)
        fill(table, optimizer, 0, table_rows)
        ids = scattered(0, table_rows)[numbers]

        def draw() -> torch.Tensor:
            drawn = power_law(rng, DRAWN, table_rows) if law == POWER else rng.integers(0, table_rows, DRAWN)
            found: Ids = ids[np.unique(drawn)]
            return torch.from_numpy(rng.permutation(found))

        def batches() -> Iterator[torch.Tensor]:
            while True:
                yield loop.batches.popleft()

        plain, ahead = batches(), iter(connection.prefetch(batches(), lambda batch: {table: batch}))

        def step(source: Iterator[torch.Tensor]) -> None:
            forward(source)
            push()

        def forward(source: Iterator[torch.Tensor]) -> None:
            optimizer.zero_grad()
            found = table(next(source))
            found.backward(torch.full_like(found, 1e-3))

        def pull() -> None:
            with torch.no_grad():
                table(next(plain))
            check()

        def push() -> None:
            optimizer.step()
            check()

        loop = MemoryLoop(
            draw,
            {PULL: pull, PUSH: push, STEP: lambda: step(plain), PREFETCHED: lambda: step(ahead)},
            {PUSH: lambda: forward(plain)},
        )
        yield loop


class BareDisk:
    """A file of records: what a disk takes for a step, without a table."""

    def __init__(self, folder: Path, count: int) -> None:
        self._size = record_bytes(2 * DIM)
        self._count = count
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 -- closed with the object
        self._random = np.random.default_rng(0)
        self._block = os.urandom(_AT_ONCE_BYTES)
        for _ in range(-(-count * self._size // len(self._block))):
            self._file.write(self._block)
        self._file.flush()
        os.posix_fadvise(self._file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        self._head = 0
        self.step(8, announce=True)

    @property
    def path(self) -> Path:
        """Where it may be opened."""
        return Path(f"/proc/self/fd/{self._file.fileno()}")

    def step(self, count: int, *, announce: bool) -> tuple[float, float]:
        """Seconds, and those of the processor, of reading so many records, which lie anywhere, and of writing as many,
        one after another.
        """
        records = np.sort(self._random.choice(self._count, count, replace=False))
        buffer = np.empty(self._size, np.uint8)
        began, cpu, left = time.perf_counter(), time.thread_time(), count * self._size
        _read_all(self._file.fileno(), records, self._size, buffer.ctypes.data, announce)
        while left > 0:
            written = os.pwrite(self._file.fileno(), self._block[:left], self._head)
            left, self._head = left - written, (self._head + written) % (self._count * self._size)
        return time.perf_counter() - began, time.thread_time() - cpu


def _forget(path: Path) -> None:
    """Have nothing of a file in the page cache."""
    with path.open("rb") as file:
        os.fdatasync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def beside_the_disk(
    child: Child, shard: int, folder: Path, address: str, count: float, say: Callable[[str], None]
) -> None:
    """Print a row of Markdown from the page cache, and one from the device."""
    with CoordinatorClient(address) as client:
        members = client.get_status(60.0).members
    table = next(each.stats.tables[0] for each in members if each.member.role is Role.SHARD)
    moved = round(count * table.on_disk / table.rows)
    files = [each for each in Path(f"/proc/{shard}/fd").iterdir() if str(each.readlink()).startswith(f"{folder}/")]
    file = next(each for each in files if str(each.readlink()).endswith(" (deleted)"))
    disk = BareDisk(folder, table.on_disk)
    for cold in (False, True):
        alone, taken, cpu = [], [], 0.0
        for _ in range(_DISK_ROUNDS):
            if cold:
                _forget(disk.path)
            alone.append(disk.step(moved, announce=cold))
            if cold:
                _forget(file)
            before = cpu_seconds(shard)
            taken += child.call("run", STEP, 1, 0)
            cpu += cpu_seconds(shard) - before
        seconds = [[each for each, _ in alone], taken]
        rates = [count / statistics.median(each) / 1e6 for each in seconds]
        of_cpu = [1e3 * each / _DISK_ROUNDS for each in (sum(each for _, each in alone), cpu)]
        where = "device" if cold else "page cache"
        say(
            f"| {EVEN}, {where} | {STEP} | {rates[0]:.2f} | {rates[1]:.2f} | {rates[1] / rates[0]:.2f} "
            f"| {of_cpu[0]:.1f} | {of_cpu[1]:.1f} | |"
        )


def _from_disk(address: str) -> float:
    """How many rows of look-ups the one shard at a coordinator's ``address`` has read so far. A batch has an id once or
    more often; where it is not in memory, mostly once.
    """
    with CoordinatorClient(address) as client:
        members = client.get_status(60.0).members
    metrics = next(each.stats.metrics_address for each in members if each.member.role is Role.SHARD)
    with urllib.request.urlopen(f"http://{metrics}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if "table_rows_found_total{" in line and '"disk"' in line)


def _limit(table_rows: int, part: float) -> int:
    """Memory for this part of the rows, besides ids and maps."""
    return table_rows * _INDEX_BYTES + int(table_rows * part) * _ROW_BYTES


def measure(table_rows: int, part: float, law: str, say: Callable[[str], None]) -> None:
    """Print a row of Markdown for each operation."""
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="ps-rows-", dir=Path.cwd()))
        limits = ((), ("--table-memory", str(_limit(table_rows, part)), "--data-dir", folder, "--durability", "memory"))
        clusters = [stack.enter_context(running_cluster(options=options)) for options in limits]
        children = [stack.enter_context(Child(worker, each.address, table_rows, law)) for each in clusters]
        for child in children:
            child.ready()
        count = children[0].call("rows_at_once")
        for child, warm_ups in zip(children, (_STEPS, min(_MOST_WARM_UPS, int(2e-3 * part * table_rows))), strict=True):
            for _ in range(0, warm_ups, _STEPS):
                child.call("run", STEP, _STEPS, 0)
        for operation in OPERATIONS:
            seconds, cpu = [[], []], [0.0, 0.0]
            missed = _from_disk(clusters[1].address)
            for turn in range(_ROUNDS + 1):
                for which, child in enumerate(children):
                    before = cpu_seconds(clusters[which].shards[0])
                    taken = child.call("run", operation, _STEPS, 0)
                    if turn:
                        seconds[which].append(statistics.median(taken))
                        cpu[which] += cpu_seconds(clusters[which].shards[0]) - before
            rates = [count / statistics.median(each) / 1e6 for each in seconds]
            ratio = statistics.median(much / little for much, little in zip(*seconds, strict=True))
            missed = (_from_disk(clusters[1].address) - missed) / ((_ROUNDS + 1) * _STEPS * DRAWN)
            of_cpu = [1e3 * each / (_ROUNDS * _STEPS) for each in cpu]
            say(
                f"| {law} | {operation} | {rates[0]:.2f} | {rates[1]:.2f} | {ratio:.2f} "
                f"| {of_cpu[0]:.1f} | {of_cpu[1]:.1f} | {1 - missed:.1%} |"
            )
        if law == EVEN:
            say(f"| | beside the disk alone | *disk* | *{part:g}* | | | | |")
            beside_the_disk(children[1], clusters[1].shards[0], Path(folder), clusters[1].address, count, say)


@click.command()
@click.option("--rows", "table_rows", type=click.IntRange(1000), default=ROWS, show_default=True)
@click.option(
    "--part", type=click.FloatRange(0.0, 1.0, min_open=True), default=PART, show_default=True, help="In memory."
)
@click.option("--ids", "laws", type=click.Choice([POWER, EVEN]), multiple=True, default=(POWER, EVEN), help="Both.")
def main(table_rows: int, part: float, laws: Sequence[str]) -> None:
    """Rows per second where a part of a table is in memory, beside the same table all in memory, and the disk."""
    print(f"{table_rows:,} rows of {DIM} numbers with Adagrad; million rows per second, CPU of the shard in ms a step")
    print(f"| ids | rows | all in memory | {part:g} of them | ratio | CPU, all | CPU, {part:g} | found in memory |")
    print("|---|---|---|---|---|---|---|---|")
    for law in laws:
        measure(table_rows, part, law, lambda line: print(line, flush=True))


if __name__ == "__main__":
    main()
