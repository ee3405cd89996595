"""TF_CONFIG means what it means to TensorFlow, and each mistake in it is named."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ps_protocol.cluster.tf_config import EXAMPLE, TfConfig
from ps_protocol.errors import ConfigError

CLUSTER = {"chief": ["c:7000"], "ps": ["p0:7001", "p1:7002"], "worker": ["w0:1", "w1:1", "w2:1"]}


def text(cluster: Any = CLUSTER, kind: Any = "worker", index: Any = 1) -> str:
    return json.dumps({"cluster": cluster, "task": {"type": kind, "index": index}})


def test_a_full_config_gives_addresses_counts_and_the_task() -> None:
    config = TfConfig.parse(text())
    assert config.coordinator_address == "c:7000"
    assert (config.shards, config.workers) == (2, 3)
    assert [config.shard_address(0), config.shard_address(1)] == ["p0:7001", "p1:7002"]
    assert (config.task_type, config.task_index) == ("worker", 1)


def test_the_example_of_the_remedies_is_valid() -> None:
    assert TfConfig.parse(EXAMPLE).coordinator_address == "host0:7000"


def test_without_a_chief_the_coordinator_is_not_known() -> None:
    assert TfConfig.parse(text({"ps": ["p:1"], "worker": ["w:1"]}, index=0)).coordinator_address is None


def test_an_evaluator_need_not_be_in_the_cluster() -> None:
    assert TfConfig.parse(text(kind="evaluator", index=0)).task_type == "evaluator"


def test_an_index_written_as_text_counts_as_in_tensorflow() -> None:
    assert TfConfig.parse(text(index="2")).task_index == 2


def test_other_keys_of_managed_platforms_are_let_through() -> None:
    assert TfConfig.parse(json.dumps({**json.loads(text()), "environment": "cloud", "job": {}})).workers == 3


REFUSED = {
    "not JSON": ("{", "not JSON"),
    "a list": ("[]", "TF_CONFIG is not a JSON object"),
    "no cluster": ('{"task": {"type": "ps", "index": 0}}', "no 'cluster'"),
    "no task": (json.dumps({"cluster": CLUSTER}), "no 'task'"),
    "cluster is a list": (text([]), "cluster is not a JSON object"),
    "task is a list": (json.dumps({"cluster": CLUSTER, "task": []}), "task is not a JSON object"),
    "no task type": (json.dumps({"cluster": CLUSTER, "task": {"index": 0}}), "no 'task.type'"),
    "no task index": (json.dumps({"cluster": CLUSTER, "task": {"type": "ps"}}), "no 'task.index'"),
    "unknown type in the cluster": (text({**CLUSTER, "server": ["s:1"]}), "unknown task type 'server'"),
    "unknown task type": (text(kind="master"), "task.type is unknown"),
    "task type not text": (text(kind=["ps"]), "task.type is unknown"),
    "addresses not a list": (text({**CLUSTER, "ps": "p:1"}), "cluster.ps is not a list"),
    "address not text": (text({**CLUSTER, "ps": [7]}), "cluster.ps is not host:port"),
    "address without port": (text({**CLUSTER, "ps": ["p"]}), "cluster.ps is not host:port"),
    "address with a port of other digits": (text({**CLUSTER, "ps": ["p:²"]}), "cluster.ps is not host:port"),
    "address with a port too high": (text({**CLUSTER, "ps": ["p:70000"]}), "cluster.ps is not host:port"),
    "no ps": (text({"worker": ["w:1"]}, index=0), "no ps"),
    "empty ps": (text({"ps": [], "worker": ["w:1"]}, index=0), "no ps"),
    "no worker": (text({"ps": ["p:1"]}, kind="ps", index=0), "no worker"),
    "two chiefs": (text({**CLUSTER, "chief": ["a:1", "b:1"]}), "more than one chief"),
    "index too high": (text(index=3), "out of range for worker"),
    "index below zero": (text(index=-1), "not a number from 0"),
    "index not a number": (text(index="first"), "not a number from 0"),
    "index true": (text(index=True), "not a number from 0"),
    "task not in the cluster": (text({"ps": ["p:1"], "worker": ["w:1"]}, kind="chief", index=0), "task is a chief"),
    "evaluator listed, index too high": (text({**CLUSTER, "evaluator": ["e:1"]}, "evaluator"), "out of range"),
}


@pytest.mark.parametrize(("config", "said"), REFUSED.values(), ids=REFUSED.keys())
def test_a_mistake_is_named_with_its_remedy(config: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        TfConfig.parse(config)
    assert said in caught.value.message
    assert "TF_CONFIG" in caught.value.remedy


def test_a_shard_the_cluster_does_not_have_is_refused() -> None:
    with pytest.raises(ConfigError, match="no ps 2"):
        TfConfig.parse(text()).shard_address(2)
