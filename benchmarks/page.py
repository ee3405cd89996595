"""What the coordinator's page costs: CPU and memory of the coordinator with many simulated workers, and with viewers.

python -m benchmarks.page --workers 200 --viewers 1 4
python -m benchmarks.page --workers 200 --hold        # leaves it running, to look at
"""

from __future__ import annotations

import argparse
import math
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from contextlib import ExitStack
from pathlib import Path

import psutil

from ps_protocol.client.coordinator import CoordinatorClient
from ps_protocol.cluster.view import Joined, JoinRequest, LogCounts, MemberStats, Role, TableCounts
from ps_protocol.model.spec import DType, ModelSpec, Variable

BEAT_SECONDS = 1.0
THREADS = 8
SETTLE_SECONDS = 5.0


class SimulatedJob:
    """Members that only send heartbeats, from a few threads: their numbers are made up, and change with every beat."""

    def __init__(self, address: str, shards: int, workers: int) -> None:
        self._client = CoordinatorClient(address)
        self._stop = threading.Event()
        self._began = time.monotonic()
        joins = [JoinRequest(Role.SHARD, number, f"127.0.0.1:{7000 + number}") for number in range(shards)]
        joins += [JoinRequest(Role.WORKER, rank) for rank in range(workers)]
        self._members = [self._client.join(spec, f"{spec.role.value} {spec.index}") for spec in joins]
        self._client.declare_model(self._members[shards].member, _model())
        share = math.ceil(len(self._members) / THREADS)
        parts = [self._members[at : at + share] for at in range(0, len(self._members), share)]
        self._threads = [threading.Thread(target=self._beat, args=(part,), daemon=True) for part in parts]
        for thread in self._threads:
            thread.start()

    def _beat(self, members: list[Joined]) -> None:
        while not self._stop.wait(BEAT_SECONDS):
            passed = time.monotonic() - self._began
            for joined in members:
                self._client.heartbeat(joined.member, _stats(joined, passed))

    def close(self) -> None:
        """End the heartbeats."""
        if self._stop.is_set():
            return
        self._stop.set()
        for thread in self._threads:
            thread.join()
        self._client.close()


def _model() -> ModelSpec:
    shapes = [
        (50_000, 128),
        (1024, 512),
        (512, 512),
        (512, 256),
        (256, 256),
        (256, 64),
        (64, 10),
        (512,),
        (256,),
        (10,),
    ]
    variables = tuple(Variable(f"layer{at}.weight", shape, DType.FLOAT32) for at, shape in enumerate(shapes))
    return ModelSpec("model", "torch.optim.Adam", variables, ({"lr": 1e-3},))


def _stats(joined: Joined, passed: float) -> MemberStats:
    index = joined.member.index
    if joined.member.role is Role.SHARD:
        return MemberStats(
            steps=int(40 * passed),
            version=int(40 * passed),
            steps_per_second=40 + math.sin(passed + index),
            bytes_per_second=3e8,
            versions={"model": int(40 * passed)},
            streams={"bulk": 150, "shm": 50},
            held_bytes=6_900_000,
            log=LogCounts(int(40 * passed), int(4e6 * passed), int(4e6 * (passed % 60)), passed % 60),
            tables=(TableCounts("model", "ads", int(900 * passed), 12, int(58_000 * passed), int(900 * passed), 0, 0),),
        )
    slow = 0.4 if index == 17 else 1.0
    return MemberStats(
        steps=int(20 * passed * slow),
        steps_per_second=slow * (20 + math.sin(passed / 3 + index)),
        bytes_per_second=6e6,
        samples_per_second=slow * (640 + 30 * math.sin(passed + index)),
        staleness=int(3 + 2 * math.sin(passed + index)),
        metrics={"loss": 0.3 + 2.5 * math.exp(-passed / 40) + 0.05 * math.sin(passed * 3 + index), "lr": 1e-3},
        transport="bulk" if index % 4 else "shm",
        samples=int(640 * passed),
        clock=int(20 * passed * slow),
        wait_seconds={"pull": passed * 0.08, "bound": passed * (0.02 if slow < 1 else 0.3)},
    )


def watch(url: str, stop: threading.Event, read: list[int]) -> None:
    """One browser: read the page's events and count their bytes."""
    with urllib.request.urlopen(url + "events") as events:
        while not stop.is_set():
            read[0] += len(events.readline())


def measured(processes: list[psutil.Process], seconds: float) -> list[tuple[float, float]]:
    """Of each, CPU in percent of one core, and resident memory in MB, over the same ``seconds``."""
    before = [sum(each.cpu_times()[:2]) for each in processes]
    time.sleep(seconds)
    after = [sum(each.cpu_times()[:2]) for each in processes]
    cpu = [(end - begin) / seconds * 100 for begin, end in zip(before, after, strict=True)]
    return [(used, each.memory_info().rss / 1e6) for used, each in zip(cpu, processes, strict=True)]


def start(folder: Path, page: bool, arguments: list[str]) -> tuple[subprocess.Popen[bytes], str]:
    """A coordinator process and its address."""
    ready = folder / f"ready-{page}"
    command = [sys.executable, "-m", "ps_server.coordinator.main", "--port", "0", "--ready-file", str(ready)]
    command += ["--workers", "0", "--log-level", "warning", *(["--page-port", "0"] if page else []), *arguments]
    process = subprocess.Popen(command)
    while not ready.exists():
        if process.poll() is not None:
            raise SystemExit("the coordinator did not start")
        time.sleep(0.05)
    return process, ready.read_text().strip()


def main() -> None:
    """Measure, and print one row per number of viewers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=200)
    parser.add_argument("--shards", type=int, default=4)
    parser.add_argument("--viewers", type=int, nargs="*", default=[1, 4])
    parser.add_argument("--seconds", type=float, default=20.0, help="time of each measurement")
    parser.add_argument("--hold", action="store_true", help="leave the job running until Ctrl-C")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    sizes = ["--shards", str(options.shards), "--mode", "ssp", "--staleness", "400"]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        print(f"{options.workers} workers, {options.shards} shards, a heartbeat a second each")
        processes, address = {}, ""
        for page in (False, True):
            coordinator, address = start(folder, page, sizes)
            stack.callback(coordinator.wait)
            stack.callback(coordinator.terminate)
            processes[page] = psutil.Process(coordinator.pid)
            job = SimulatedJob(address, options.shards, options.workers)
            stack.callback(job.close)
        with CoordinatorClient(address) as client:
            url = client.get_history().configuration["page"]
        if options.hold:
            print(url)
            threading.Event().wait()
        time.sleep(SETTLE_SECONDS)
        for viewers in [0, *options.viewers]:
            stop, read = threading.Event(), [[0] for _ in range(viewers)]
            threads = [threading.Thread(target=watch, args=(url, stop, each), daemon=True) for each in read]
            for thread in threads:
                thread.start()
            time.sleep(SETTLE_SECONDS)
            before = sum(each[0] for each in read)
            # Both at the same time: what else the machine does is the same for both.
            (plain, plain_mb), (paged, paged_mb) = measured([processes[False], processes[True]], options.seconds)
            rate = (sum(each[0] for each in read) - before) / options.seconds / max(1, viewers) / 1e3
            print(
                f"no page {plain:5.1f} % of a core, {plain_mb:6.1f} MB; page with {viewers} viewer(s) {paged:5.1f} %, "
                f"{paged_mb:6.1f} MB, {rate:6.1f} kB/s each"
            )
            stop.set()
            for thread in threads:
                thread.join()


if __name__ == "__main__":
    main()
