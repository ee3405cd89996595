"""A worker's settings come from arguments, then PS_* variables, then TF_CONFIG, then defaults."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ps_protocol.cluster.view import Role
from ps_protocol.errors import ConfigError
from ps_worker.session.config import WorkerConfig

WITHOUT_CHIEF = {"ps": ["p:1"], "worker": ["w0:1", "w1:1"]}
CLUSTER = {"chief": ["tf:7000"], **WITHOUT_CHIEF}


def tf_config(kind: str = "worker", index: int = 1, cluster: Any = CLUSTER) -> dict[str, str]:
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": kind, "index": index}})}


PS = {
    "PS_COORDINATOR": "env:7000",
    "PS_ROLE": "worker",
    "PS_RANK": "0",
    "PS_DEVICE": "cpu",
    "PS_CONNECT_TIMEOUT": "5",
    "PS_RECONNECT_TIMEOUT": "7.5",
}


def test_the_address_alone_is_enough() -> None:
    assert WorkerConfig.from_environment({}, coordinator="a:1") == WorkerConfig("a:1", Role.WORKER, None, None, 60, 60)


def test_variables_set_everything() -> None:
    assert WorkerConfig.from_environment(PS) == WorkerConfig("env:7000", Role.WORKER, 0, "cpu", 5.0, 7.5)


def test_arguments_win_over_variables() -> None:
    config = WorkerConfig.from_environment(
        PS,
        coordinator="arg:1",
        role="evaluator",
        rank=3,
        device="cuda:1",
        connect_timeout_seconds=1,
        reconnect_timeout_seconds=2,
    )
    assert config == WorkerConfig("arg:1", Role.EVALUATOR, 3, "cuda:1", 1.0, 2.0)


@pytest.mark.parametrize(
    ("environ", "address", "role", "rank"),
    [
        (tf_config(), "tf:7000", Role.WORKER, 1),
        (tf_config("evaluator", 0), "tf:7000", Role.EVALUATOR, 0),
        ({**tf_config(), **PS}, "env:7000", Role.WORKER, 0),
        ({**dict.fromkeys(PS, ""), **tf_config()}, "tf:7000", Role.WORKER, 1),
        ({**tf_config(cluster=WITHOUT_CHIEF), "PS_COORDINATOR": "env:7000"}, "env:7000", Role.WORKER, 1),
        ({**tf_config(), "PS_ROLE": "evaluator"}, "tf:7000", Role.EVALUATOR, None),
    ],
    ids=["a worker", "an evaluator", "variables win", "empty variables", "no chief", "another role has no rank"],
)
def test_tf_config_gives_what_no_variable_says(environ, address, role, rank) -> None:
    config = WorkerConfig.from_environment(environ)
    assert (config.coordinator, config.role, config.rank) == (address, role, rank)


def test_without_a_chief_and_variable_the_error_says_so() -> None:
    with pytest.raises(ConfigError, match="no chief"):
        WorkerConfig.from_environment(tf_config(cluster=WITHOUT_CHIEF))


def test_nothing_given_tells_every_way() -> None:
    with pytest.raises(ConfigError) as caught:
        WorkerConfig.from_environment({})
    for way in ("ps-run", "PS_COORDINATOR", "TF_CONFIG", "connect("):
        assert way in caught.value.remedy


@pytest.mark.parametrize(("kind", "program"), [("ps", "ps-server"), ("chief", "ps-coordinator")])
def test_a_server_task_is_told_which_program_belongs_there(kind: str, program: str) -> None:
    with pytest.raises(ConfigError, match=program):
        WorkerConfig.from_environment(tf_config(kind, 0))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("PS_ROLE", "shard"),
        ("PS_RANK", "one"),
        ("PS_RANK", "-1"),
        ("PS_CONNECT_TIMEOUT", "soon"),
        ("PS_CONNECT_TIMEOUT", "inf"),
        ("PS_CONNECT_TIMEOUT", "nan"),
        ("PS_RECONNECT_TIMEOUT", "-1"),
        ("PS_COORDINATOR", "nohost"),
        ("PS_COORDINATOR", "host:port"),
        ("PS_COORDINATOR", "host:0"),
    ],
)
def test_a_bad_variable_is_named(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=name):
        WorkerConfig.from_environment({"PS_COORDINATOR": "a:1", name: value})


TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "m", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("environ", "address", "rank"),
    [
        ({"PS_COORDINATOR": "env:7000"}, "env:7000", 3),
        ({"PS_COORDINATOR": "env:7000", "PS_RANK": "1"}, "env:7000", 1),
        ({"PS_COORDINATOR": ":7000"}, "m:7000", 3),
        ({"PS_COORDINATOR": ":7000", "MASTER_ADDR": "::1"}, "[::1]:7000", 3),
        ({"PS_COORDINATOR": "env:7000", "PS_ROLE": "evaluator"}, "env:7000", None),
        ({"PS_COORDINATOR": "env:7000", "WORLD_SIZE": ""}, "env:7000", None),
        (tf_config(), "tf:7000", 1),
        ({**tf_config(), "PS_ROLE": "evaluator"}, "tf:7000", None),
    ],
)
def test_the_variables_of_torchrun_fill_in_what_nothing_else_says(environ, address, rank) -> None:
    config = WorkerConfig.from_environment({**TORCHRUN, **environ})
    assert (config.coordinator, config.rank) == (address, rank)


@pytest.mark.parametrize("environ", [TORCHRUN, {**PS, "PS_RANK": "4"}])
def test_rank_zero_as_an_argument_wins(environ: dict[str, str]) -> None:
    assert WorkerConfig.from_environment(environ, coordinator="a:1", rank=0).rank == 0


@pytest.mark.parametrize(
    ("environ", "what"), [({"RANK": "4"}, "not below WORLD_SIZE"), ({"RANK": "x"}, "RANK"), ({"WORLD_SIZE": "-2"}, "W")]
)
def test_variables_of_torchrun_that_do_not_fit_are_refused_unless_another_setting_wins(environ, what) -> None:
    with pytest.raises(ConfigError, match=what):
        WorkerConfig.from_environment({"PS_COORDINATOR": "a:1", **TORCHRUN, **environ})
    assert WorkerConfig.from_environment({"PS_COORDINATOR": "a:1", "PS_RANK": "0", **TORCHRUN, **environ}).rank == 0


def test_torchrun_alone_names_no_coordinator() -> None:
    with pytest.raises(ConfigError, match="torchrun names none"):
        WorkerConfig.from_environment(TORCHRUN)
    with pytest.raises(ConfigError, match="no host"):
        WorkerConfig.from_environment({"PS_COORDINATOR": ":7000"})


def test_workers_of_a_host_push_together_where_the_argument_or_the_environment_says_so():
    given = {"PS_COORDINATOR": "a:1"}
    assert not WorkerConfig.from_environment(given).per_host
    assert WorkerConfig.from_environment({**given, "PS_PER_HOST": "1"}).per_host
    assert WorkerConfig.from_environment(given, per_host=True).per_host
    assert not WorkerConfig.from_environment({**given, "PS_PER_HOST": "1"}, per_host=False).per_host
    assert WorkerConfig.from_environment({**given, "PS_PER_HOST": "sync"}).per_host == "sync"
    with pytest.raises(ConfigError, match="PS_PER_HOST is not 0, 1 or sync"):
        WorkerConfig.from_environment({**given, "PS_PER_HOST": "yes"})
