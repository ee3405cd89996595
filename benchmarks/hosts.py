"""Steps of several workers of one host over a network that is really slow, each by itself and together.

``python -m benchmarks.hosts`` makes two network namespaces with a link between them, runs the servers in one and the
workers in the other, and removes both; it needs root, ``ip`` and ``tc``. Where there are two machines, run its
``server``, with certificates or PS_INSECURE=1, on one and its ``workers`` on the other.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import click
import torch

import ps_worker
from benchmarks import report
from benchmarks.cluster import running_cluster
from benchmarks.ours import Flat
from benchmarks.processes import end_with_parent
from benchmarks.rows import MB, size
from ps_worker.rows import SGD

_NAMES = {False: "each by itself", True: "together"}
_SERVERS, _WORKERS = "ps-bench-servers", "ps-bench-workers"
_ADDRESSES = {_SERVERS: "10.79.0.1", _WORKERS: "10.79.0.2"}

_sizes = [
    click.option("--workers", type=click.IntRange(1), default=4, show_default=True),
    click.option("--nbytes", type=click.IntRange(4), default=100 * MB, show_default=True, help="Bytes of parameters."),
    click.option(
        "--rows",
        type=click.IntRange(0),
        default=0,
        show_default=True,
        help="Rows of 64 numbers of a table, which every worker uses in each step.",
    ),
    click.option("--steps", type=click.IntRange(1), default=4, show_default=True, help="Steps that are timed."),
]


def _sized(command: click.decorators.FC) -> click.decorators.FC:
    for option in reversed(_sizes):
        command = option(command)
    return command


@click.group(invoke_without_command=True)
@click.option("--mbit", type=click.IntRange(1), default=1000, show_default=True, help="Of the link, each way.")
@click.option("--rounds", type=click.IntRange(1), default=3, show_default=True)
@click.option("--mode", type=click.Choice(["sync", "async"]), default="sync", show_default=True)
@click.option("--output", type=click.Path(dir_okay=False, path_type=Path), default=None, help="Write JSON here.")
@_sized
@click.pass_context
def main(
    context: click.Context,
    mbit: int,
    rounds: int,
    mode: str,
    output: Path | None,
    workers: int,
    nbytes: int,
    rows: int,
    steps: int,
) -> None:
    """Compare a step of workers of one host that push by themselves with one that they push together."""
    if context.invoked_subcommand is not None:
        return
    found: dict[bool, list[dict[str, float]]] = {False: [], True: []}
    with _link(mbit):
        for _ in range(rounds):
            for per_host, taken in found.items():
                taken.append(_visit(workers, nbytes, rows, steps, mode, per_host=per_host))
    of_rows = f" and {rows:,} rows" if rows else ""
    click.echo(f"{workers} workers, {size(nbytes)}{of_rows}, {mode}, {mbit} Mbit/s; medians of {rounds} rounds")
    for per_host, taken in found.items():
        seconds, sent, received = (statistics.median(each[name] for each in taken) for name in taken[0])
        click.echo(
            f"{_NAMES[per_host]}: {seconds:.3g} s per step, {sent / MB:.4g} MB sent, {received / MB:.4g} MB received"
        )
    ratios = [one["seconds"] / other["seconds"] for one, other in zip(found[False], found[True], strict=True)]
    click.echo(f"together: {statistics.median(ratios):.2f} times faster ({min(ratios):.2f} - {max(ratios):.2f})")
    if output:
        kept = {_NAMES[per_host]: taken for per_host, taken in found.items()}
        output.write_text(
            json.dumps({"machine": report.machine(), "bytes": nbytes, "ids": rows, "rows": kept}, indent=2) + "\n"
        )


@main.command()
@click.option("--bind", required=True, help="Address on the servers' side of the link.")
@click.option("--workers", type=click.IntRange(1), default=4, show_default=True)
@click.option("--mode", type=click.Choice(["sync", "async"]), default="sync", show_default=True)
def server(bind: str, workers: int, mode: str) -> None:
    """Run a coordinator and a shard, say the coordinator's address, and stay until Ctrl-C or SIGTERM."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with running_cluster(1, workers, bind=bind, mode=("--mode", mode)) as cluster:
        click.echo(cluster.address)
        try:
            signal.pause()
        except KeyboardInterrupt:
            return


@main.command()
@click.option("--coordinator", required=True, help="What the server said.")
@click.option("--per-host/--no-per-host", default=True, show_default=True)
@_sized
def workers(coordinator: str, per_host: bool, workers: int, nbytes: int, rows: int, steps: int) -> None:
    """Run the workers of one host, and say how long a step took and how many bytes went over the network."""
    command = [sys.executable, "-m", "benchmarks.hosts", "worker", "--coordinator", coordinator]
    command += ["--nbytes", str(nbytes), "--rows", str(rows), "--steps", str(steps)]
    command.append("--per-host" if per_host else "--no-per-host")
    with ExitStack() as ends:
        started = [_started(ends, [*command, "--rank", str(rank)]) for rank in range(workers)]
        said = [process.communicate()[0] for process in started]
    if any(process.returncode for process in started):
        raise click.ClickException("a worker has failed")
    click.echo(said[0].strip())


