"""What a job in a Ray cluster asks of Ray, where its servers listen and with which arguments. Needs no Ray; 0.2 s."""

from __future__ import annotations

import math
import pickle
from pathlib import Path
from typing import Any

import pytest

from ps_protocol.cluster.scaling import WorkerRange
from ps_protocol.errors import ConfigError
from ps_protocol.security.settings import SecuritySettings
from ps_server.coordinator.main import main as coordinator_program
from ps_server.shard.main import main as shard_program
from ps_worker.ray.plan import (
    RayPlan,
    ServerKind,
    ServerName,
    asked,
    fits_never,
    had,
    pushing_per_host,
    server_command,
    server_environment,
    uses_loopback,
    worker_environment,
)

COORDINATOR, SHARD = ServerName(ServerKind.COORDINATOR), ServerName(ServerKind.SHARD, 1)
STANDBY = ServerName(ServerKind.STANDBY, 1)

TLS = {"tls_cert": Path("c"), "tls_key": Path("k"), "tls_ca": Path("a")}


def test_each_server_has_a_bundle_of_its_own_and_each_worker() -> None:
    plan = RayPlan(shards=2, workers=3, shard_resources={"CPU": 2, "memory": 1e9}, worker_resources={"GPU": 1})
    assert [str(server) for server in plan.servers()] == ["the coordinator", "shard 0", "shard 1"]
    assert plan.server_bundles() == [{"CPU": 0.5}, {"CPU": 2, "memory": 1e9}, {"CPU": 2, "memory": 1e9}]
    assert plan.worker_bundles() == [{"GPU": 1}] * 3


