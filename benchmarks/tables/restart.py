"""A table larger than the memory of its shard: filled, trained, saved, and its shard killed and started again.

``python -m benchmarks.tables.restart``: 10⁸ rows of dimension 8 with Adagrad, 4 GB, where nothing else is said. A step
has 10,000 ids by a power law.
"""

from __future__ import annotations

import hashlib
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch

from benchmarks import ours
from benchmarks.cluster import BenchCluster, running_cluster
from benchmarks.processes import Child
from benchmarks.tables.ids import Ids, power_law, scattered
from benchmarks.tables.rates import fill, give_gradients, optimizer_of
from benchmarks.tables.small import cpu_seconds
from ps_protocol.client.coordinator import CoordinatorClient
from ps_protocol.cluster.view import Role
from ps_worker import rows
from ps_worker.tables import Embedding

ROWS, MEMORY, DIM, BUCKETS, DRAWN, STEPS = 100_000_000, "4GB", 8, 4096, 10_000, 200
START_SECONDS = 900.0


class Trainer:
    """The object of the worker. Used from one thread."""

    def __init__(self, module: Embedding, optimizer: torch.optim.Optimizer, table_rows: int) -> None:
        self._module = module
        self._optimizer = optimizer
        self._rows = table_rows
        self._random = np.random.default_rng(0)

    def touch(self, begin: int, end: int) -> None:
        """Push a gradient for the ids of these numbers."""
        fill(self._module, self._optimizer, begin, end)

    def train(self, steps: int) -> int:
        """Push and pull what a batch needs, so many times; returns how many different ids they had."""
        found = 0
        for _ in range(steps):
            ids = self._ids(power_law(self._random, DRAWN, self._rows))
            give_gradients(self._module, self._optimizer, torch.from_numpy(ids))
            self._optimizer.step()
            found += ids.size
        self._optimizer.zero_grad()
        return found

    def digest(self) -> str:
        """Of the values of 100,000 rows, which lie anywhere."""
        ids = self._ids(np.random.default_rng(1).integers(0, self._rows, 100_000))
        with torch.no_grad():
            return hashlib.sha256(self._module(torch.from_numpy(ids)).numpy().tobytes()).hexdigest()

    def _ids(self, numbers: Ids) -> Ids:
        """Of the ids that are used often, each was inserted at any time."""
        spread = numbers * 7_368_787 % self._rows
        return (np.unique(spread).astype(np.uint64) * np.uint64(_STEP)).view(np.int64)


_STEP = int(scattered(1, 2).view(np.uint64)[0])


@contextmanager
def worker(address: str, table_rows: int) -> Iterator[Trainer]:
    """The role of the worker."""
    with ours.connected(address, 0, None) as connection:
        module = connection.embedding(DIM, name="rows", optimizer=rows.Adagrad(lr=0.01), buckets=BUCKETS)
        yield Trainer(module, optimizer_of(connection, module), table_rows)


class Watch:
    """Says what took how long, and what it took of the shard's processor time."""

    def __init__(self, cluster: BenchCluster, say: Callable[[str], None]) -> None:
        self._cluster = cluster
        self._say = say

    def timed(self, what: str, work: Callable[[], Any], more: Callable[[Any, float], str] = lambda *_: "") -> Any:
        """The result of ``work``; ``more`` says what came of it, with its seconds."""
        began, before = time.perf_counter(), self._cluster.shards[0]
        cpu = cpu_seconds(before) if Path(f"/proc/{before}").exists() else 0.0
        found = work()
        seconds, after = time.perf_counter() - began, self._cluster.shards[0]
        # Of a process that was started meanwhile: since its start.
        cpu = cpu_seconds(after) - (cpu if after == before else 0.0)
        self._say(f"| {what} | {seconds:.1f} s | {cpu:.1f} s | {more(found, seconds)} |")
        return found


def _status(client: CoordinatorClient) -> tuple[Any, Any]:
    """Of the one shard: its table, and its log."""
    while True:
        members = client.get_status(60.0).members
        stats = next(each.stats for each in members if each.member.role is Role.SHARD and not each.gone)
        if stats.tables and stats.tables[0].rows:
            return stats.tables[0], stats.log
        time.sleep(0.5)  # It comes with a heartbeat.


