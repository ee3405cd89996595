"""Whether readers ever see a mixed version: ``python -m benchmarks.mixed``.

A worker trains and publishes ten versions a second; readers in processes of their own follow them whole. Meanwhile one
shard after the other is killed by its pid and started again. The metadata of a version has a checksum over all tensors
as the trainer has them, with which each reader compares what it sees. The program ends when so many versions were seen,
with code 1 if one was mixed, came twice or out of order.
"""

from __future__ import annotations

import os
import random
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import click
import torch
import xxhash

import ps_worker
from benchmarks import report
from benchmarks.cluster import running_cluster
from benchmarks.processes import Child

TENSORS = 10
SPARSE, DENSE_STEPS = 100, 10
"""A step changes one value of so many, every tenth all of them."""

PATIENCE_SECONDS = 120.0
"""No version for so long is a failure."""


def checksum(tensors: Mapping[str, torch.Tensor]) -> str:
    """Over all of them, in the order of their names."""
    digest = xxhash.xxh3_128()
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(tensors[name].detach().contiguous().numpy().data)
    return digest.hexdigest()


@dataclass
class Seen:
    """What one reader has seen."""

    versions: int = 0
    newest: int = 0
    delta_bytes: int = 0
    full_bytes: int = 0
    wrong: list[str] = field(default_factory=list)


class Reader:
    """Follows the name in a thread, to the end of the job."""

    def __init__(self, address: str) -> None:
        self._seen = Seen()
        threading.Thread(target=self._follow, args=(address,), daemon=True).start()

    def seen(self) -> Seen:
        """So far."""
        return self._seen

    def _follow(self, address: str) -> None:
        seen = self._seen
        try:
            with ps_worker.subscribe(
                "policy", coordinator=address, reconnect_timeout_seconds=PATIENCE_SECONDS
            ) as versions:
                for version in versions:
                    if checksum(version.tensors()) != version.metadata["checksum"]:
                        seen.wrong.append(f"version {version.number} is mixed")
                    if version.number <= seen.newest:
                        seen.wrong.append(f"version {version.number} came after version {seen.newest}")
                    seen.newest, seen.versions = version.number, seen.versions + 1
                    seen.delta_bytes, seen.full_bytes = versions.delta_bytes, versions.full_bytes
        except Exception as error:  # noqa: BLE001  (shown by the program)
            seen.wrong.append(f"after version {seen.newest}: {error!r}")


@contextmanager
def reader(address: str) -> Iterator[Reader]:
    """The role of a reader."""
    torch.set_num_threads(1)
    yield Reader(address)


