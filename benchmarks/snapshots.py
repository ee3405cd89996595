"""How long a snapshot stops pushes, and how fast it is written: ``python -m benchmarks.snapshots``."""

from __future__ import annotations

import os
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click
import torch

from benchmarks import ours
from benchmarks.cluster import running_cluster
from benchmarks.crew import Crew
from benchmarks.processes import Child
from benchmarks.rows import MB, size
from benchmarks.timing import Loop

_EVERY_SECONDS = 5.0


@click.command()
@click.option("--nbytes", type=click.IntRange(4), default=1000 * MB, show_default=True, help="Bytes of parameters.")
@click.option("--seconds", type=click.FloatRange(10.0), default=40.0, show_default=True)
@click.option("--folder", type=click.Path(file_okay=False, path_type=Path), help="Where the shard keeps its data.")
def main(nbytes: int, seconds: float, folder: Path | None) -> None:
    """Push a small model of 10 KB while snapshots are taken of a large one, on the same shard.

    A push waits for the block that is being copied, and for nothing else: the longest step is the longest pause.
    """
    with tempfile.TemporaryDirectory(prefix="ps-snapshots-", dir=folder) as root:
        disk = _disk(Path(root), nbytes)
        options = ["--data-dir", root, "--durability", "snapshot", "--snapshot-seconds", str(_EVERY_SECONDS)]
        watch = _Watch(Path(root) / "shard-0" / "snapshots")
        with running_cluster(options=options) as cluster, Child(worker, cluster.address, nbytes) as child:
            child.ready()
            crew, taken, began = Crew([child]), list[float](), time.monotonic()
            watch.start()
            while time.monotonic() - began < seconds:
                taken += crew.run(ours.STEP, 200, 0)["seconds"]
            watch.stop()
    made = [nbytes / each for each in watch.seconds]
    click.echo(
        f"{len(taken)} pushes of 10 KB while {len(made)} snapshots of {size(nbytes)} were taken: median "
        f"{statistics.median(taken) * 1e3:.2f} ms, longest {max(taken) * 1e3:.1f} ms, "
        f"{sum(each > 0.1 for each in taken)} above 100 ms, {sum(each > 0.03 for each in taken)} above 30 ms"
    )
    if made:
        rate = statistics.median(made)
        click.echo(f"written at {rate / 1e9:.2f} GB/s, {rate / disk:.2f} of the disk's {disk / 1e9:.2f} GB/s")


@contextmanager
def worker(address: str, nbytes: int) -> Iterator[Loop]:
    """The role of the process that pushes."""
    with ours.connected(address, 0, ours.SHM) as connection:
        large, small = ours.Flat(nbytes, 32), ours.Flat(10_000, 1)
        optimizers = [
            connection.optimizer(torch.optim.SGD, model, lr=1e-6, name=name)
            for name, model in (("large", large), ("small", small))
        ]
        for model, optimizer in zip((large, small), optimizers, strict=True):
            model.set_gradients()
            optimizer.step()
        yield Loop({ours.STEP: optimizers[1].step})


def _disk(root: Path, nbytes: int) -> float:
    """Bytes per second of writing a new file and syncing it."""
    data, rates = os.urandom(min(nbytes, 1 << 28)), []
    for _ in range(3):
        began = time.perf_counter()
        with (root / "plain").open("wb") as file:
            for _ in range(max(1, nbytes // len(data))):
                file.write(data)
            os.fdatasync(file.fileno())
        rates.append(nbytes / (time.perf_counter() - began))
        (root / "plain").unlink()
    return statistics.median(rates)


class _Watch(threading.Thread):
    """Looks when snapshots begin and are whole, by their folders."""

    def __init__(self, folder: Path) -> None:
        super().__init__(daemon=True)
        #: How long each took that was seen from its beginning to its end.
        self.seconds: list[float] = []
        self._folder = folder
        self._end = threading.Event()

    def stop(self) -> None:
        """Look no more."""
        self._end.set()
        self.join()

    def run(self) -> None:
        """Look a hundred times a second."""
        begun: float | None = None
        while not self._end.wait(0.01):
            being_written = any(self._folder.glob("*.part"))
            if being_written and begun is None:
                begun = time.monotonic()
            elif begun is not None and not being_written:
                self.seconds.append(time.monotonic() - begun)
                begun = None


if __name__ == "__main__":
    main()
