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
from tests.cli.launcher.jobs import wait_until
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


def test_outside_of_a_task_ps_run_says_so(tmp_path, monkeypatch):
    for name in [name for name in os.environ if name.startswith("SLURM")]:
        monkeypatch.delenv(name)
    (tmp_path / "train.py").write_text("")
    done = CliRunner().invoke(main, ["--slurm", str(tmp_path / "train.py")])
    assert done.exit_code == 2
    assert "SLURM_PROCID is not set" in done.output
    for flags in (["--tls-dir", str(tmp_path)], ["--insecure"], ["--hosts", "a", "--slurm"]):
        assert CliRunner().invoke(main, [*flags, str(tmp_path / "train.py")]).exit_code == 2


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.skipif(bool(no_slurm()), reason=no_slurm() or "Slurm is here")
def test_a_killed_worker_is_started_again_and_a_requeued_job_continues(tmp_path):
    slurm = Slurm(tmp_path)
    try:
        notes = tmp_path / "notes"
        notes.mkdir()
        (tmp_path / "train.py").write_text(TRAIN)
        job = slurm.call(
            "sbatch",
            "--parsable",
            f"--output={tmp_path / 'out'}",
            f"--chdir={tmp_path}",
            str(SBATCH),
            "train.py",
            NOTES=str(notes),
            PS_RUN=f"{sys.executable} -m ps_server.cli.launcher.main",
            PSCTL=f"{sys.executable} -m ps_server.cli.psctl.main",
            PS_RUN_FLAGS="--restart-workers 1",
            DATA_DIR=str(tmp_path / "state"),
        )
        assert job
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