def _resident(process: int) -> str:
    """Memory of a process: of its own, and the most that it had with the pages of files that it had mapped."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    sizes = {
        name: int(rest.split()[0]) / 1e6 for name, _, rest in (line.partition(":") for line in lines) if "kB" in rest
    }
    return f"{sizes['RssAnon']:.2f} GB its own, {sizes['VmHWM']:.2f} GB at most with mapped files"


def measure(table_rows: int, memory: str, folder: Path | None, say: Callable[[str], None]) -> None:
    """Print a row of Markdown for each part."""
    with ExitStack() as stack:
        root = stack.enter_context(tempfile.TemporaryDirectory(prefix="ps-restart-", dir=folder))
        place = "--checkpoint-dir", f"{root}/checkpoints"
        kept = "--table-memory", memory, "--data-dir", f"{root}/data"
        cluster = stack.enter_context(
            running_cluster(options=(*kept, *place), coordinator_options=("--checkpoint-full-every", "1000", *place))
        )
        child = stack.enter_context(Child(worker, cluster.address, table_rows))
        child.ready()
        client = stack.enter_context(CoordinatorClient(cluster.address))
        watch = Watch(cluster, say)

        def rate(count: int) -> Callable[[Any, float], str]:
            return lambda found, seconds: f"{(found or count) / seconds / 1e6:.2f} million rows/s"

        watch.timed("filled", lambda: child.call("touch", 0, table_rows), rate(table_rows))
        watch.timed(f"trained, {STEPS} steps", lambda: child.call("train", STEPS), rate(0))
        table, _ = _status(client)
        say(f"| rows on disk | | | {table.on_disk:,} of {table.rows:,}; {_resident(cluster.shards[0])} |")

        def saved(found: tuple[str, int, float], seconds: float) -> str:
            return f"{found[1] / 1e6:.0f} MB"

        watch.timed("checkpoint of all rows", client.checkpoint, saved)
        child.call("touch", 0, table_rows // 100)
        watch.timed("checkpoint after 1 % have changed", client.checkpoint, saved)
        watch.timed("waited for a snapshot", lambda: _wait_for_snapshot(client))
        child.call("train", STEPS)
        before = child.call("digest")
        _, log = _status(client)
        say(f"| killed | | | {log.unsaved_bytes / 1e6:.0f} MB of log behind the snapshot |")
        cluster.kill_shard(0)
        watch.timed("started again", lambda: cluster.start_shard(0, START_SECONDS))
        after = watch.timed("first look-up of 100,000 rows", lambda: child.call("digest"))
        table, _ = _status(client)
        say(f"| rows on disk | | | {table.on_disk:,} of {table.rows:,}; {_resident(cluster.shards[0])} |")
        say(f"| values | | | {'the same' if before == after else 'NOT THE SAME'} |")
        watch.timed(f"trained, {STEPS} steps", lambda: child.call("train", STEPS), rate(0))


def _wait_for_snapshot(client: CoordinatorClient) -> None:
    while (log := _status(client)[1]) is None or log.unsaved_bytes > 64 << 20:
        time.sleep(1.0)


@click.command()
@click.option("--rows", "table_rows", type=click.IntRange(1000), default=ROWS, show_default=True)
@click.option("--memory", default=MEMORY, show_default=True, help="--table-memory of the shard.")
@click.option("--folder", type=click.Path(file_okay=False, exists=True, path_type=Path), help="Where it writes.")
def main(table_rows: int, memory: str, folder: Path | None) -> None:
    """Fill a table larger than the memory of its shard, train, save, kill the shard and start it again.

    With 10⁸ rows it takes about 35 GB of disk.
    """
    print(f"{table_rows:,} rows of {DIM} numbers with Adagrad, --table-memory {memory}\n")
    print("| | seconds | processor time of the shard | |")
    print("|---|---|---|---|")
    measure(table_rows, memory, folder, lambda line: print(line, flush=True))


if __name__ == "__main__":
    main()
