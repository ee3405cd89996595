"""ps-run --data-dir over real servers: whatever is killed, the job ends with the bits of an undisturbed one."""

import signal

import pytest

from tests.cli.launcher.jobs import Job
from tests.cli.launcher.training import HALF, STEPS, UNDISTURBED

KEPT = ("--data-dir", "kept")


@pytest.mark.parametrize("victim", ["shard", "coordinator"])
def test_a_killed_server_is_started_again_and_the_worker_goes_on(training, victim):
    job = training(*KEPT)
    job.says("half-way")
    job.kill(victim)
    job.says(" GB); starting it again (restart 1 of 10)")
    assert "was killed by signal 9 (SIGKILL: perhaps out of memory" in job.output
    job.go_on()
    assert job.ends() == 0, job.output
    assert UNDISTURBED in job.output
    assert job.output.count("started at") == 1


def test_a_killed_worker_is_started_again_and_goes_on_at_its_step(training):
    job = training(*KEPT, "--restart-workers", "1")
    job.says("half-way")
    job.kill("worker")
    assert job.ends() == 0, job.output
    assert f"started at {HALF}\n" in job.output
    assert UNDISTURBED in job.output


def test_after_everything_was_killed_the_same_command_goes_on(training):
    job = training(*KEPT, "--fsync", own_interpreters=True)
    job.says("half-way")
    # Its servers die with it, a moment later: the next one must wait for that by itself.
    job.send(signal.SIGKILL)
    job.ends()
    again = training(*KEPT, "--fsync")
    assert again.ends() == 0, again.output
    assert "continuing from the state in kept" in again.output
    assert f"started at {HALF}\n" in again.output
    assert UNDISTURBED in again.output


def test_a_job_that_ended_well_is_trained_on_by_the_next_call_also_from_snapshots_alone(training):
    for text in ("started at 0\n", f"started at {STEPS}\n"):
        job = training(*KEPT, "--durability", "snapshot", "--snapshot-seconds", "3600")
        job.go_on()
        assert job.ends() == 0, job.output
        assert text in job.output
        assert UNDISTURBED in job.output
    assert "continuing from the state in kept" in job.output


def test_a_folder_of_another_job_is_refused_at_once_and_left_as_it_was(training):
    job = training(*KEPT)
    job.go_on()
    assert job.ends() == 0, job.output
    other = training(*KEPT, "--workers", "2")
    assert other.ends() == 2, other.output
    assert "expected: --workers 1; actual: --workers 2" in other.output
    assert "starting it again" not in other.output
    again = training(*KEPT)
    assert again.ends() == 0, again.output
    assert f"started at {STEPS}\n" in again.output


def test_a_server_that_dies_at_once_every_time_does_not_spin(tmp_path):
    job = Job(tmp_path)
    (job.folder / "lives").touch()
    done = job.run(*KEPT, "--restart-servers", "3", script="import signal\nsignal.pause()", DIES="shard0")
    assert done.returncode == 137
    assert (job.folder / "lives").read_text() == "shard0\n" * 4
    waits = [f"starting it again{wait} (restart {n} of 3)" for n, wait in enumerate(("", " in 0.5 s", " in 1 s"), 1)]
    said = [line.partition("; ")[2] for line in done.stderr.splitlines() if "starting it again" in line]
    assert said == waits
    assert "and --restart-servers 3 is used up; stopping the job\n" in done.stderr


def test_a_job_with_tls_goes_on_with_its_sessions_when_every_server_was_killed(training):
    job = training(*KEPT, "--tls", "--job", "night")
    job.says("half-way")
    job.kill("coordinator")
    job.kill("shard")
    job.go_on()
    assert job.ends() == 0, job.output
    assert UNDISTURBED in job.output
    assert "certificates and tokens of this job are in kept/tls" in job.output
