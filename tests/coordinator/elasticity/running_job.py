"""A job of ps-run that counts each push, and whose shard 1 is slower than shard 0. As a program it prints what happens:

python -m tests.coordinator.elasticity.running_job SECONDS
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from ps_protocol.client.coordinator import CoordinatorClient
from ps_protocol.cluster.view import MemberStatus, Role
from ps_protocol.errors import PsError
from tests.cli.launcher.jobs import ROOT, SCRIPTS

SLOWER = ("--shards", "2", "--workers", "4", "--rebalance", "--lease-seconds", "60", "--threads", "1")
"""Of a job in which pushes wait at shard 1: with 40 variables of SIZE elements, and PAUSE seconds between pushes."""

SIZE, PAUSE = 50_000, 0.3

LIMIT_SECONDS = 500.0

#: Each push adds 1 to every parameter. Workers train until the test says "go", and note each push that was answered.
TRAIN = """
import os, pathlib, sys, time
import torch, ps_worker

from tests.coordinator.elasticity.slowed_sgd import SlowedSgd

size, pause = int(sys.argv[1]), float(sys.argv[2])
with ps_worker.connect(device="cpu") as cluster:
    ones = [torch.nn.Parameter(torch.zeros(size)) for _ in range(40)]
    optimizer = cluster.optimizer(SlowedSgd, ones, lr=1.0)
    for each in ones:
        each.grad = torch.full_like(each, -1.0)
    with open(f"answered-{cluster.rank}-{os.getpid()}", "ab", buffering=0) as answered:
        while not pathlib.Path("go").exists():
            optimizer.step()
            answered.write(b".")
            time.sleep(pause)
    cluster.barrier()
    optimizer.pull()
    if cluster.rank == 0:
        least, most = min(each.min() for each in ones), max(each.max() for each in ones)
        print("counted", int(least), int(most), optimizer.version, flush=True)
"""


class RunningJob:
    """One ps-run in ``folder``."""

    def __init__(self, folder: Path, flags: list[str], arguments: list[str]) -> None:
        self.folder = folder
        (folder / "train.py").write_text(TRAIN)
        program = [sys.executable, str(SCRIPTS / "impatient_ps_run.py"), "--no-progress", *flags]
        program += ["--optimizers", "tests.coordinator.elasticity.slowed_sgd"]
        paths = os.pathsep.join((str(ROOT), str(ROOT / "protos")))
        with (folder / "out").open("wb") as out:
            self.process = subprocess.Popen(
                [*program, "train.py", *arguments],
                cwd=folder,
                env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
                stdout=out,
                stderr=subprocess.STDOUT,
            )
        self._pause = threading.Event()

    def output(self) -> str:
        return (self.folder / "out").read_text()

    def waits_until(self, true: Callable[[], object], what: str) -> None:
        for _ in range(int(LIMIT_SECONDS / 0.5)):
            if true():
                return
            assert self.process.poll() is None, self.output()
            self._pause.wait(0.5)
        raise AssertionError(f"not within {LIMIT_SECONDS:.0f} s: {what}\n{self.output()}")

    @property
    def address(self) -> str:
        """host:port of the coordinator; of nobody before it serves."""
        found = re.search(r"coordinator at (\S+): ", self.output())
        return found[1] if found else "127.0.0.1:1"

    def members(self, role: Role) -> dict[int, MemberStatus]:
        """Those that live, by number; none while the coordinator does not answer."""
        with suppress(PsError):
            with CoordinatorClient(self.address) as client:
                status = client.get_status(10.0)
            return {each.member.index: each for each in status.members if each.member.role is role and not each.gone}
        return {}

    def decisions(self) -> list[str]:
        """What the coordinator has told of what it decides."""
        with CoordinatorClient(self.address) as client:
            return [event.text for event in client.get_status(10.0).decisions]

    def answered(self, rank: int | str = "*") -> int:
        """How many pushes of this worker were answered, in all its lives."""
        return sum(path.stat().st_size for path in self.folder.glob(f"answered-{rank}-*"))

    def ends(self) -> tuple[int, int, int]:
        """The least and the greatest parameter, and the version."""
        (self.folder / "go").touch()
        assert self.process.wait(LIMIT_SECONDS) == 0, self.output()
        found = re.search(r"counted (\d+) (\d+) (\d+)", self.output())
        assert found, self.output()
        return int(found[1]), int(found[2]), int(found[3])

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


@contextmanager
def running(folder: Path, *flags: str, size: int, pause: float) -> Iterator[RunningJob]:
    job = RunningJob(folder, list(flags), [str(size), str(pause)])
    try:
        yield job
    finally:
        job.close()


def main() -> None:
    """Prints the speed, and what waits and is held, every ten seconds."""
    with TemporaryDirectory() as folder, running(Path(folder), *SLOWER, size=SIZE, pause=PAUSE) as job:
        job.waits_until(lambda: all(job.answered(rank) for rank in range(4)), "all workers train")
        began, before, answered = time.monotonic(), time.monotonic(), job.answered()
        while time.monotonic() - began < float(sys.argv[1]):
            time.sleep(10.0)
            now, count = time.monotonic(), job.answered()
            shards = [entry.stats for _, entry in sorted(job.members(Role.SHARD).items())]
            held = ", ".join(f"{each.held_bytes / 1e6:.1f} MB and {each.queued_pushes:.1f} wait" for each in shards)
            print(f"{now - began:5.0f} s: {(count - answered) / (now - before):.1f} pushes/s; {held}", flush=True)
            before, answered = now, count
        print("\n".join(job.decisions()))
        print("least, most, version:", job.ends(), "answered:", job.answered())


if __name__ == "__main__":
    main()
