"""ps-run --hosts over a real sshd, real servers: whole trainings, killed, stopped, interrupted. 90 s of CPU (long)."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.cli.launcher.hosts.sshd import Sshd, no_sshd
from tests.cli.launcher.jobs import ROOT, SCRIPTS, wait_until
from tests.recovery.scripts import ENTRIES

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(600),
    pytest.mark.skipif(bool(no_sshd()), reason=no_sshd() or "sshd is here"),
]

RUN_SECONDS = 300
STEPS, GATE, LIVES = 60, 40, 4

#: Each process has a row of its own in the ledger, and says after each step how many have been answered.
TRAIN = f"""
import json, pathlib, time
import torch, ps_worker
from tests.recovery.scripts import Ledger

with ps_worker.connect(device="cpu") as cluster:
    rank = cluster.rank
    life = len(list(pathlib.Path().glob(f"answered-{{rank}}-*")))
    answered = pathlib.Path(f"answered-{{rank}}-{{life}}")
    answered.touch()
    ledger = Ledger()
    optimizer = cluster.optimizer(torch.optim.SGD, ledger, lr=1.0, name="ledger")
    print("began at", optimizer.version, flush=True)
    for step in range({STEPS}):
        while step == {GATE} and not pathlib.Path("go").exists():
            time.sleep(0.02)
        ledger.mark({LIVES} * rank + life, step)
        optimizer.step()
        with answered.open("a") as file:
            file.write(".")
    cluster.barrier()
    optimizer.pull()
    if rank == 0:
        print("ledger", json.dumps([counts.detach().tolist() for counts in ledger.counts]), flush=True)
