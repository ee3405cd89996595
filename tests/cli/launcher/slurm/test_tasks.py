"""Node lists of Slurm, and which processes a task runs: pure."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from ps_protocol.errors import ConfigError
from ps_server.cli.launcher.slurm import job
from ps_server.cli.launcher.slurm.job import own_address, threads
from ps_server.cli.launcher.slurm.tasks import SlurmTask, TaskLayout, expand, processes_of, workers_of

LISTS = {
    "n1": ["n1"],
    "n1,n2": ["n1", "n2"],
    "gpu[01-03,7],login": ["gpu01", "gpu02", "gpu03", "gpu7", "login"],
    "n[098-101]": ["n098", "n099", "n100", "n101"],
    "r[1-2]c[3,5]": ["r1c3", "r1c5", "r2c3", "r2c5"],
}


@pytest.mark.parametrize("text", LISTS)
def test_node_lists(text):
    assert expand(text) == LISTS[text]


@pytest.mark.skipif(shutil.which("scontrol") is None, reason="scontrol is not installed (Debian: slurm-client)")
def test_scontrol_expands_them_so_too(tmp_path):
    config = tmp_path / "slurm.conf"
    config.write_text("ClusterName=x\nSlurmctldHost=localhost\nNodeName=localhost\n")
    for text, names in LISTS.items():
        command = ["scontrol", "show", "hostnames", text]
        environment = {"SLURM_CONF": str(config), "PATH": "/usr/bin:/bin"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True)
        assert done.stdout.split() == names


@pytest.mark.parametrize("text", ["", ",", "a,", "a,,b", "n[", "n[1", "n]1", "n[2-1]", "n[a]", "n[]", "n[1-999999999]"])
def test_what_is_no_node_list_is_refused(text):
    with pytest.raises(ConfigError, match="no node list"):
        expand(text)


STEP = {
    "SLURM_PROCID": "2",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURMD_NODENAME": "n2",
    "SLURM_JOB_ID": "17",
    "SLURM_STEP_ID": "1",
}


def test_a_task_from_the_variables_of_srun():
    task = SlurmTask.from_environment(STEP)
    assert (task.number, task.tasks, task.nodes, task.node) == (2, 4, ["n1", "n2"], "n2")
    assert task.coordinator_node == "n1"
    assert (task.port(0), task.port(7000)) == (20_000 + 17 * 16 + 1, 7000)
    assert task.shares_nodes
    assert not SlurmTask.from_environment({**STEP, "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"}).shares_nodes
    assert not SlurmTask.from_environment({**STEP, "SLURM_STEP_NODELIST": "n1"}).shares_nodes
    reserved = SlurmTask.from_environment({**STEP, "SLURM_STEP_RESV_PORTS": "12007-12010"})
    assert (reserved.port(0), reserved.port(7000)) == (12007, 7000)


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({}, "SLURM_PROCID is not set.*srun"),
        ({**STEP, "SLURM_STEP_NODELIST": ""}, "SLURM_STEP_NODELIST is not set"),
        ({**STEP, "SLURM_PROCID": "x"}, "SLURM_PROCID is no number"),
        ({**STEP, "SLURM_PROCID": "4"}, "not below SLURM_STEP_NUM_TASKS"),
        ({**STEP, "SLURM_STEP_NODELIST": "n["}, "no node list"),
    ],
)
def test_without_srun_there_is_a_typed_error(environ, words):
    with pytest.raises(ConfigError, match=words):
        SlurmTask.from_environment(environ)


def laid_out(layout, tasks, shards):
    return [", ".join(map(str, processes_of(layout, number, tasks, shards))) for number in range(tasks)]


def test_layouts():
    assert laid_out(TaskLayout.SEPARATE, 5, 2) == ["coordinator", "shard 0", "shard 1", "worker 0", "worker 1"]
    assert laid_out(TaskLayout.TOGETHER, 4, 2) == [
        "coordinator, shard 0, worker 0",
        "worker 1",
        "shard 1, worker 2",
        "worker 3",
    ]
    assert workers_of(TaskLayout.SEPARATE, 5, 2, None) == 2
    assert workers_of(TaskLayout.TOGETHER, 4, 2, 4) == 4


@pytest.mark.parametrize("layout", TaskLayout)
@pytest.mark.parametrize("tasks", [1, 3, 4, 9])
@pytest.mark.parametrize("shards", [1, 2, 5])
def test_every_process_has_one_task(layout, tasks, shards):
    try:
        workers = workers_of(layout, tasks, shards, None)
    except ConfigError:
        assert layout is TaskLayout.SEPARATE
        assert tasks < shards + 2
        return
    names = [str(process) for number in range(tasks) for process in processes_of(layout, number, tasks, shards)]
    wanted = ["coordinator", *(f"shard {n}" for n in range(shards)), *(f"worker {n}" for n in range(workers))]
    assert sorted(names) == sorted(wanted)


@pytest.mark.parametrize(("layout", "asked"), [(TaskLayout.SEPARATE, 3), (TaskLayout.TOGETHER, 3)])
def test_other_numbers_of_workers_than_tasks_are_refused(layout, asked):
    with pytest.raises(ConfigError, match=r"4 tasks do not fit.*3 workers.*--ntasks"):
        workers_of(layout, 4, 1, asked)


def test_the_address_of_a_node_is_its_name_unless_that_is_loopback_there(monkeypatch):
    task = SlurmTask.from_environment({**STEP, "SLURMD_NODENAME": "localhost", "SLURM_STEP_NODELIST": "localhost"})
    assert own_address(task) == "localhost"
    monkeypatch.setattr(job, "is_loopback", lambda host: host == "n2")
    with pytest.raises(ConfigError, match="other nodes reach n2 is not known"):
        own_address(SlurmTask.from_environment({**STEP, "SLURM_STEP_NODELIST": "n1.invalid,n2"}))
    beside = SlurmTask.from_environment({**STEP, "SLURM_STEP_NODELIST": "127.0.0.1,n2"})
    assert own_address(beside) == "127.0.0.1"
    assert own_address(SlurmTask.from_environment({**STEP, "SLURMD_NODENAME": "n1"})) == "n1"
    monkeypatch.undo()
    on_this_machine = {**STEP, "SLURMD_NODENAME": "127.0.0.3", "SLURM_STEP_NODELIST": "127.0.0.[2-3]"}
    assert own_address(SlurmTask.from_environment(on_this_machine)) == "127.0.0.3"


def test_threads_of_a_worker():
    task = SlurmTask.from_environment(STEP)
    assert threads(task, {"SLURM_CPUS_PER_TASK": "6"}) == 6
    assert threads(task, {}) >= 1
