"""Whole weights to several readers at once: ``python -m benchmarks.readers``.

A model is published once, and 1, 4 and 8 processes of this host receive it whole over TCP: with ``ps_worker.subscribe``
from one shard, from ``python -m http.server`` as a safetensors file, and from a process of torch RPC. Each round takes
the three in turn; its time is that of the slowest reader, until it has tensors. What is received here is also compared
with its checksums.

Then the same readers behind a relay on this host: over TCP, and with memory that they share.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

import click
import safetensors.torch
import torch

import ps_worker
from benchmarks import report
from benchmarks.cluster import running_cluster
from benchmarks.peers import torch_rpc
from benchmarks.processes import Child, end_with_parent
from benchmarks.timing import Loop
from ps_worker.weights import Subscription

RESULTS = Path(__file__).parent / "results" / "readers.json"
OURS, HTTP, RPC = "torch-ps", "http.server, safetensors", torch_rpc.TCP
DIRECT, RELAY, SHARED = "the shard, TCP", "a relay, TCP", "a relay, shared memory"
ASKED = 1.2
"""So many times as fast as the faster of the two others."""

TENSORS = 40

STEPS = 10

WARM_BLOCKS = 4
"""As many versions take new memory at first."""

ASKED_SHARE = 0.05
"""Of training, what a version every ten steps takes at most."""


@contextmanager
def published(address: str, nbytes: int) -> Iterator[object]:
    """The role of the trainer: it publishes one version, and stays."""
    with ps_worker.connect(address, device="cpu") as cluster:
        parameters = [torch.nn.Parameter(torch.randn(nbytes // 4 // TENSORS)) for _ in range(TENSORS)]
        optimizer = cluster.optimizer(torch.optim.SGD, parameters, lr=0.1)
        cluster.publish("policy", optimizer, step=1, wait=True)
        yield object()


class Publishing:
    """A worker that trains, and publishes at the first of ten steps where it is asked to."""

    def __init__(self, cluster: ps_worker.Cluster, nbytes: int) -> None:
        parameters = [torch.nn.Parameter(torch.randn(nbytes // 4 // TENSORS)) for _ in range(TENSORS)]
        self._cluster = cluster
        self._optimizer = cluster.optimizer(torch.optim.Adam, parameters, lr=1e-3)
        self._step = 0
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)

    def block(self, publishes: bool) -> float:
        """Seconds of ten steps; the version is written meanwhile."""
        begin = time.perf_counter()
        for number in range(STEPS):
            self._optimizer.step()
            self._step += 1
            if publishes and number == 0:
                self._cluster.publish("trained", self._optimizer, step=self._step, keep=2)
        return time.perf_counter() - begin


@contextmanager
def trained(address: str, nbytes: int) -> Iterator[Publishing]:
    """The role of a worker that is timed."""
    with ps_worker.connect(address, device="cpu") as cluster:
        yield Publishing(cluster, nbytes)


@contextmanager
def follower(address: str) -> Iterator[object]:
    """The role of a reader on the trainer's host: it maps each version, and has the last one."""
    kept: list[object] = [None]

    def follow(versions: Subscription) -> None:
        for version in versions:
            kept[0] = version.tensors()

    with ps_worker.subscribe("trained", coordinator=address) as versions:
        threading.Thread(target=follow, args=(versions,), daemon=True).start()
        yield object()


def shares(nbytes: int, blocks: int, durability: str = "memory", *, read: bool = False) -> list[float]:
    """By how much ten steps with a version take longer than ten without, of each pair of blocks. ``read``: beside a
    reader on the same host.
    """
    with ExitStack() as stack:
        cluster = stack.enter_context(running_cluster(options=storage(stack, durability)))
        worker = stack.enter_context(Child(trained, cluster.address, nbytes))
        worker.ready()
        if read:
            stack.enter_context(Child(follower, cluster.address)).ready()
        for _ in range(WARM_BLOCKS):
            worker.call("block", True)
        return [worker.call("block", True) / worker.call("block", False) - 1 for _ in range(blocks)]


class Subscriber(Loop):
    """A reader of ours, which keeps the version that it read last."""

    def __init__(self, versions: Subscription) -> None:
        super().__init__({OURS: self._read})
        self._versions = versions
        self._kept: object = None

    def _read(self) -> None:
        self._versions.restart()
        self._kept = self._versions.fetch(1).tensors()

    def received(self) -> int:
        """Bytes, so far."""
        return self._versions.delta_bytes + self._versions.full_bytes

    def memory(self) -> int:
        """Bytes of this process; what several have is divided by their number (PSS)."""
        lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith("Pss:"))


@contextmanager
def subscriber(address: str, transport: str = "bulk") -> Iterator[Subscriber]:
    """The role of a reader of ours. ``transport``: bulk: over TCP, also on this host."""
    before = os.environ.get("PS_TRANSPORT")
    os.environ["PS_TRANSPORT"] = transport
    try:
        subscription = ps_worker.subscribe("policy", coordinator=address)
    finally:
        del os.environ["PS_TRANSPORT"]
        if before is not None:
            os.environ["PS_TRANSPORT"] = before
    with subscription as versions:
        yield Subscriber(versions)


