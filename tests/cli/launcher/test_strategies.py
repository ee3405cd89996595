"""ps-run --strategy: which processes a strategy has, with which variables, and which flags. 10 CPU seconds."""

from __future__ import annotations

import re
from importlib.metadata import EntryPoint
from pathlib import Path

import click
import pytest

from ps_protocol.cluster.replicas import STORE_VARIABLE, STRATEGIES_GROUP
from ps_protocol.model.spec import Consistency, Mode
from ps_server.cli.launcher import replicas
from ps_server.cli.launcher.events import Exited, Finish, ProcessName, ProcessRole, StartProcess
from ps_server.cli.launcher.programs import Programs, Script
from ps_server.cli.launcher.replicas import ReplicaPrograms, check_strategy, gpus, has_servers
from ps_server.cli.launcher.supervisor import JobPlan, JobSupervisor
from tests.cli import forked
from tests.recovery.zygote import shared
from tests.support.length import few

EXAMPLES = Path(__file__).parents[3] / "examples"

#: Of any strategy, also of one whose updates are stale.
LESSONS = ("--epochs", "4", "--expect-accuracy", "0.7")

STRATEGIES = ["parameter_server", "central_storage", "mirrored", "one_device", "multi_worker_mirrored"]


@pytest.mark.parametrize("name", few(STRATEGIES, 3))
def test_one_script_learns_under_every_strategy(tmp_path, name):
    shared().load("sklearn.datasets")
    workers = ("--workers", "2") if name != "one_device" else ()
    job = ("--no-progress", "--strategy", name, *workers, str(EXAMPLES / "strategies.py"), *LESSONS)
    done = forked.run(tmp_path, *job)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{name}: test accuracy" in done.stdout
    assert len(re.findall(r"epoch \d: loss", done.stdout)) == 4


def test_tpu_ends_with_a_typed_error_where_there_is_none(tmp_path):
    shared().load("sklearn.datasets")
    done = forked.run(tmp_path, "--no-progress", "--strategy", "tpu", str(EXAMPLES / "strategies.py"))
    assert done.returncode == 1
    assert "this machine has no TPU that torch knows" in done.stdout


def test_a_replica_that_is_killed_ends_the_job(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import os, signal\n"
        "signal.signal(signal.SIGTERM, lambda *_: os._exit(0))\n"
        "os.kill(os.getpid(), signal.SIGKILL) if os.environ['RANK'] == '1' else signal.pause()\n"
    )
    done = forked.run(tmp_path, "--strategy", "mirrored", "--workers", "2", str(script))
    assert done.returncode == 137
    assert "2 replica(s), strategy mirrored" in done.stderr
    assert "worker 1 was killed by signal 9 (SIGKILL" in done.stderr


def test_a_flag_of_servers_is_refused_for_replicas(tmp_path):
    done = forked.run(tmp_path, "--strategy", "mirrored", "--shards", "2", str(EXAMPLES / "strategies.py"))
    assert done.returncode == 2
    assert "--shards: strategy mirrored has no coordinator and no shards" in done.stderr


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        ("mirorred", {}, "unknown strategy 'mirorred': choose from parameter_server, central_storage, one_device"),
        ("central_storage", {"mode": "async"}, "--mode async: central_storage trains in step"),
        ("one_device", {"workers": 2}, "--workers 2: one_device is one process"),
        ("tpu", {"data_dir": Path("state"), "page": True}, "--data-dir, --page: strategy tpu has no coordinator"),
    ],
)
def test_what_does_not_fit_the_strategy_is_refused(name, given, message):
    with pytest.raises(click.UsageError, match=re.escape(message)):
        check_strategy(name, given)


def test_what_fits_is_accepted(monkeypatch):
    foreign = [EntryPoint("foreign", "package:Kind", STRATEGIES_GROUP)]
    monkeypatch.setattr(replicas, "entry_points", lambda group: foreign)
    check_strategy(None, {"mode": "async"})
    check_strategy("central_storage", {"mode": "sync", "shards": 2})
    check_strategy("foreign", {"workers": 3, "log_dir": Path("logs")})
    assert [has_servers(name) for name in (None, "parameter_server", "mirrored", "foreign")] == [
        True,
        True,
        False,
        False,
    ]


def test_gpus_are_counted_by_the_variable_or_the_devices(tmp_path):
    for name in ("nvidia0", "nvidia1", "nvidiactl", "null"):
        (tmp_path / name).touch()
    assert gpus({}, tmp_path) == 2
    assert gpus({"CUDA_VISIBLE_DEVICES": "0,3,1"}, tmp_path) == 3
    assert gpus({"CUDA_VISIBLE_DEVICES": ""}, tmp_path) == 0
    assert gpus({"CUDA_VISIBLE_DEVICES": "-1"}, tmp_path) == 0


def programs(strategy, workers):
    script = Script(("python", "train.py"))
    plain = Programs(script, Consistency(Mode.ASYNC), 1, workers, cores=4, strategy=strategy)
    return ReplicaPrograms.of(plain, Path("/store"))


def test_a_replica_has_the_variables_of_torchrun():
    found = programs("mirrored", 2).environment(ProcessName(ProcessRole.WORKER, 1), "", {"TF_CONFIG": "{}", "A": "b"})
    assert int(found.pop("MASTER_PORT")) > 0
    assert found == {
        "A": "b",
        "PYTHONUNBUFFERED": "1",
        "PS_STRATEGY": "mirrored",
        "OMP_NUM_THREADS": "2",
        "GLOO_SOCKET_IFNAME": "lo",
        "RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        STORE_VARIABLE: "/store",
    }


def test_a_replica_of_several_hosts_keeps_its_tf_config():
    found = programs("multi_worker_mirrored", 1).environment(ProcessName(ProcessRole.WORKER), "", {"TF_CONFIG": "{}"})
    assert found["TF_CONFIG"] == "{}"
    assert "RANK" not in found


def test_a_job_without_a_coordinator_begins_and_ends_with_its_scripts():
    supervisor = JobSupervisor(JobPlan(0, 2, coordinated=False))
    first, second = (ProcessName(ProcessRole.WORKER, rank) for rank in range(2))
    assert supervisor.start(0.0) == [StartProcess(first), StartProcess(second)]
    assert supervisor.handle(Exited(first, 0), 1.0) == []
    assert supervisor.handle(Exited(second, 0), 2.0) == [Finish(0)]
