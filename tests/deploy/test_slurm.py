"""train.sbatch: what it says as a file, and a job of a real Slurm with a killed worker and a requeue (full length)."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from click.testing import CliRunner

from ps_server.cli.launcher.main import main
from tests.cli.launcher.jobs import SCRIPTS, wait_until
from tests.deploy.slurm import Slurm, no_slurm

ROOT = Path(__file__).parents[2]
SBATCH = ROOT / "deploy" / "slurm" / "train.sbatch"

TRAIN = """
import os, pathlib, time, torch, ps_worker
with ps_worker.connect() as cluster:
    model = torch.nn.Linear(2, 1)
    optimizer = cluster.optimizer(torch.optim.SGD, model, lr=0.01)
    folder = pathlib.Path(os.environ["NOTES"])
    first = optimizer.version
    (folder / f"begun-{os.environ['PS_RANK']}-{os.getpid()}").write_text(str(first))
    while not (folder / "enough").exists():
        optimizer.zero_grad()
        model(torch.randn(8, 2)).square().mean().backward()
        optimizer.step()
        (folder / f"steps-{os.environ['PS_RANK']}-{os.getpid()}").write_text(str(optimizer.version))
        time.sleep(0.05)
    print("trained from", first, "to", optimizer.version)
"""


def test_the_script_is_valid_and_every_flag_that_it_gives_is_one_of_ps_run():
    text = SBATCH.read_text()
    subprocess.run(["bash", "-n", str(SBATCH)], check=True, timeout=60)
    assert os.access(SBATCH, os.X_OK)
    known = CliRunner().invoke(main, ["--help"]).output
    step = text[text.index("srun ") : text.index("step=$!")]
    for flag in {*re.findall(r"--[\w-]+", step)} - {"--kill-on-bad-exit"} | {"--insecure", "--tls-dir"}:
        assert flag in known, flag


@pytest.mark.parametrize(
    ("code", "environment", "queued"),
    [
        ("0", {}, False),
        # An option that ps-run or the script does not have; no such program.
        ("2", {}, False),
        ("2", {"SLURM_RESTART_COUNT": "1"}, False),
        ("127", {}, False),
        # A mistake in the script, which ends it at its start; what ended one that had trained.
        ("1", {}, False),
        ("1", {"SOON_SECONDS": "0"}, True),
        ("1", {"SLURM_RESTART_COUNT": "1"}, True),
        # Killed, stuck.
        ("137", {}, True),
        ("70", {}, True),
        ("137", {"SLURM_RESTART_COUNT": "3"}, False),
        ("137", {"RESTARTS": "0"}, False),
    ],
)
def test_a_job_is_queued_again_only_where_another_start_may_mend_it(tmp_path, code, environment, queued):
    for name, does in (("srun", f"exit {code}"), ("scontrol", 'echo "$@" >> called')):
        (tmp_path / name).write_text(f"#!/bin/sh\n{does}\n")
        (tmp_path / name).chmod(0o755)
    given = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "7", "INSECURE": "1", **environment}
    done = subprocess.run([SBATCH, "train.py"], cwd=tmp_path, env=given, capture_output=True, text=True, check=False)
    assert done.returncode == int(code)
    called = tmp_path / "called"
    assert (called.read_text() if called.exists() else "") == ("requeue 7\n" if queued else "")
    says = "" if code == "0" else f"torch-ps: exit code {code}; the job is {'' if queued else 'not '}queued again\n"
    assert done.stderr == says


def test_outside_of_a_task_ps_run_says_so(tmp_path, monkeypatch):
    for name in [name for name in os.environ if name.startswith("SLURM")]:
        monkeypatch.delenv(name)
    (tmp_path / "train.py").write_text("")
    done = CliRunner().invoke(main, ["--slurm", str(tmp_path / "train.py")])
    assert done.exit_code == 2
    assert "SLURM_PROCID is not set" in done.output
    for flags in (["--tls-dir", str(tmp_path)], ["--insecure"], ["--hosts", "a", "--slurm"]):
        assert CliRunner().invoke(main, [*flags, str(tmp_path / "train.py")]).exit_code == 2


needs_slurm = pytest.mark.skipif(bool(no_slurm()), reason=no_slurm() or "Slurm is here")


@pytest.mark.long
@pytest.mark.timeout(900)
@needs_slurm
def test_a_killed_worker_is_started_again_and_a_requeued_job_continues(tmp_path):
    slurm = Slurm(tmp_path)
    try:
        job, notes = submitted(slurm, PS_RUN_FLAGS="--restart-workers 1")
        wait_until_slowly(lambda: steps(notes, 0) and steps(notes, 1), "both workers train")
        psutil.Process(begun(notes, 0)[0]).kill()
        wait_until_slowly(lambda: len(steps(notes, 0)) == 2, "the killed worker trains again")
        before = max(steps(notes, 0) + steps(notes, 1))
        slurm.call("scancel", "--batch", "--signal=USR1", job)
        wait_until_slowly(lambda: "Restarts=1" in slurm.call("scontrol", "show", "job", job), "the job is queued again")
        # By itself Slurm waits for two minutes before it starts a job again.
        slurm.call("scontrol", "update", f"JobId={job}", "StartTime=now")
        wait_until_slowly(lambda: len(steps(notes, 1)) == 2, "the job trains again")
        (notes / "enough").touch()
        wait_until_slowly(lambda: "COMPLETED" in slurm.call("scontrol", "show", "job", job), "the job is complete")
        output = (tmp_path / "out").read_text()
        assert "worker 0 was killed by signal 9" in output
        assert "the job is queued again" in output
        began = [int(first) for first in re.findall(r"trained from (\d+) to", output)]
        # Nothing that a worker had seen applied is lost.
        assert len(began) == 2
        assert min(began) >= before
    finally:
        slurm.close()


@pytest.mark.long
@pytest.mark.timeout(900)
@needs_slurm
def test_a_worker_that_stands_still_is_killed_and_started_again_by_its_task(tmp_path):
    slurm = Slurm(tmp_path)
    try:
        job, notes = submitted(slurm, PS_RUN_FLAGS="--restart-workers 1 --lease-seconds 10")
        wait_until_slowly(lambda: steps(notes, 0) and steps(notes, 1), "both workers train")
        psutil.Process(begun(notes, 0)[0]).suspend()
        wait_until_slowly(lambda: len(steps(notes, 0)) == 2, "another worker 0 trains")
        (notes / "enough").touch()
        wait_until_slowly(lambda: "COMPLETED" in slurm.call("scontrol", "show", "job", job), "the job is complete")
        assert "worker 0 runs and is lost to the coordinator; it is killed" in (tmp_path / "out").read_text()
    finally:
        slurm.close()


@pytest.mark.long
@pytest.mark.timeout(900)
@needs_slurm
def test_two_nodes_with_workers_and_shards_together_lose_a_shard_and_are_requeued_by_the_operator(tmp_path):
    first, second = "127.0.0.2", "127.0.0.3"
    slurm = Slurm(tmp_path, (first, second))
    try:
        job, notes = submitted(slurm, "--nodes=2", "--ntasks=2", SHARDS="2", LAYOUT="together")
        wait_until_slowly(lambda: steps(notes, 0) and steps(notes, 1), "both workers train")
        assert node_of(begun(notes, 0)[0]) == first
        assert node_of(begun(notes, 1)[0]) == second
        lost = shard(tmp_path, 1)
        assert node_of(lost.pid) == second
        at = steps(notes, 1)[0]
        lost.kill()
        wait_until_slowly(lambda: steps(notes, 1)[0] > at + 20, "training goes on with the shard started again")
        lives = [psutil.Process(process) for process in (*begun(notes, 0), *begun(notes, 1))]
        before = max(steps(notes, 0) + steps(notes, 1))
        slurm.call("scontrol", "requeue", job)
        wait_until_slowly(lambda: not any(each.is_running() for each in lives), "the workers have ended")
        wait_until_slowly(lambda: "JobState=PENDING" in slurm.call("scontrol", "show", "job", job), "it is queued")
        slurm.call("scontrol", "update", f"JobId={job}", "StartTime=now")
        wait_until_slowly(lambda: len(steps(notes, 1)) == 2, "the job trains again")
        (notes / "enough").touch()
        wait_until_slowly(lambda: "COMPLETED" in slurm.call("scontrol", "show", "job", job), "the job is complete")
        output = (tmp_path / "out").read_text()
        assert "shard 1 was killed by signal 9" in output
        assert "Restarts=1" in slurm.call("scontrol", "show", "job", job), output
        began = [int(version) for version in re.findall(r"trained from (\d+) to", output)]
        assert len(began) == 2
        assert min(began) >= before
    finally:
        slurm.close()


def submitted(slurm, *flags, **environment):
    """The number of a job of TRAIN in the folder of this Slurm, and where its workers leave notes."""
    folder = slurm.folder
    notes = folder / "notes"
    notes.mkdir()
    (folder / "train.py").write_text(TRAIN)
    job = slurm.call(
        *("sbatch", "--parsable", f"--output={folder / 'out'}", f"--chdir={folder}", *flags),
        *(str(SBATCH), "train.py"),
        NOTES=str(notes),
        PS_RUN=f"{sys.executable} {SCRIPTS / 'impatient_ps_run.py'}",
        PSCTL=f"{sys.executable} -m ps_server.cli.psctl.main",
        DATA_DIR=str(folder / "state"),
        **environment,
    )
    assert job
    return job, notes


def node_of(process):
    """The node of Slurm on which a task started it."""
    return psutil.Process(process).environ()["SLURMD_NODENAME"]


def shard(folder, number):
    """The process of a shard of a job in ``folder``."""
    wanted = ["ps_server.shard.main", "--shard", str(number)]
    processes = [each for each in psutil.process_iter(["cwd", "cmdline"]) if each.info["cwd"] == str(folder)]
    found = [each for each in processes if (each.info["cmdline"] or [])[3:6] == wanted]
    (process,) = found
    return process


def wait_until_slowly(condition, what):
    """As ``wait_until``, for what takes Slurm minutes."""
    for _ in range(9):
        try:
            wait_until(condition, what)
        except AssertionError:
            continue
        return
    wait_until(condition, what)


def begun(notes, rank):
    """The processes of worker ``rank``, oldest first."""
    return [int(path.name.split("-")[2]) for path in by_age(notes.glob(f"begun-{rank}-*"))]


def steps(notes, rank):
    """The newest version that each process of worker ``rank`` saw."""
    return [int(path.read_text() or 0) for path in by_age(notes.glob(f"steps-{rank}-*"))]


def by_age(paths):
    return sorted(paths, key=lambda path: path.stat().st_ctime_ns)
