"""Which replica a process is, from what is set. Under a CPU second."""

from __future__ import annotations

import json

import pytest

from ps_protocol.cluster.replicas import STORE_VARIABLE
from ps_worker import ConfigError
from ps_worker.strategies.process_group import Placement, placement
from ps_worker.strategies.registry import chosen_name

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "host",
    "MASTER_PORT": "1",
}


def tf_config(kind, index, **cluster):
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": kind, "index": index}})}


def test_without_settings_a_process_is_alone():
    assert placement({}) == Placement(0, 1, 0, 1, "")
    assert placement({**TORCHRUN, "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}) == (
        Placement()
    )


def test_the_variables_of_torchrun():
    assert placement(TORCHRUN) == Placement(3, 4, 1, 2, "env://")


def test_the_file_of_ps_run_is_preferred_to_a_port():
    assert placement({**TORCHRUN, STORE_VARIABLE: "/a/file"}).rendezvous == "file:///a/file"


def test_workers_of_tf_config_are_replicas_and_the_chief_is_the_first():
    workers = ["one:1", "two:2", "two:3"]
    assert placement(tf_config("worker", 2, worker=workers)) == Placement(2, 3, 1, 2, "tcp://one:1")
    assert placement(tf_config("worker", 1, chief=["zero:9"], worker=workers)) == Placement(2, 4, 0, 2, "tcp://zero:9")
    assert placement(tf_config("chief", 0, chief=["zero:9"], worker=workers)) == Placement(0, 4, 0, 1, "tcp://zero:9")
    assert placement(tf_config("worker", 0, worker=["one:1"])) == Placement()


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({**TORCHRUN, "RANK": "4"}, "do not fit together"),
        ({**TORCHRUN, "LOCAL_RANK": "2"}, "do not fit together"),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "5"}, "do not fit together"),
        ({**TORCHRUN, "RANK": "one"}, "RANK is not a whole number from 0; actual: 'one'"),
        ({**TORCHRUN, "MASTER_ADDR": ""}, "MASTER_ADDR is not set"),
        ({**TORCHRUN, "MASTER_PORT": ""}, "MASTER_PORT is not set"),
        (tf_config("worker", 0, worker=["a:1"], ps=["b:1"]), "not of a data-parallel job"),
        (tf_config("evaluator", 0, worker=["a:1"]), "not of a data-parallel job"),
        (tf_config("worker", 0, worker=[]), "has no worker"),
    ],
)
def test_settings_that_do_not_fit_are_named(environ, message):
    with pytest.raises(ConfigError, match=message):
        placement(environ)


@pytest.mark.parametrize(
    ("environ", "name"),
    [
        ({}, "one_device"),
        ({"PS_STRATEGY": "mirrored", "PS_COORDINATOR": "host:1"}, "mirrored"),
        ({"PS_COORDINATOR": "host:1"}, "parameter_server"),
        (tf_config("worker", 0, worker=["a:1"], ps=["b:1"]), "parameter_server"),
        (tf_config("worker", 0, worker=["a:1", "b:1"]), "multi_worker_mirrored"),
        (TORCHRUN, "multi_worker_mirrored"),
    ],
)
def test_the_strategy_that_nobody_named_is_the_one_that_the_environment_is_for(environ, name):
    assert chosen_name(environ) == name
