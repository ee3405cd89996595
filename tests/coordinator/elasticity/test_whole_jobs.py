"""A whole job of ps-run of which a worker is stopped: another one comes, and every push counts. 18 s of CPU; long."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from ps_protocol.client.coordinator import CoordinatorClient
from ps_protocol.cluster.view import MemberStatus, Role
from ps_protocol.errors import PsError
from tests.cli.launcher.jobs import ROOT, SCRIPTS

pytestmark = [pytest.mark.long, pytest.mark.timeout(1200)]

LIMIT_SECONDS = 500.0

#: Each push adds 1 to every parameter. Workers train until the test says "go", and note each push that was answered.
TRAIN = """
import os, pathlib, sys, time
import torch, ps_worker

size, pause = int(sys.argv[1]), float(sys.argv[2])
with ps_worker.connect(device="cpu") as cluster:
    ones = torch.nn.Parameter(torch.zeros(size))
    optimizer = cluster.optimizer(torch.optim.SGD, [ones], lr=1.0)
    with open(f"answered-{cluster.rank}-{os.getpid()}", "ab", buffering=0) as answered:
        while not pathlib.Path("go").exists():
            ones.grad = torch.full_like(ones, -1.0)
            optimizer.step()
            answered.write(b".")
            time.sleep(pause)
    cluster.barrier()
    optimizer.pull()
    if cluster.rank == 0:
        print("counted", *map(int, (ones.min(), ones.max(), optimizer.version)), flush=True)
"""


class RunningJob:
    """One ps-run in ``folder``."""

    def __init__(self, folder: Path, flags: list[str], arguments: list[str]) -> None:
        self.folder = folder
        (folder / "train.py").write_text(TRAIN)
        program = [sys.executable, str(SCRIPTS / "impatient_ps_run.py"), "--no-progress", *flags]
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

    def members(self, role: Role) -> dict[int, MemberStatus]:
        """Those that live, by number; none while the coordinator does not answer."""
        found = re.search(r"coordinator at (\S+): ", self.output())
        with suppress(PsError):
            with CoordinatorClient(found[1] if found else "127.0.0.1:1") as client:
                status = client.get_status(10.0)
            return {each.member.index: each for each in status.members if each.member.role is role and not each.gone}
        return {}

    def decisions(self) -> list[str]:
        """What the coordinator has told of what it decides."""
        found = re.search(r"coordinator at (\S+): ", self.output())
        with CoordinatorClient(found[1] if found else "") as client:
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


def test_a_worker_that_stands_still_is_replaced_and_every_push_counts(tmp_path: Path) -> None:
    flags = ("--workers", "2", "--restart-workers", "1", "--lease-seconds", "10")
    with running(tmp_path, *flags, size=1000, pause=0.05) as job:
        job.waits_until(lambda: job.answered(0) > 5 and job.answered(1) > 5, "both workers train")
        first = job.members(Role.WORKER)[1].pid
        os.kill(first, signal.SIGSTOP)
        job.waits_until(lambda: len([*tmp_path.glob("answered-1-*")]) == 2, "another worker 1 has joined")
        job.waits_until(lambda: job.members(Role.WORKER)[1].stats.steps > 5, "it trains")
        told = job.decisions()
        assert "1 of 2 workers are there, lost: 1" in told
        assert "workers were asked for: request 1, of the program that starts them" in told
        least, most, version = job.ends()
    assert "worker 1 runs and is lost to the coordinator; it is killed" in job.output()
    assert not psutil.pid_exists(first)
    assert least == most == version
    # The push that was under way when it stopped counts or does not.
    assert version - job.answered() in (0, 1)
