import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from ps_protocol.client.coordinator import CoordinatorClient
from ps_protocol.cluster.view import JoinRequest, Role
from ps_protocol.model.spec import Consistency, Mode, StalePolicy
from ps_server.checkpoint.directory import KeptMark, protect
from ps_server.coordinator import main as module
from ps_server.coordinator.driver import Driver
from ps_server.coordinator.elasticity.policy import ElasticSettings
from ps_server.coordinator.main import CoordinatorConfig, main
from ps_server.coordinator.persistence.journal import FILE_NAME, Journal
from ps_server.coordinator.placement.variables import Balanced, FixedShards, MaxSize, MinSize, PartitionRule
from ps_server.coordinator.settings import ClusterSettings
from ps_server.serving import grpc_server
from tests.checkpoint.support import Job, shard_map_of, small_spec

TF_CONFIG = json.dumps(
    {
        "cluster": {"chief": ["chief.example:7777"], "ps": ["a:1", "b:1", "c:1"], "worker": ["d:1", "e:1"]},
        "task": {"type": "chief", "index": 0},
    }
)


class Told:
    """Runs the command and catches the configuration it would serve with."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.config: CoordinatorConfig | None = None

        def serve(config: CoordinatorConfig, *others: object) -> None:
            self.config = config

        monkeypatch.setattr(module, "serve", serve)
        monkeypatch.setattr(grpc_server, "run", lambda body: body(None).close())
        monkeypatch.setattr(module, "configure_logging", lambda *_: None)

    def run(self, *arguments: str, **env: str) -> Result:
        return CliRunner(env=env).invoke(main, arguments, auto_envvar_prefix="PS_COORDINATOR")

    def __call__(self, *arguments: str, **env: str) -> CoordinatorConfig:
        result = self.run(*arguments, **env)
        assert result.exit_code == 0, result.output
        assert self.config is not None
        return self.config


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Told:
    monkeypatch.delenv("TF_CONFIG", raising=False)
    return Told(monkeypatch)


def test_without_arguments_it_is_one_shard_elastic_workers_and_async_on_loopback(told: Told) -> None:
    config = told()
    assert (config.bind, config.port, config.ready_file) == ("127.0.0.1", 7000, None)
    cluster = config.cluster
    assert (cluster.expected_shards, cluster.expected_workers, cluster.consistency) == (1, 0, Consistency())
    assert (cluster.lease_seconds, cluster.heartbeat_seconds, cluster.partition) == (20.0, 1.0, Balanced())
    assert cluster.seed != told().cluster.seed
    assert cluster.first_incarnation > 1_000_000_000_000


def test_flags_go_before_environment_before_file_before_default(told: Told, tmp_path: Path) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text('port = 1\nshards = 2\nworkers = 3\nlease-seconds = 9.0\nmode = "ssp"\n')
    config = told("--config", str(file), "--port", "30", PS_COORDINATOR_PORT="20", PS_COORDINATOR_SHARDS="20")
    cluster = config.cluster
    assert (config.port, cluster.expected_shards, cluster.expected_workers) == (30, 20, 3)
    assert (cluster.lease_seconds, cluster.heartbeat_seconds, cluster.consistency.mode) == (9.0, 1.0, Mode.SSP)


def test_the_config_file_may_come_from_the_environment(told: Told, tmp_path: Path) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text("seed = 5\n")
    assert told(PS_COORDINATOR_CONFIG=str(file)).cluster.seed == 5


@pytest.mark.parametrize(
    ("text", "named"), [("shard = 2\n", "unknown keys: shard; known: accept-older-journal, backup"), ("[", "read")]
)
def test_a_wrong_config_file_is_named_with_what_is_wrong(told: Told, tmp_path: Path, text: str, named: str) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text(text)
    result = told.run("--config", str(file))
    assert result.exit_code == 2
    assert named in " ".join(result.output.split())


def test_the_mode_and_its_numbers_make_one_consistency(told: Told) -> None:
    config = told("--mode", "ssp", "--staleness", "4", "--stale-policy", "reject", "--stale-threshold", "9")
    assert config.cluster.consistency == Consistency(Mode.SSP, 4, 0, StalePolicy.REJECT, 9)


@pytest.mark.parametrize(
    ("arguments", "rule"),
    [
        (("--partition", "fixed"), FixedShards(3)),
        (("--partition", "fixed", "--partition-slices", "5"), FixedShards(5)),
        (("--partition", "min", "--partition-bytes", "1024"), MinSize(1024, 3)),
        (("--partition", "max", "--partition-bytes", "1024"), MaxSize(1024, 0)),
        (("--partition", "max", "--partition-bytes", "1024", "--partition-slices", "2"), MaxSize(1024, 2)),
    ],
)
def test_the_partition_options_make_one_rule(told: Told, arguments: tuple[str, ...], rule: PartitionRule) -> None:
    assert told("--shards", "3", *arguments).cluster.partition == rule


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--mode", "sync", "--workers", "2", "--backup", "2"), "lower --backup"),
        (("--staleness", "1"), "only in ssp"),
        (("--lease-seconds", "1"), "at least twice"),
        (("--port", "70000"), "70000"),
        (("--mode", "fast"), "fast"),
    ],
)
def test_contradictions_end_with_code_2_and_a_remedy(told: Told, arguments: tuple[str, ...], text: str) -> None:
    result = told.run(*arguments)
    assert result.exit_code == 2
    assert text in result.output
    assert "Traceback" not in result.output


def test_tf_config_gives_what_no_flag_gave(told: Told) -> None:
    config = told("--shards", "9", TF_CONFIG=TF_CONFIG)
    assert (config.bind, config.port) == ("0.0.0.0", 7777)
    assert (config.cluster.expected_shards, config.cluster.expected_workers) == (9, 2)


def test_a_wrong_tf_config_ends_with_code_2(told: Told) -> None:
    result = told.run(TF_CONFIG="{")
    assert result.exit_code == 2
    assert "TF_CONFIG is not JSON" in result.output


# With a journal


def test_a_start_from_the_journal_needs_no_flag_again(told: Told, tmp_path: Path) -> None:
    flags = ("--shards", "3", "--workers", "2", "--seed", "7", "--partition", "fixed", "--mode", "ssp")
    first = told("--data-dir", str(tmp_path), *flags).cluster
    begin(tmp_path, first)
    again = told(PS_COORDINATOR_DATA_DIR=str(tmp_path)).cluster
    assert again.identity == first.identity
    assert (again.seed, again.partition) == (7, FixedShards(3))


def test_a_random_seed_and_the_id_stay_those_of_the_job(told: Told, tmp_path: Path) -> None:
    first = told("--data-dir", str(tmp_path)).cluster
    begin(tmp_path, first)
    again = told("--data-dir", str(tmp_path)).cluster
    assert (again.seed, again.job_id) == (first.seed, first.job_id)
    assert told("--data-dir", str(tmp_path / "other")).cluster.job_id != first.job_id


def test_another_mode_flag_is_reported_and_not_taken(
    told: Told, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    begin(tmp_path, told("--data-dir", str(tmp_path), "--mode", "ssp").cluster)
    told("--data-dir", str(tmp_path), "--mode", "ssp")
    assert not caplog.records
    told("--data-dir", str(tmp_path), "--mode", "async")
    assert "the job stays in mode ssp(4); --mode async is ignored: change it with psctl mode" in caplog.text


def begin(folder: Path, settings: ClusterSettings) -> None:
    """What the first start writes."""
    with Journal.open(folder) as journal:
        asyncio.run(begun(settings, journal))


async def begun(settings: ClusterSettings, journal: Journal) -> None:
    await Driver(settings, journal=journal).close()


# The process itself


@contextmanager
def process(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    environment = {key: value for key, value in os.environ.items() if key != "TF_CONFIG"}
    command = (sys.executable, "-m", "ps_server.coordinator.main", *arguments)
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as child:
        try:
            yield child
        finally:
            child.kill()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_process_serves_writes_its_ready_file_and_stops_cleanly_on_a_signal(
    number: signal.Signals, tmp_path: Path
) -> None:
    ready = tmp_path / "ready"
    with process("--port", "0", "--seed", "3", "--ready-file", str(ready)) as child:
        assert child.stderr is not None
        line = child.stderr.readline()
        assert " INFO " in line
        assert "coordinator serves at 127.0.0.1:" in line
        address = line.split("serves at ")[1].split(": ")[0]
        with CoordinatorClient(address) as client:
            assert client.get_status().view.expected_shards == 1
            client.join(JoinRequest(Role.WORKER), "token")
            stream = client.watch()
            next(iter(stream))
            child.send_signal(number)
            assert child.wait(60) == 0
        assert ready.read_text().strip() == address
        assert "Traceback" not in child.stderr.read()


def refused(*arguments: str) -> str:
    """The one line with which a process ends that was wrongly configured."""
    with process("--port", "0", *arguments) as child:
        _, output = child.communicate(timeout=60)
    assert child.returncode == 2, output
    assert len(output.splitlines()) == 1
    return output


def test_a_killed_process_goes_on_from_its_journal_and_only_as_the_same_job(tmp_path: Path) -> None:
    folder = str(tmp_path / "data")
    # Nobody sends heartbeats while other processes start.
    arguments = ("--port", "0", "--data-dir", folder, "--lease-seconds", "600")
    with process(*arguments, "--shards", "2", "--seed", "3") as child:
        with CoordinatorClient(served(child)) as client:
            first = client.join(JoinRequest(Role.WORKER), "token")
        in_use = refused("--data-dir", folder)
        assert f"{FILE_NAME} is in use by another process" in in_use
        child.kill()
    assert "expected: --shards 2; actual: --shards 1" in refused("--data-dir", folder, "--shards", "1")
    with process(*arguments) as child, CoordinatorClient(served(child)) as client:
        assert client.get_status().view.members == (first.member,)
        assert client.join(JoinRequest(Role.WORKER), "token") == first
        assert client.join(JoinRequest(Role.WORKER), "other").member.incarnation > first.member.incarnation


def served(child: subprocess.Popen[str]) -> str:
    """The address it says it serves at."""
    assert child.stderr is not None
    for line in child.stderr:
        if "serves at " in line:
            return line.split("serves at ")[1].split(": ")[0]
    raise AssertionError("the process ended")


def test_a_damaged_journal_ends_the_process_with_one_line_and_stays(tmp_path: Path) -> None:
    file = tmp_path / FILE_NAME
    file.write_bytes(b"scribble" * 1000)
    with process("--port", "0", "--data-dir", str(tmp_path)) as child:
        _, output = child.communicate(timeout=60)
    assert child.returncode == 1
    assert str(file) in output
    assert len(output.splitlines()) == 1
    assert file.read_bytes() == b"scribble" * 1000


@pytest.mark.parametrize(
    "flags", [("--checkpoint-seconds", "60"), ("--checkpoint-keep", "9"), ("--checkpoint-full-every", "2")]
)
def test_settings_of_checkpoints_need_a_folder_for_them(told: Told, flags: tuple[str, str], tmp_path: Path) -> None:
    refused = told.run(*flags)
    assert refused.exit_code == 2
    assert f"{flags[0]} without --checkpoint-dir makes no checkpoints" in refused.output
    assert told(*flags, "--checkpoint-dir", str(tmp_path)).checkpoints.directory == tmp_path


def test_a_relative_folder_for_checkpoints_means_the_same_to_every_process(
    told: Told, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert told("--checkpoint-dir", "saved").checkpoints.directory == tmp_path / "saved"


@pytest.mark.parametrize(("kind", "program"), [("ps", "ps-server"), ("worker", "the training script")])
def test_the_coordinator_refuses_the_tasks_of_others(told: Told, kind: str, program: str) -> None:
    task = json.loads(TF_CONFIG) | {"task": {"type": kind, "index": 1}}
    refused = told.run(TF_CONFIG=json.dumps(task))
    assert refused.exit_code == 2
    assert f"ps-coordinator runs the chief; this TF_CONFIG says {kind} 1" in refused.output
    assert f"run {program} with it" in refused.output


def test_the_engine_is_asked_for_the_workers_of_the_job(told: Told, tmp_path: Path) -> None:
    config = told("--workers", "3", "--rebalance", "--engine", f"file:{tmp_path / 'request'}")
    assert config.elastic == ElasticSettings(rebalance=True, workers=3)
    assert config.words["workers from"] == f"the reader of {tmp_path / 'request'}"
    assert told("--engine", "file:request", "--engine-workers", "5").elastic == ElasticSettings(workers=5)
    assert told("--workers", "3").elastic == ElasticSettings()


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--engine", "file:request"), "--engine needs the number of workers"),
        (("--engine-workers", "3"), "need --engine"),
        (("--engine", "docker", "--workers", "1"), "--engine is not understood"),
        (("--engine", "file:request", "--engine-workers", "3", "--engine-most", "2"), "below the workers"),
    ],
)
def test_an_engine_that_cannot_work_is_an_error(told: Told, arguments: tuple[str, ...], named: str) -> None:
    result = told.run(*arguments)
    assert result.exit_code == 2
    assert named in " ".join(result.output.split())


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        ("step=3", "is of step 3; expected: a checkpoint: there is none"),
        ("step=", "a step of a checkpoint is a number"),
        ("step=-1", "a step of a checkpoint is a number"),
        ("step=1e3", "a step of a checkpoint is a number"),
        ("step=" + 5000 * "9", "a step of a checkpoint is a number"),
        ("./step=3", "step=3 is not a complete checkpoint"),
    ],
)
def test_a_step_to_restore_that_is_none_is_an_error(told: Told, tmp_path: Path, asked: str, named: str) -> None:
    result = told.run("--checkpoint-dir", str(tmp_path), "--restore", asked)
    assert result.exit_code == 2
    assert named in " ".join(result.output.split())


def test_a_step_to_restore_needs_a_folder_to_look_in(told: Told) -> None:
    result = told.run("--restore", "step=3")
    assert result.exit_code == 2
    assert "--restore step=3 needs a folder to look in" in " ".join(result.output.split())


def test_a_job_begins_with_the_checkpoint_of_a_step(told: Told, tmp_path: Path) -> None:
    job = Job.of(shard_map_of(small_spec(), 1))
    first = job.save(tmp_path).folder
    found = told("--checkpoint-dir", str(tmp_path), "--restore", "step=0", "--seed", "1")
    assert found.checkpoints.restored == first
    assert found.saved.folder == first


def test_a_job_that_begins_after_a_checkpoint_that_is_kept_names_it(told: Told, tmp_path: Path, caplog) -> None:
    job = Job.of(shard_map_of(small_spec(), 1))
    first, newest = (job.save(tmp_path, now=float(now)).folder for now in range(2))
    protect(tmp_path, 0.5, KeptMark("loss grew far above its history", "worker"))
    told("--checkpoint-dir", str(tmp_path), "--restore", "latest", "--seed", "1")
    assert f"the job continues from {newest.name}, and {first.name} was kept before it: loss grew" in caplog.text
    assert "--restore step=0 goes back to that one" in caplog.text
    caplog.clear()
    told("--checkpoint-dir", str(tmp_path), "--restore", str(first), "--seed", "1")
    assert "was kept" not in caplog.text


def test_the_checkpoint_that_a_job_begins_with_is_not_pruned(told, tmp_path):
    job = Job.of(shard_map_of(small_spec(), 1))
    first, newest = (job.save(tmp_path).folder for _ in range(2))
    seed = ("--seed", "1")
    assert told("--checkpoint-dir", str(tmp_path), "--restore", str(first), *seed).checkpoints.restored == first
    assert told("--checkpoint-dir", str(tmp_path), "--restore", "latest", *seed).checkpoints.restored == newest
    assert told("--checkpoint-dir", str(tmp_path)).checkpoints.restored is None