@contextmanager
def relay(address: str) -> Iterator[tuple[str, int]]:
    """``psctl weights relay`` of the job at ``address``; its own address, and what it has received, once it has."""
    with tempfile.TemporaryDirectory(prefix="ps-bench-") as folder:
        ready = Path(folder) / "ready"
        command = [sys.executable, "-c", "from ps_server.entry import psctl; psctl()", "--coordinator", address]
        command += ["weights", "relay", "policy", "--port", "0", "--ready-file", str(ready), "--json"]
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, preexec_fn=end_with_parent
        )
        try:
            assert process.stdout is not None
            version = json.loads(process.stdout.readline())
            yield ready.read_text().strip(), version["delta_bytes"] + version["full_bytes"]
        finally:
            process.kill()
            process.wait()


@dataclass
class Shared:
    """What one number of readers took."""

    seconds: list[float] = field(default_factory=list)
    #: Of one round.
    from_shard: int = 0
    received: int = 0
    #: By which a reader is larger once it has the version.
    memory: int = 0


def behind_relay(nbytes: int, counts: Sequence[int], rounds: int) -> dict[str, dict[str, Shared]]:
    """By number of readers and how they read: directly, from a relay, from a relay with shared memory."""
    found: dict[str, dict[str, Shared]] = {}
    with ExitStack() as stack:
        address = stack.enter_context(running_cluster()).address
        stack.enter_context(Child(published, address, nbytes)).ready()
        near, once_received = stack.enter_context(relay(address))
        crews = {
            name: [stack.enter_context(Child(subscriber, at, transport)) for _ in range(max(counts))]
            for name, at, transport in ((DIRECT, address, "bulk"), (RELAY, near, "bulk"), (SHARED, near, "auto"))
        }
        before = {}
        for name, crew in crews.items():
            for child in crew:
                child.ready()
            before[name] = [child.call("memory") for child in crew]
        for count in sorted(counts):
            row = found[str(count)] = {name: Shared() for name in crews}
            for number in range(rounds + 1):
                for name, crew in crews.items():
                    at = sum(child.call("received") for child in crew)
                    taken = once(crew[:count], OURS)
                    row[name].received = sum(child.call("received") for child in crew) - at
                    if number:  # the first is not counted
                        row[name].seconds.append(taken)
            for name, crew in crews.items():
                row[name].from_shard = row[name].received if name == DIRECT else once_received
                grown = [child.call("memory") - was for child, was in zip(crew[:count], before[name], strict=False)]
                row[name].memory = int(statistics.median(grown))
    return found


def shared_table(found: dict[str, dict[str, Shared]]) -> list[str]:
    """Lines of Markdown."""
    lines = ["| readers | from | seconds | left the shard | received by readers | memory of a reader |"]
    lines.append("|--:|---|--:|--:|--:|--:|")
    for count, row in found.items():
        for name, one in row.items():
            sizes = " | ".join(f"{each / 1e6:.0f} MB" for each in (one.from_shard, one.received, one.memory))
            lines.append(f"| {count} | {name} | {statistics.median(one.seconds):.3f} | {sizes} |")
    return lines


@contextmanager
def downloader(url: str) -> Iterator[Loop]:
    """The role of a reader of a file over HTTP."""
    kept: list[object] = [None]

    def read() -> None:
        with urllib.request.urlopen(url) as reply:
            kept[0] = safetensors.torch.load(reply.read())

    yield Loop({HTTP: read})


@contextmanager
def served(nbytes: int) -> Iterator[str]:
    """``python -m http.server`` with a file; its URL."""
    with tempfile.TemporaryDirectory(prefix="ps-bench-") as folder, socket.socket() as probe:
        safetensors.torch.save_file(
            {f"t{i}": torch.randn(nbytes // 4 // TENSORS) for i in range(TENSORS)}, Path(folder) / "model.safetensors"
        )
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        command = [sys.executable, "-m", "http.server", str(port), "--bind", "127.0.0.1", "--directory", folder]
        server = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, preexec_fn=end_with_parent
        )
        try:
            deadline = time.monotonic() + 60
            while time.monotonic() < deadline:
                with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
                    break
                time.sleep(0.05)
            yield f"http://127.0.0.1:{port}/model.safetensors"
        finally:
            server.kill()
            server.wait()


def once(children: Sequence[Child], operation: str) -> float:
    """Seconds until all of ``children`` have it."""
    for child in children:
        child.begin("run", operation, 1)
    return max(child.answer()[0] for child in children)


def storage(stack: ExitStack, durability: str) -> list[str]:
    """Options of a shard that keeps its versions in files, or in memory."""
    if durability == "memory":
        return []
    folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="ps-bench-"))
    return ["--data-dir", folder, "--durability", durability]