"""


@pytest.fixture(scope="module")
def sshd(tmp_path_factory) -> Iterator[Sshd]:
    started = Sshd(tmp_path_factory.mktemp("sshd"))
    yield started
    started.close()


class HostsJob:
    """One ps-run of two hosts in ``folder``: coordinator, shard 0 and worker 0 on h0, the rest on h1."""

    def __init__(self, folder: Path, sshd: Sshd, *flags: str) -> None:
        self.folder = folder
        (folder / "train.py").write_text(TRAIN)
        program = str(SCRIPTS / "impatient_ps_run.py")
        command = [sys.executable, program, "--hosts", "h0:1,h1:2", "--ssh", sshd.command]
        command += ["-x", "PYTHONPATH", "-x", "OMP_NUM_THREADS=1", "--no-progress", "--shards", "2", *flags, "train.py"]
        paths = os.pathsep.join((str(ROOT), str(ROOT / "protos")))
        self._out = (folder / "out").open("w+")
        self.process = subprocess.Popen(
            command, cwd=folder, env={**os.environ, "PYTHONPATH": paths}, stdout=self._out, stderr=subprocess.STDOUT
        )

    def output(self) -> str:
        self._out.seek(0)
        return self._out.read()

    def answered(self, rank: int, life: int = 0) -> int:
        """Steps of this worker's process that have been answered."""
        with suppress(FileNotFoundError):
            return len((self.folder / f"answered-{rank}-{life}").read_text())
        return 0

    def trains(self, *ranks: int, life: int = 0) -> None:
        def all_do() -> bool:
            assert self.process.poll() is None, self.output()
            return all(self.answered(rank, life) > 5 for rank in ranks)

        # Servers and scripts import torch first, all at once.
        for _ in range(4):
            with suppress(AssertionError):
                return wait_until(all_do, "the workers train")
        return wait_until(all_do, f"the workers train: {self.output()}")

    def processes(self) -> list[psutil.Process]:
        """Whatever runs in the folder of the job, on either host."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.cwd() == str(self.folder) and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def kill(self, *words: str) -> None:
        """The one process with these words on its command line."""
        (victim,) = [each for each in self.processes() if set(words) <= set(each.cmdline())]
        victim.kill()

    def kill_worker(self, rank: int) -> None:
        """Its first process."""
        (victim,) = [each for each in self.processes() if each.environ().get("PS_RANK") == str(rank)]
        victim.kill()

    def stop_worker(self, rank: int) -> None:
        """Its first process stands still."""
        (victim,) = [each for each in self.processes() if each.environ().get("PS_RANK") == str(rank)]
        victim.suspend()

    def ends(self) -> int:
        return self.process.wait(RUN_SECONDS)

    def leaves_nothing(self) -> None:
        wait_until(lambda: not self.processes(), "nothing of the job is left")

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            self.process.wait(RUN_SECONDS)
        self._out.close()


@pytest.fixture
def start(sshd, tmp_path):
    jobs: list[HostsJob] = []

    def start(*flags: str) -> HostsJob:
        jobs.append(HostsJob(tmp_path, sshd, *flags))
        return jobs[-1]

    yield start
    for job in jobs:
        job.close()


def test_a_shard_and_a_worker_are_killed_on_their_host_and_the_job_ends_with_every_push_counted(start):
    job = start("--data-dir", "kept", "--restart-workers", "1")
    job.trains(0, 1, 2)
    job.kill("ps_server.shard.main", "127.0.0.2")
    job.kill_worker(2)
    job.trains(2, life=1)
    (job.folder / "go").touch()
    assert job.ends() == 0, job.output()
    assert re.search(r"shard 1 was killed by signal 9 .*; starting it again \(restart 1 of", job.output())
    assert re.search(r"worker 2 was killed by signal 9 .*; starting it again \(restart 1 of 1\)", job.output())
    counted = json.loads(re.findall(r"worker 0    \| ledger (.*)", job.output())[0])
    heard = job.answered(2)
    for variable in counted:
        rows = {number: row for number, row in enumerate(variable) if any(row)}
        killed = rows.pop(2 * LIVES)
        assert set(rows) == {0, LIVES, 2 * LIVES + 1}
        for row in rows.values():
            assert row == [1.0] * STEPS + [0.0] * (ENTRIES - STEPS)
        # The one that was under way when it died counts once or not at all.
        assert killed[:heard] == [1.0] * heard
        assert killed[heard] in (0.0, 1.0)
        assert not any(killed[heard + 1 :])
    job.leaves_nothing()


def test_a_worker_that_stands_still_is_killed_on_its_host_and_started_again(start):
    job = start("--restart-workers", "1", "--lease-seconds", "10")
    job.trains(0, 1, 2)
    job.stop_worker(2)
    job.trains(2, life=1)
    (job.folder / "go").touch()
    assert job.ends() == 0, job.output()
    assert "worker 2 runs and is lost to the coordinator; it is killed" in job.output()
    assert re.search(r"worker 2 was killed by signal 9 .*; starting it again \(restart 1 of 1\)", job.output())
    job.leaves_nothing()


def test_after_ctrl_c_nothing_is_left_and_the_same_command_goes_on(start):
    job = start("--data-dir", "kept")
    job.trains(0, 1, 2)
    job.process.send_signal(signal.SIGINT)
    assert job.ends() == 130, job.output()
    job.leaves_nothing()
    seen = sum(job.answered(rank) for rank in range(3))
    (job.folder / "go").touch()
    again = start("--data-dir", "kept")
    assert again.ends() == 0, again.output()
    assert "continuing from the state in h0:" in again.output()
    assert min(int(version) for version in re.findall(r"began at (\d+)", again.output())) >= seen
    counted = json.loads(re.findall(r"worker 0    \| ledger (.*)", again.output())[0])
    for variable in counted:
        for rank in range(3):
            assert variable[LIVES * rank][: job.answered(rank)] == [1.0] * job.answered(rank)
            assert variable[LIVES * rank + 1] == [1.0] * STEPS + [0.0] * (ENTRIES - STEPS)
    again.leaves_nothing()