@main.command(hidden=True)
@click.option("--coordinator", required=True)
@click.option("--per-host/--no-per-host", required=True)
@click.option("--rank", type=int, required=True)
@click.option("--nbytes", type=int, required=True)
@click.option("--rows", type=int, required=True)
@click.option("--steps", type=int, required=True)
def worker(coordinator: str, per_host: bool, rank: int, nbytes: int, rows: int, steps: int) -> None:
    """Be one of them."""
    torch.set_num_threads(1)
    # Two namespaces of one machine would find each other's shared memory.
    with ps_worker.connect(coordinator, rank=rank, device="cpu", transport="bulk", per_host=per_host) as cluster:
        model, ids = Flat(nbytes, 4), torch.arange(rows)
        table = cluster.embedding(64, name="rows", optimizer=SGD(lr=1e-6)) if rows else None
        optimizer = cluster.optimizer(
            torch.optim.SGD, torch.nn.ModuleList([model, table] if table is not None else [model]), lr=1e-6
        )
        model.set_gradients()

        def step() -> None:
            if table is not None:
                table(ids).sum().backward()
            optimizer.step()

        for _ in range(2):
            step()
        cluster.gather_values(rank)
        before, began = _network_bytes(), time.perf_counter()
        for _ in range(steps):
            step()
        cluster.gather_values(rank)
        seconds, after = (time.perf_counter() - began) / steps, _network_bytes()
    sent, received = ((end - begin) / steps for begin, end in zip(before, after, strict=True))
    click.echo(json.dumps({"seconds": seconds, "sent": sent, "received": received}))


def _visit(workers: int, nbytes: int, rows: int, steps: int, mode: str, *, per_host: bool) -> dict[str, float]:
    """What one job takes per step; it starts and ends here."""
    program = [sys.executable, "-m", "benchmarks.hosts"]
    with ExitStack() as ends:
        # Nobody else is on this link.
        insecure = ["env", "PS_INSECURE=1"]
        of_server = ["server", "--bind", _ADDRESSES[_SERVERS], "--workers", str(workers), "--mode", mode]
        servers = _started(ends, [*_inside(_SERVERS), *insecure, *program, *of_server])
        assert servers.stdout is not None
        address = servers.stdout.readline().strip()
        sizes = ["--workers", str(workers), "--nbytes", str(nbytes), "--rows", str(rows), "--steps", str(steps)]
        host = "--per-host" if per_host else "--no-per-host"
        of_workers = ["workers", "--coordinator", address, host, *sizes]
        said = _started(ends, [*_inside(_WORKERS), *program, *of_workers]).communicate()[0]
    if not said.strip():
        raise click.ClickException("the workers have failed")
    found: dict[str, float] = json.loads(said)
    return found


def _started(ends: ExitStack, command: Sequence[str]) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=dict(os.environ), preexec_fn=end_with_parent
    )

    def end() -> None:
        process.terminate()
        process.wait()

    ends.callback(end)
    return process


def _network_bytes() -> tuple[int, int]:
    """Sent and received by all interfaces but loopback."""
    sent = received = 0
    for line in Path("/proc/net/dev").read_text().splitlines()[2:]:
        name, _, numbers = line.partition(":")
        if name.strip() != "lo":
            received, sent = received + int(numbers.split()[0]), sent + int(numbers.split()[8])
    return sent, received


def _inside(namespace: str) -> list[str]:
    return ["ip", "netns", "exec", namespace]


@contextmanager
def _link(mbit: int) -> Iterator[None]:
    """Two namespaces with a link of this rate. Raises ClickException where that may not be."""
    if os.geteuid():
        raise click.ClickException("only root makes network namespaces; see --help for two machines")
    with ExitStack() as ends:
        for name in _ADDRESSES:
            _run("ip", "netns", "add", name)
            ends.callback(_run, "ip", "netns", "del", name)
        _run("ip", "link", "add", "eth0", "netns", _SERVERS, "type", "veth", "peer", "name", "eth0", "netns", _WORKERS)
        for name, address in _ADDRESSES.items():
            _run("ip", "-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
            for interface in ("lo", "eth0"):
                _run("ip", "-n", name, "link", "set", interface, "up")
            rate = ["rate", f"{mbit}mbit", "burst", str(16000 + 500 * mbit), "latency", "100ms"]
            _run("tc", "-n", name, "qdisc", "add", "dev", "eth0", "root", "tbf", *rate)
        yield


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise click.ClickException(f"{' '.join(command)}: {done.stderr.strip()}")


if __name__ == "__main__":
    main()
