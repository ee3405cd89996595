"""The folders of a job: a data directory belongs to one job at a time; a trace is joined from files of processes."""

import json
import os
import subprocess
import sys

import pytest
from click.testing import CliRunner

from ps_protocol.errors import ConfigError
from ps_protocol.model.spec import Consistency
from ps_protocol.tracing.trace_file import FileTracer
from ps_server.cli.launcher.events import ProcessName, ProcessRole
from ps_server.cli.launcher.job_folder import JobFolder, JobTrace
from ps_server.cli.launcher.programs import Programs, Script
from ps_server.cli.psctl.main import main as psctl
from ps_server.coordinator.persistence.journal import FILE_NAME
from tests.cli.launcher.jobs import Job
from tests.support.trace_events import check, process_names, read


def test_it_is_made_and_knows_whether_a_job_was_there_before(tmp_path):
    folder = JobFolder(tmp_path / "new" / "folder")
    assert not folder.used_before
    os.close(folder.lock)
    (folder.path / FILE_NAME).touch()
    again = JobFolder(folder.path)
    assert again.used_before
    os.close(again.lock)


def test_a_second_job_is_refused_while_a_server_of_the_first_lives(tmp_path):
    folder = JobFolder(tmp_path)
    wait = [sys.executable, "-c", "import sys; sys.stdin.read()"]
    with subprocess.Popen(wait, stdin=subprocess.PIPE, pass_fds=[folder.lock]) as server:
        os.close(folder.lock)  # as when ps-run was killed
        with pytest.raises(ConfigError, match="in use by another ps-run") as refused:
            JobFolder(tmp_path, wait_seconds=0)
        assert str(tmp_path) in str(refused.value)
        server.communicate()
    os.close(JobFolder(tmp_path, wait_seconds=0).lock)


def test_the_end_of_the_last_server_is_waited_for(tmp_path):
    folder = JobFolder(tmp_path)
    asks = [sys.executable, "-c", "import os, select, sys; select.select([], [], [], 0.3)"]
    with subprocess.Popen(asks, pass_fds=[folder.lock]):
        os.close(folder.lock)
        os.close(JobFolder(tmp_path, wait_seconds=30).lock)


def test_a_place_that_cannot_be_a_folder_is_refused_by_name(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be written"):
        JobFolder(tmp_path / "file" / "folder")


def leave_file(folder, process):
    tracer = FileTracer(folder, process, 1 << 20)
    tracer.begin("step", "model m", 0, {}).end(1_000)
    tracer.close()


def test_only_the_files_of_this_job_are_joined(tmp_path):
    leave_file(tmp_path / "traces", "worker 7")
    job = JobTrace(tmp_path / "traces")
    leave_file(tmp_path / "traces", "worker 0")
    leave_file(tmp_path / "traces", "shard 0")
    assert job.finish().startswith(f"trace of 2 processes: {tmp_path}/traces/trace.json; open it in ")
    events = read(tmp_path / "traces" / "trace.json")
    check(events)
    assert sorted(process_names(events).values()) == ["shard 0", "worker 0"]
    assert (tmp_path / "traces" / "trace.json").stat().st_mode & 0o777 == 0o600


def test_a_job_without_a_step_says_that_there_is_no_trace(tmp_path):
    done = Job(tmp_path).run("--trace", "traces", script="print(os.environ['PS_TRACE'])")
    assert done.returncode == 0
    assert f"worker 0    | {tmp_path}/traces\n" in done.stdout
    assert "no trace: there are no trace files" in done.stderr.splitlines()[-1]


def test_a_folder_that_cannot_be_made_is_refused_before_the_job(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be created"):
        JobTrace(tmp_path / "file" / "traces")


def test_workers_learn_their_place_and_share_the_cores_unless_the_user_sets_threads():
    programs = Programs(Script(("python", "train.py")), Consistency(), 1, 2, cores=5)
    worker = programs.environment(ProcessName(ProcessRole.WORKER, 1), "127.0.0.1:9", {})
    place = {"PS_COORDINATOR": "127.0.0.1:9", "PS_ROLE": "worker", "PS_RANK": "1", "OMP_NUM_THREADS": "2"}
    assert place.items() <= worker.items()
    own = programs.environment(ProcessName(ProcessRole.WORKER, 1), "127.0.0.1:9", {"OMP_NUM_THREADS": "77"})
    assert own["OMP_NUM_THREADS"] == "77"


def test_workers_get_the_folders_that_ps_run_was_given(tmp_path):
    programs = Programs(
        Script(("python", "train.py")), Consistency(), 1, 1, 1, trace=tmp_path / "a", tensorboard=tmp_path / "b"
    )
    worker = programs.environment(ProcessName(ProcessRole.WORKER, 0), "x:1", {})
    shard = programs.environment(ProcessName(ProcessRole.SHARD, 0), "x:1", {})
    assert (worker["PS_TRACE"], worker["PS_TENSORBOARD"]) == (str(tmp_path / "a"), str(tmp_path / "b"))
    assert shard["PS_TRACE"] == str(tmp_path / "a")
    assert "PS_TENSORBOARD" not in shard


def test_shards_and_workers_are_told_which_modules_register_optimizers():
    programs = Programs(Script(("python", "train.py")), Consistency(), 1, 1, 1, optimizers="lion,tiger")
    for role in (ProcessRole.SHARD, ProcessRole.WORKER):
        assert programs.environment(ProcessName(role, 0), "x:1", {})["PS_OPTIMIZERS"] == "lion,tiger"
    without = Programs(Script(("python", "train.py")), Consistency(), 1, 1, 1)
    assert "PS_OPTIMIZERS" not in without.environment(ProcessName(ProcessRole.SHARD, 0), "x:1", {})


def test_psctl_joins_files_of_programs_started_by_hand(tmp_path):
    for process in ("worker 0", "worker 1"):
        leave_file(tmp_path, process)
    done = CliRunner().invoke(psctl, ["trace", str(tmp_path), "-o", "json"])
    assert json.loads(done.output) == {
        "file": f"{tmp_path}/trace.json",
        "processes": 2,
        "clocks": ["worker 0, worker 1: the clock of the axis"],
    }
    again = CliRunner().invoke(psctl, ["trace", str(tmp_path)])
    assert again.output.splitlines() == [
        f"{tmp_path}/trace.json: 2 processes",
        "worker 0, worker 1: the clock of the axis",
    ]


def test_psctl_refuses_a_folder_without_traces(tmp_path):
    done = CliRunner().invoke(psctl, ["trace", str(tmp_path)])
    assert done.exit_code == 1
    assert "there are no trace files" in done.output
