"""Jobs of ps-run of which a worker is stopped, a shard is slower, or that are scaled: another worker comes, slices
move, and every push counts. At full length; 60 s of CPU.
"""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import psutil
import pytest
from click.testing import CliRunner

from ps_protocol.cluster.view import Role
from ps_server.cli.psctl import main
from tests.coordinator.elasticity.running_job import PAUSE, SIZE, SLOWER, RunningJob, running

pytestmark = [pytest.mark.long, pytest.mark.timeout(1200)]

MOVED = re.compile(r"0\.[1-9] MB have moved from shard 1 to shard 0")


def test_a_worker_that_stands_still_is_replaced_and_every_push_counts(tmp_path: Path) -> None:
    flags = ("--workers", "2", "--restart-workers", "1", "--lease-seconds", "10")
    with running(tmp_path, *flags, size=100, pause=0.05) as job:
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


def test_servers_that_stand_still_are_replaced_and_every_push_counts(tmp_path: Path) -> None:
    flags = ("--shards", "2", "--data-dir", "kept", "--lease-seconds", "5")
    with running(tmp_path, *flags, size=100, pause=0.05) as job:
        job.waits_until(lambda: job.answered(0) > 5, "the worker trains")
        first = job.members(Role.SHARD)[1].pid
        os.kill(first, signal.SIGSTOP)
        job.waits_until(
            lambda: (new := job.members(Role.SHARD).get(1)) and new.pid != first, "another shard has joined"
        )
        before = job.answered(0)
        job.waits_until(lambda: job.answered(0) > before + 5, "the worker trains on")
        ps_run = psutil.Process(job.process.pid)
        (coordinator,) = (each for each in ps_run.children() if "ps_server.coordinator.main" in each.cmdline())
        coordinator.suspend()
        job.waits_until(lambda: not coordinator.is_running(), "the coordinator is killed")
        job.waits_until(lambda: job.members(Role.SHARD).keys() == {0, 1}, "another one knows the shards")
        # The launcher is stopped itself for longer than all limits, and then takes nobody for dead.
        ps_run.suspend()
        time.sleep(10.0)
        ps_run.resume()
        before = job.answered(0)
        job.waits_until(lambda: job.answered(0) > before + 50, "the worker trains on")
        least, most, version = job.ends()
    assert job.output().count("it is killed") == 2
    assert "shard 1 hung and was killed; starting it again (restart 1 of 10)" in job.output()
    assert "coordinator hung and was killed; starting it again (restart 2 of 10)" in job.output()
    assert not psutil.pid_exists(first)
    assert least == most == version == job.answered()


def psctl(job: RunningJob, *arguments: str) -> str:
    done = CliRunner().invoke(main.main, ["--coordinator", job.address, *arguments])
    assert done.exit_code == 0, done.output
    return done.output.rstrip().rpartition("\n")[2]


def test_a_job_that_is_scaled_up_and_down_counts_every_push(tmp_path: Path) -> None:
    flags = ("--workers", "1:4", "--restart-workers", "1", "--data-dir", "kept")
    with running(tmp_path, *flags, size=1000, pause=0.05) as job:
        job.waits_until(lambda: job.answered(0) > 5, "it trains")
        assert psctl(job, "scale", "--workers", "3", "--shards", "2") == "the job has 3 workers and 2 shards"
        job.waits_until(lambda: all(job.answered(rank) > 5 for rank in range(3)), "all train")
        held = [each.stats.held_bytes for each in job.members(Role.SHARD).values()]
        assert min(held) > 0
        # What was scaled is restarted as what was there from the start.
        os.kill(job.members(Role.SHARD)[1].pid, signal.SIGKILL)
        os.kill(job.members(Role.WORKER)[2].pid, signal.SIGKILL)
        job.waits_until(lambda: len([*tmp_path.glob("answered-2-*")]) == 2, "another worker 2 has joined")
        assert psctl(job, "scale", "--workers", "2", "--shards", "1") == "the job has 2 workers and 1 shard"
        assert psctl(job, "wait", "--for", "training") == ""
        least, most, version = job.ends()
    assert least == most == version
    # The push that was under way when worker 2 was killed counts or does not.
    assert version - job.answered() in (0, 1)
    assert "finished in" in job.output()
    assert not re.search("failures:.*worker 1", job.output())


def test_slices_move_from_a_shard_that_is_slower_and_every_push_counts(tmp_path: Path) -> None:
    with running(tmp_path, *SLOWER, size=SIZE, pause=PAUSE) as job:
        job.waits_until(lambda: all(job.answered(rank) for rank in range(4)), "all workers train")
        before = job.members(Role.SHARD)[1].stats.held_bytes
        job.waits_until(lambda: any(MOVED.fullmatch(text) for text in job.decisions()), "slices move")
        told = job.decisions()
        assert any(re.match(r"shard 1 is hot: .* pushes \(.* MB\) wait", text) for text in told), told
        job.waits_until(lambda: job.members(Role.SHARD)[1].stats.held_bytes < before, "shard 1 holds less")
        least, most, version = job.ends()
    assert least == most == version == job.answered()
