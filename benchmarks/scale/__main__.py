"""What the coordinator costs with many members, and how soon all of them know of a change.

python -m benchmarks.scale --members 100 500 1000 2000
python -m benchmarks.scale --streams 100 500 1000      # what a shard costs with many step streams

The members are connections over gRPC that join, send heartbeats as often as the coordinator asks for and watch the
view; they do nothing else, and share the machine with the coordinator. CPU is that of the coordinator's process, from
the kernel's clock.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import psutil

from benchmarks.cluster import running_cluster
from benchmarks.page import start
from benchmarks.processes import Child
from benchmarks.scale.members import members
from benchmarks.scale.streams import declare, streams
from ps_protocol.client.coordinator import CoordinatorClient
from ps_protocol.model.spec import Consistency, Mode

BEAT_SECONDS = 1.0
SETTLE_SECONDS = 3.0
COLUMNS = (
    "members",
    "heartbeats: CPU of a core",
    "a second",
    "per heartbeat",
    "resident memory",
    "per member",
    "a change: CPU",
    "half know",
    "all know",
    "all join: CPU",
    "time",
    "calls repeated",
)


STREAM_COLUMNS = (
    "streams",
    "all open: CPU",
    "resident memory",
    "per stream",
    "idle: CPU of a core",
    "per stream and second",
    "steps/s",
    "CPU of a core",
    "per step",
)
MODEL_BYTES = 10 * 1024
LONG_LEASE = ("--lease-seconds", "3600")


class Measured:
    """CPU and memory of one process."""

    def __init__(self, pid: int) -> None:
        self._process = psutil.Process(pid)

    @property
    def cpu(self) -> float:
        """Seconds used so far."""
        return float(sum(self._process.cpu_times()[:2]))

    @property
    def memory(self) -> float:
        """Resident MB."""
        return float(self._process.memory_info().rss / 1e6)


def row(count: int, processes: int, seconds: float, changes: int, options: Sequence[str]) -> str:
    """One line of the table, for ``count`` members in ``processes`` processes."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        coordinator, address = start(
            folder, False, ["--shards", "1", "--mode", "async", "--log-level", "error", *options]
        )
        stack.callback(coordinator.wait)
        stack.callback(coordinator.terminate)
        client = stack.enter_context(CoordinatorClient(address))
        stack.enter_context(Child(members, address, 1, 0, BEAT_SECONDS, True)).ready()
        server = Measured(coordinator.pid)
        alone, cpu, began = server.memory, server.cpu, time.monotonic()
        share = -(-count // processes)
        children = []
        for first in range(0, count, share):
            arguments = (address, min(share, count - first), first, BEAT_SECONDS, False)
            children.append(stack.enter_context(Child(members, *arguments)))
        for child in children:
            child.ready()
        while len((view := client.get_status().view).members) < count + 1:
            for child in children:
                child.call("check")
            time.sleep(0.5)
        for child in children:
            child.call("wait", view.revision)
        joined, joining = time.monotonic() - began, server.cpu - cpu
        time.sleep(SETTLE_SECONDS)
        cpu, beats, began = server.cpu, sum(child.call("beats") for child in children), time.monotonic()
        time.sleep(seconds)
        beating, memory = server.cpu - cpu, server.memory
        beats = sum(child.call("beats") for child in children) - beats
        seconds = time.monotonic() - began
        cpu, known = server.cpu, []
        began = time.monotonic()
        for bound in range(1, changes + 1):
            changed = time.monotonic()
            revision = client.set_consistency(Consistency(Mode.SSP, bound)).revision
            known.append(sorted(at - changed for child in children for at in child.call("wait", revision)))
        breaks = sum(child.call("check") for child in children)
        change = (server.cpu - cpu - beating / seconds * (time.monotonic() - began)) / changes
    cells = [
        f"{count:,}",
        f"{beating / seconds:.1%}",
        f"{beats / seconds:.0f}",
        f"{beating / max(1, beats) * 1e6:.0f} µs",
        f"{memory:.0f} MB",
        f"{(memory - alone) / count * 1e3:.0f} KB",
        f"{change * 1e3:.0f} ms",
        f"{statistics.median(at[len(at) // 2] for at in known) * 1e3:.0f} ms",
        f"{statistics.median(at[-1] for at in known) * 1e3:.0f} ms",
        f"{joining:.1f} s",
        f"{joined:.1f} s",
        f"{breaks}",
    ]
    return "| " + " | ".join(cells) + " |"


def stream_row(count: int, processes: int, seconds: float, every: float) -> str:
    """One line of the table of ``count`` streams to one shard; each makes a step in ``every`` seconds."""
    with ExitStack() as stack:
        cluster = stack.enter_context(running_cluster(workers=0, coordinator_options=LONG_LEASE))
        shard, epoch = declare(cluster.address, MODEL_BYTES)
        server, share = Measured(cluster.shards[0]), -(-count // processes)
        time.sleep(SETTLE_SECONDS)
        alone, cpu = server.memory, server.cpu
        time.sleep(seconds)
        resting = (server.cpu - cpu) / seconds
        cpu, children = server.cpu, []
        for first in range(0, count, share):
            sizes = (min(share, count - first), first + 1, MODEL_BYTES)
            children.append(stack.enter_context(Child(streams, (cluster.address, shard), epoch, *sizes)))
        for child in children:
            child.ready()
        while sum(child.call("opened") for child in children) < count:
            time.sleep(0.5)
        opening = server.cpu - cpu
        time.sleep(SETTLE_SECONDS)
        cpu = server.cpu
        time.sleep(seconds)
        idle = (server.cpu - cpu) / seconds
        for child in children:
            child.call("step_every", every)
        time.sleep(max(SETTLE_SECONDS, 2 * every))
        cpu, steps, began = server.cpu, sum(child.call("steps") for child in children), time.monotonic()
        time.sleep(seconds)
        stepping, memory = server.cpu - cpu, server.memory
        steps, took = sum(child.call("steps") for child in children) - steps, time.monotonic() - began
    cells = [
        f"{count:,}",
        f"{opening:.1f} s",
        f"{memory:.0f} MB",
        f"{(memory - alone) / count * 1e3:.0f} KB",
        f"{idle:.1%}",
        f"{(idle - resting) / count * 1e6:.0f} µs",
        f"{steps / took:,.0f}",
        f"{stepping / took:.0%}",
        f"{(stepping - idle * took) / steps * 1e6:.0f} µs",
    ]
    return "| " + " | ".join(cells) + " |"


def heading(columns: Sequence[str]) -> None:
    """Print the first two lines of a table."""
    print("| " + " | ".join(columns) + " |", "|--:" * len(columns) + "|", sep="\n")


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and print one row per number of members."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--members", type=int, nargs="+", default=[100, 500, 1000, 2000])
    parser.add_argument("--streams", type=int, nargs="+", help="step streams to one shard, instead of members")
    parser.add_argument("--step-seconds", type=float, default=1.0, help="each stream makes a step in this time")
    parser.add_argument("--processes", type=int, default=2, help="that hold the members")
    parser.add_argument("--seconds", type=float, default=15.0, help="time in which heartbeats are measured")
    parser.add_argument("--changes", type=int, default=5, help="changes of the view that are measured")
    options, passed = parser.parse_known_args(arguments)
    if options.streams:
        heading(STREAM_COLUMNS)
        for count in options.streams:
            print(stream_row(count, options.processes, options.seconds, options.step_seconds), flush=True)
        return
    heading(COLUMNS)
    for count in options.members:
        print(row(count, options.processes, options.seconds, options.changes, passed), flush=True)


if __name__ == "__main__":
    sys.exit(main())