def test_standbys_have_bundles_and_folders_of_their_own() -> None:
    plan = RayPlan(shards=2, workers=1, standbys=True, data_dir=Path("/kept"))
    assert [str(server) for server in plan.servers()][3:] == ["the standby of shard 0", "the standby of shard 1"]
    assert len(plan.server_bundles()) == 5
    folders = []
    for server in (SHARD, STANDBY):
        command = server_command(plan, server, "10.0.0.1", "10.0.0.2:7000")
        assert "--standby" in command
        folders.append(command[command.index("--data-dir") + 1])
    assert folders == ["/kept", "/kept/standbys"]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"shards": 0}, "shards is not a whole number from 1"),
        ({"workers": 1.5}, "workers is not a whole number"),
        ({"server_restarts": -1}, "server_restarts is not a whole number from 0"),
        ({"mode": "fast"}, "mode is not one of a job; expected: async, ssp, sync; actual: 'fast'"),
        ({"reconnect_timeout_seconds": 0}, "reconnect_timeout_seconds is not a length of time"),
        ({"connect_timeout_seconds": math.inf}, "connect_timeout_seconds is not a length of time"),
        ({"placement": "spread"}, "expected: PACK, SPREAD, STRICT_PACK, STRICT_SPREAD"),
        ({"shard_resources": {}}, "shard_resources is not what Ray can reserve"),
        ({"worker_resources": {"CPU": 0}}, "worker_resources"),
        ({"coordinator_resources": {"CPU": math.nan}}, "coordinator_resources"),
        ({"standbys": True}, "give RayCluster.. a data_dir"),
    ],
)
def test_settings_that_no_job_can_have_are_refused(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        RayPlan(**{"shards": 1, "workers": 1, **wrong})


def test_a_plan_can_be_sent_to_actors() -> None:
    plan = RayPlan(shards=2, workers=3, security=SecuritySettings(token="secret"))
    assert pickle.loads(pickle.dumps(plan)) == plan


def test_the_coordinator_takes_any_port_first_and_the_same_one_again() -> None:
    plan = RayPlan(shards=2, workers=3, mode="ssp", coordinator_options=("--staleness", "8"), data_dir=Path("/kept"))
    first = server_command(plan, COORDINATOR, "10.0.0.1", "")
    assert first[first.index("--port") + 1] == "0"
    again = server_command(plan, COORDINATOR, "10.0.0.1", "10.0.0.1:7321")
    assert again[again.index("--port") + 1] == "7321"
    assert first[-2:] == ["--staleness", "8"]


def test_a_range_of_workers_is_that_of_the_coordinator_which_is_asked_for_it() -> None:
    plan = RayPlan(shards=1, workers=2, worker_range=WorkerRange(2, 8), worker_restarts=0)
    command = server_command(plan, COORDINATOR, "10.0.0.1", "")
    assert command[command.index("--workers") + 1] == "2:8"
    assert command[-2:] == ["--engine", "launcher:workers"]
    assert len(plan.worker_bundles()) == 2
    assert RayPlan(shards=1, workers=0, worker_range=WorkerRange.of(0)).worker_bundles() == []


@pytest.mark.parametrize(
    ("server", "program"), [(COORDINATOR, coordinator_program), (SHARD, shard_program), (STANDBY, shard_program)]
)
def test_the_programs_know_the_arguments(server: ServerName, program: Any) -> None:
    plan = RayPlan(shards=2, workers=3, mode="sync", standbys=True, data_dir=Path("/kept"))
    _, _, _, module, *arguments = server_command(plan, server, "127.0.0.1", "127.0.0.1:7000")
    assert module == program.callback.__module__
    program.make_context(module, [*arguments, "--ready-file", "/kept/address"])


def test_servers_do_not_take_the_variables_of_another_job() -> None:
    inherited = {"PATH": "/bin", "PS_COORDINATOR_SHARDS": "9", "PS_TOKEN": "old", "TF_CONFIG": "{}", "PSMODULE": "x"}
    plan = RayPlan(shards=1, workers=1, security=SecuritySettings(token_file=Path("/keys/tokens")))
    assert server_environment(inherited, plan) == {
        "PATH": "/bin",
        "PSMODULE": "x",
        "PS_TOKEN_FILE": "/keys/tokens",
    }


def test_workers_find_the_job_and_only_a_supervisor_names_a_lineage() -> None:
    plan = RayPlan(shards=1, workers=2, security=SecuritySettings(token="secret"))
    found = worker_environment(plan, "10.0.0.1:7000", 1, "")
    assert found == {"PS_COORDINATOR": "10.0.0.1:7000", "PS_ROLE": "worker", "PS_RANK": "1", "PS_TOKEN": "secret"}
    lineages = {worker_environment(plan, "10.0.0.1:7000", rank, "abc")["PS_LINEAGE"] for rank in (0, 1)}
    assert len(lineages) == 2


@pytest.mark.parametrize(
    ("plan", "nodes", "told"),
    [
        (RayPlan(shards=1, workers=2), ["10.0.0.1", "10.0.0.2"], "sync"),
        (RayPlan(shards=1, workers=2), ["10.0.0.1", "10.0.0.1"], None),
        (RayPlan(shards=1, workers=1), ["10.0.0.1", "10.0.0.2"], None),
        (RayPlan(shards=1, workers=0, worker_range=WorkerRange(0, 4)), ["10.0.0.1", "10.0.0.2"], "sync"),
        (RayPlan(shards=1, workers=2, per_host=False), ["10.0.0.1", "10.0.0.2"], "0"),
        (RayPlan(shards=1, workers=2, per_host=True), ["10.0.0.1"], "1"),
    ],
    ids=str,
)
def test_workers_push_together_in_sync_on_several_machines_unless_told_otherwise(
    plan: RayPlan, nodes: list[str], told: str | None
) -> None:
    assert worker_environment(pushing_per_host(plan, nodes), "10.0.0.1:7000", 0, "").get("PS_PER_HOST") == told


def test_one_machine_needs_no_certificates_and_its_servers_stay_on_loopback() -> None:
    assert uses_loopback(SecuritySettings(), ["10.0.0.1", "10.0.0.1"])


@pytest.mark.parametrize(
    "security",
    [SecuritySettings(insecure=True), SecuritySettings(**TLS, token_file=Path("t"))],
    ids=["insecure", "tls"],
)
@pytest.mark.parametrize("nodes", [["10.0.0.1"], ["10.0.0.1", "10.0.0.2"]])
def test_a_job_that_is_secured_or_told_to_trust_listens_on_the_nodes_addresses(
    security: SecuritySettings, nodes: list[str]
) -> None:
    assert not uses_loopback(security, nodes)


@pytest.mark.parametrize(
    ("security", "lacking"),
    [
        (SecuritySettings(), "not encrypted"),
        (SecuritySettings(**TLS), "not authenticated"),
        (SecuritySettings(token_file=Path("t")), "not encrypted"),
    ],
)
def test_several_machines_need_certificates_and_tokens(security: SecuritySettings, lacking: str) -> None:
    with pytest.raises(ConfigError, match=lacking) as raised:
        uses_loopback(security, ["10.0.0.2", "10.0.0.1"])
    assert raised.value.actual == "nodes at 10.0.0.1, 10.0.0.2"


BUNDLES = [{"CPU": 0.5}, {"CPU": 2.0, "GPU": 1.0}, {"CPU": 2.0, "GPU": 1.0}]


def test_what_was_asked_for_and_what_there_is_are_told_in_words() -> None:
    assert asked(BUNDLES, "SPREAD") == "SPREAD of 1 × CPU 0.5, 2 × CPU 2 GPU 1"
    free = {"CPU": 1.0}
    assert had(BUNDLES, {"CPU": 4.0}, free, 2) == "2 node(s) with CPU 4 (1 free), GPU 0 (0 free)"


def test_resources_that_the_cluster_cannot_have_are_told_from_those_in_use() -> None:
    assert fits_never(BUNDLES, {"CPU": 4.5, "GPU": 2.0}) == []
    assert fits_never(BUNDLES, {"CPU": 4.4}) == ["CPU", "GPU"]