def measure(
    nbytes: int, counts: Sequence[int], rounds: int, durability: str = "memory"
) -> dict[str, dict[str, list[float]]]:
    """By number of readers and system: seconds of each round."""
    found: dict[str, dict[str, list[float]]] = {}
    with ExitStack() as stack:
        address = stack.enter_context(running_cluster(options=storage(stack, durability))).address
        url = stack.enter_context(served(nbytes))
        trainer = stack.enter_context(Child(published, address, nbytes))
        trainer.ready()
        place = torch_rpc.Place(
            *torch_rpc.ROUTES[RPC], f"file://{stack.enter_context(tempfile.TemporaryDirectory())}/s", max(counts) + 1
        )
        holder = stack.enter_context(Child(torch_rpc.server, place, nbytes, TENSORS))
        crews = {
            OURS: [stack.enter_context(Child(subscriber, address)) for _ in range(max(counts))],
            HTTP: [stack.enter_context(Child(downloader, url)) for _ in range(max(counts))],
            RPC: [
                stack.enter_context(Child(torch_rpc.worker, place, rank, nbytes, TENSORS))
                for rank in range(max(counts))
            ],
        }
        for child in (holder, *(child for crew in crews.values() for child in crew)):
            child.ready()
        operations = {OURS: OURS, HTTP: HTTP, RPC: torch_rpc.PULL}
        # TensorPipe polls without sleeping: it is stopped while others are timed.
        for child in (holder, *crews[RPC]):
            child.rest()
        for count in counts:
            times = found[str(count)] = {name: [] for name in crews}
            for number in range(rounds + 1):
                for name, crew in crews.items():
                    polling = (holder, *crew[:count]) if name == RPC else ()
                    for child in polling:
                        child.wake()
                    taken = once(crew[:count], operations[name])
                    for child in polling:
                        child.rest()
                    if number:  # the first is not counted
                        times[name].append(taken)
        for child in (holder, *crews[RPC]):
            child.wake()
    return found


def table(found: dict[str, dict[str, list[float]]], nbytes: int) -> list[str]:
    """Lines of Markdown, and whether what is asked for is reached."""
    names = [OURS, HTTP, RPC]
    lines = [f"| readers | {' | '.join(names)} | times as fast as the faster |", "|--:|--:|--:|--:|--:|"]
    for count, times in found.items():
        medians = [statistics.median(times[name]) for name in names]
        ratio = min(medians[1:]) / medians[0]
        cells = " | ".join(f"{each:.3f} s, {int(count) * nbytes / each / 1e9:.2f} GB/s" for each in medians)
        lines.append(
            f"| {count} | {cells} | {ratio:.2f}, asked ≥ {ASKED}: {'reached' if ratio >= ASKED else 'not reached'} |"
        )
    return lines


@click.command()
@click.option("--mb", type=click.IntRange(1), default=100, show_default=True, help="Of the model.")
@click.option("--readers", default="1,4,8", show_default=True, help="How many, separated by commas.")
@click.option("--rounds", type=click.IntRange(1), default=9, show_default=True)
@click.option("--blocks", type=click.IntRange(1), default=15, show_default=True, help="Of ten steps, with and without.")
@click.option(
    "--durability",
    type=click.Choice(["memory", "snapshot", "durable"]),
    default="memory",
    show_default=True,
    help="Of the shard, whose versions are in memory or in files.",
)
@click.option("--output", type=click.Path(dir_okay=False, path_type=Path), default=RESULTS, help="JSON of everything.")
def main(mb: int, readers: str, rounds: int, blocks: int, durability: str, output: Path) -> None:
    """Time whole weights to several readers; print a table in Markdown, keep it as JSON."""
    nbytes = mb * 1_000_000
    found = measure(nbytes, [int(each) for each in readers.split(",")], rounds, durability)
    click.echo(f"{', '.join(report.machine().values())}; load {os.getloadavg()[0]:.1f} at the end\n")
    click.echo("\n".join(table(found, nbytes)))
    taken = {}
    for beside in ("no reader", "a reader of this host"):
        taken[beside] = shares(nbytes, blocks, durability, read=beside != "no reader")
        share = statistics.median(taken[beside])
        reached = "reached" if share <= ASKED_SHARE else "not reached"
        click.echo(
            f"\na version every {STEPS} steps beside {beside}: {share:.1%} more time, "
            f"asked ≤ {ASKED_SHARE:.0%}: {reached}"
        )
    shared = behind_relay(nbytes, [int(each) for each in readers.split(",")], rounds)
    click.echo("\n" + "\n".join(shared_table(shared)))
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(
        json.dumps(
            {
                "machine": report.machine(),
                "bytes": nbytes,
                "seconds": found,
                "publishing": taken,
                "relay": {count: {name: asdict(one) for name, one in row.items()} for count, row in shared.items()},
            },
            indent=1,
        )
        + "\n"
    )


if __name__ == "__main__":
    main()