class Trainer:
    """Trains in a thread, and publishes after each step, so many times a second at most."""

    def __init__(self, address: str, nbytes: int, rate: float) -> None:
        self.published = 0
        self.wrong: list[str] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._train, args=(address, nbytes, rate), daemon=True)
        self._thread.start()

    def progress(self) -> tuple[int, list[str]]:
        """How many versions there are, and what went wrong."""
        return self.published, self.wrong

    def stop(self) -> None:
        """End the job."""
        self._stop.set()
        self._thread.join(PATIENCE_SECONDS)

    def _train(self, address: str, nbytes: int, rate: float) -> None:
        try:
            with ps_worker.connect(address, device="cpu") as cluster:
                rows = max(1, nbytes // 4 // TENSORS)
                model = torch.nn.ParameterDict({f"t{i}": torch.zeros(rows) for i in range(TENSORS)})
                optimizer = cluster.optimizer(torch.optim.SGD, model, lr=1.0)
                step, due = 0, time.monotonic()
                while not self._stop.is_set():
                    step += 1
                    for parameter in model.values():
                        parameter.grad = torch.zeros_like(parameter)
                        changed = parameter.grad[:: SPARSE if step % DENSE_STEPS else 1]
                        changed.copy_(torch.randn(len(changed)))
                    optimizer.step()
                    facts = {"checksum": checksum(model.state_dict())}
                    self.published = cluster.publish("policy", optimizer, step=step, metadata=facts)
                    due = max(due + 1 / rate, time.monotonic() - 1 / rate)
                    time.sleep(max(0.0, due - time.monotonic()))
        except Exception as error:  # noqa: BLE001  (shown by the program)
            self.wrong.append(repr(error))


@contextmanager
def trainer(address: str, nbytes: int, rate: float) -> Iterator[Trainer]:
    """The role of the worker."""
    torch.set_num_threads(1)
    yield Trainer(address, nbytes, rate)


@click.command()
@click.option("--mb", type=click.FloatRange(0.001), default=10.0, show_default=True, help="Of a version.")
@click.option("--readers", type=click.IntRange(1), default=8, show_default=True)
@click.option("--rate", type=click.FloatRange(0.1), default=10.0, show_default=True, help="Versions a second at most.")
@click.option("--shards", type=click.IntRange(1), default=2, show_default=True)
@click.option("--kill-seconds", type=click.FloatRange(0.0), default=10.0, show_default=True, help="Between two kills.")
@click.option("--seen", type=click.IntRange(1), default=10_000, show_default=True, help="Versions, by all readers.")
@click.option("--durability", type=click.Choice(["memory", "durable"]), default="durable", show_default=True)
@click.option("--seed", type=int, default=None, help="Of the moments and shards.")
def main(
    mb: float, readers: int, rate: float, shards: int, kill_seconds: float, seen: int, durability: str, seed: int | None
) -> None:
    """Kill shards while readers follow; say how many versions were seen, and whether one was mixed."""
    seed = random.randrange(1 << 32) if seed is None else seed
    chance = random.Random(seed)
    click.echo(f"{', '.join(report.machine().values())}; --seed {seed}")
    os.environ["PS_RECONNECT_TIMEOUT"] = str(PATIENCE_SECONDS)
    with ExitStack() as stack:
        options = []
        if durability != "memory":
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="ps-bench-"))
            options = ["--data-dir", str(Path(folder)), "--durability", durability]
        cluster = stack.enter_context(running_cluster(shards=shards, mode=("--mode", "sync"), options=options))
        crew = [stack.enter_context(Child(reader, cluster.address)) for _ in range(readers)]
        source = stack.enter_context(Child(trainer, cluster.address, int(mb * 1e6), rate))
        for child in (*crew, source):
            child.ready()
        begun = told = moved = time.monotonic()
        due, kills, count, wrong = begun + kill_seconds, 0, 0, list[str]()
        while count < seen and not wrong and time.monotonic() - moved < PATIENCE_SECONDS:
            time.sleep(0.2)
            if kill_seconds and time.monotonic() >= due:
                shard = chance.randrange(shards)
                cluster.kill_shard(shard)
                cluster.start_shard(shard)
                kills += 1
                due = time.monotonic() + kill_seconds * (0.5 + chance.random())
            found = [child.call("seen") for child in crew]
            published, failed = source.call("progress")
            wrong = failed + [text for each in found for text in each.wrong]
            before, count = count, sum(each.versions for each in found)
            now = time.monotonic()
            moved = now if count > before else moved
            if now - told >= 10 or count >= seen or wrong:
                told = now
                click.echo(
                    f"{now - begun:4.0f} s: {published} versions, {published / (now - begun):.1f}/s; {count} seen;"
                    f" {kills} kills; {sum(each.delta_bytes for each in found) / 1e6:.0f} MB as deltas,"
                    f" {sum(each.full_bytes for each in found) / 1e6:.0f} MB whole"
                )
        if not wrong and count < seen:
            wrong = [f"no version was seen for {PATIENCE_SECONDS:g} s"]
        source.call("stop")
    for text in wrong:
        click.echo(text)
    click.echo(f"{count} versions seen by {readers} readers, {kills} kills of shards: {len(wrong)} wrong")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
