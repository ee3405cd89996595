"""Parses ``TF_CONFIG``, with the rules and errors of TensorFlow."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from ps_protocol.errors import ConfigError
from ps_protocol.text import whole_number

TASK_TYPES = ("chief", "worker", "ps", "evaluator")

EXAMPLE = (
    '{"cluster": {"chief": ["host0:7000"], "ps": ["host1:7001"], "worker": ["host2:0"]}, '
    '"task": {"type": "worker", "index": 0}}'
)


@dataclass(frozen=True, slots=True)
class TfConfig:
    """One process's ``TF_CONFIG``: the cluster's addresses and which task of it this process is.

    What each task runs in torch-ps:

    - ``chief`` – ``ps-coordinator``, serving at the chief's address. A cluster without a chief is allowed; the
      coordinator's address then comes from ``PS_COORDINATOR``.
    - ``ps`` i – ``ps-server``, as shard i, serving at its address.
    - ``worker`` i – the training script, as rank i. Its address is not used: workers do not serve.
    - ``evaluator`` – the training script, as an evaluator. It need not be listed in the cluster.
    """

    cluster: Mapping[str, tuple[str, ...]]
    task_type: str
    task_index: int

    @classmethod
    def parse(cls, text: str, *, needs_ps: bool = True) -> TfConfig:
        """Read ``text``. Raises ConfigError saying which key is wrong, what it should be, and an example.

        Without ``needs_ps`` the cluster may be one of workers alone, of whom a chief is the first.
        """
        try:
            config = json.loads(text)
        except ValueError as error:
            raise _error("TF_CONFIG is not JSON", actual=f"{text[:200]} ({error})") from error
        config = _object(config, "TF_CONFIG")
        cluster = {
            str(kind): _addresses(str(kind), listed)
            for kind, listed in _object(_key(config, "cluster"), "cluster").items()
        }
        _check_cluster(cluster, needs_ps=needs_ps)
        task = _object(_key(config, "task"), "task")
        kind, index = _task(cluster, _key(task, "type", "task."), _key(task, "index", "task."))
        return cls(MappingProxyType(cluster), kind, index)

    @property
    def coordinator_address(self) -> str | None:
        """The chief's host:port, None in a cluster without a chief."""
        return next(iter(self.cluster.get("chief", ())), None)

    @property
    def shards(self) -> int:
        """How many shards the cluster has."""
        return len(self.cluster["ps"])

    @property
    def workers(self) -> int:
        """How many workers the cluster has."""
        return len(self.cluster["worker"])

    def shard_address(self, index: int) -> str:
        """host:port of shard ``index``. Raises ConfigError when the cluster has no such shard."""
        if not 0 <= index < self.shards:
            raise _error(f"TF_CONFIG has no ps {index}", expected=f"0 to {self.shards - 1}", actual=str(index))
        return self.cluster["ps"][index]


def _error(message: str, *, expected: str = "", actual: str = "") -> ConfigError:
    return ConfigError(
        message, expected=expected, actual=actual, remedy=f"correct or unset TF_CONFIG, such as {EXAMPLE}"
    )


def _object(value: object, name: str) -> dict[object, object]:
    if not isinstance(value, dict):
        raise _error(f"{name} is not a JSON object", expected="{…}", actual=json.dumps(value)[:200])
    return value


def _key(config: dict[object, object], name: str, prefix: str = "") -> object:
    if name not in config:
        raise _error(f"TF_CONFIG has no '{prefix}{name}'", actual=f"keys {sorted(map(str, config))}")
    return config[name]


def _addresses(kind: str, listed: object) -> tuple[str, ...]:
    if kind not in TASK_TYPES:
        raise _error(f"unknown task type '{kind}' in TF_CONFIG's cluster", expected=", ".join(TASK_TYPES), actual=kind)
    if not isinstance(listed, list):
        raise _error(f"cluster.{kind} is not a list", expected='["host:port", …]', actual=json.dumps(listed)[:200])
    for address in listed:
        host, _, port = address.rpartition(":") if isinstance(address, str) else ("", "", "")
        if not host or (number := whole_number(port)) is None or number > 65535:
            raise _error(
                f"an address of cluster.{kind} is not host:port", expected="host:port", actual=json.dumps(address)
            )
    return tuple(listed)


def _check_cluster(cluster: Mapping[str, tuple[str, ...]], *, needs_ps: bool) -> None:
    if needs_ps and not cluster.get("ps"):
        raise _error("TF_CONFIG's cluster has no ps", expected="at least one", actual="none")
    if not cluster.get("worker") and (needs_ps or not cluster.get("chief")):
        raise _error("TF_CONFIG's cluster has no worker", expected="at least one", actual="none")
    chiefs = len(cluster.get("chief", ()))
    if chiefs > 1:
        raise _error("TF_CONFIG's cluster has more than one chief", expected="at most one", actual=str(chiefs))


def _task(cluster: Mapping[str, tuple[str, ...]], kind: object, index: object) -> tuple[str, int]:
    if not isinstance(kind, str) or kind not in TASK_TYPES:
        raise _error("TF_CONFIG's task.type is unknown", expected=", ".join(TASK_TYPES), actual=json.dumps(kind))
    # TensorFlow takes "0" for 0 as well.
    if isinstance(index, str) and (number := whole_number(index)) is not None:
        index = number
    if not isinstance(index, int) or isinstance(index, bool) or index < 0:
        raise _error("TF_CONFIG's task.index is not a number from 0", expected="0, 1, …", actual=json.dumps(index))
    if kind not in cluster and kind != "evaluator":
        raise _error(
            f"TF_CONFIG's task is a {kind}, its cluster has none", expected=", ".join(sorted(cluster)), actual=kind
        )
    if kind in cluster and index >= len(cluster[kind]):
        raise _error(
            f"TF_CONFIG's task.index is out of range for {kind}",
            expected=f"0 to {len(cluster[kind]) - 1}",
            actual=str(index),
        )
    return kind, index
