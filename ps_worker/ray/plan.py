"""What a job in a Ray cluster consists of, what each part asks of Ray, its command and its environment. Pure."""

from __future__ import annotations

import enum
import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from ps_protocol.client.coordinator import LINEAGE_VARIABLE
from ps_protocol.cluster.scaling import WorkerRange
from ps_protocol.errors import ConfigError
from ps_protocol.launch.commands import coordinator_command, shard_command
from ps_protocol.model.spec import Mode
from ps_protocol.security.settings import SecuritySettings

LOOPBACK = "127.0.0.1"

PLACEMENTS = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")
"""The strategies of Ray's placement groups."""


ONE_CPU = MappingProxyType({"CPU": 1.0})
HALF_A_CPU = MappingProxyType({"CPU": 0.5})


class ServerKind(enum.Enum):
    """What a server is."""

    COORDINATOR = "coordinator"
    SHARD = "shard"
    STANDBY = "standby"


@dataclass(frozen=True, slots=True)
class ServerName:
    """One server of a job; a standby has the number of its shard."""

    kind: ServerKind
    index: int = 0

    def __str__(self) -> str:
        match self.kind:
            case ServerKind.COORDINATOR:
                return "the coordinator"
            case ServerKind.SHARD:
                return f"shard {self.index}"
            case ServerKind.STANDBY:
                return f"the standby of shard {self.index}"


@dataclass(frozen=True, slots=True)
class RayPlan:
    """The settings of a ``RayCluster``, checked when they are given. Raises ConfigError."""

    shards: int
    workers: int
    mode: str = "async"
    #: PACK or SPREAD, for the servers.
    placement: str = "SPREAD"
    data_dir: Path | None = None
    standbys: bool = False
    coordinator_resources: Mapping[str, float] = field(default_factory=lambda: dict(HALF_A_CPU))
    #: Of each shard and each standby.
    shard_resources: Mapping[str, float] = field(default_factory=lambda: dict(ONE_CPU))
    worker_resources: Mapping[str, float] = field(default_factory=lambda: dict(ONE_CPU))
    #: How often lost servers are started again, all together.
    server_restarts: int = 10
    #: The same for the workers of one run.
    worker_restarts: int = 3
    #: How long workers wait for the job to be complete, and for a server that went away; None: from their environment,
    #: else 10 minutes.
    connect_timeout_seconds: float | None = None
    reconnect_timeout_seconds: float | None = None
    #: Further options of ps-coordinator and ps-server.
    coordinator_options: Sequence[str] = ()
    shard_options: Sequence[str] = ()
    security: SecuritySettings = field(default_factory=SecuritySettings)
    #: How many workers the job may have; None: ``workers``, which it begins with, and no others.
    worker_range: WorkerRange | None = None
    #: Workers of one machine push together; "sync": in that mode, where nothing else is said to a worker; None: as they
    #: are told themselves.
    per_host: bool | Literal["sync"] | None = None

    def __post_init__(self) -> None:
        _at_least(1, shards=self.shards)
        _at_least(1 if self.worker_range is None else 0, workers=self.workers)
        _at_least(0, server_restarts=self.server_restarts, worker_restarts=self.worker_restarts)
        _check_times(
            connect_timeout_seconds=self.connect_timeout_seconds,
            reconnect_timeout_seconds=self.reconnect_timeout_seconds,
        )
        modes = [mode.value for mode in Mode]
        if self.mode not in modes:
            raise ConfigError(
                "mode is not one of a job",
                expected=", ".join(modes),
                actual=repr(self.mode),
                remedy="correct the mode argument of RayCluster()",
            )
        if self.placement not in PLACEMENTS:
            raise ConfigError(
                "placement is not a strategy of Ray's placement groups",
                expected=", ".join(PLACEMENTS),
                actual=repr(self.placement),
                remedy="correct the placement argument of RayCluster()",
            )
        _check_resources("coordinator_resources", self.coordinator_resources)
        _check_resources("shard_resources", self.shard_resources)
        _check_resources("worker_resources", self.worker_resources)
        if self.standbys and self.data_dir is None:
            raise ConfigError(
                "standbys follow the logs of their shards, and without a folder there are none",
                expected="data_dir",
                actual="no data_dir",
                remedy="give RayCluster() a data_dir, or leave standbys out",
            )

    @property
    def keeps_state(self) -> bool:
        """Whether a server that is started again continues from its folder."""
        return self.data_dir is not None

    def servers(self) -> list[ServerName]:
        """Every server, the coordinator first. The number of its bundle is its index in this list."""
        kinds = (ServerKind.SHARD, ServerKind.STANDBY) if self.standbys else (ServerKind.SHARD,)
        members = [ServerName(kind, index) for kind in kinds for index in range(self.shards)]
        return [ServerName(ServerKind.COORDINATOR), *members]

    def resources(self, server: ServerName) -> dict[str, float]:
        """What ``server`` needs."""
        return dict(self.coordinator_resources if server.kind is ServerKind.COORDINATOR else self.shard_resources)

    def server_bundles(self) -> list[dict[str, float]]:
        """One bundle for each server."""
        return [self.resources(server) for server in self.servers()]

    def worker_bundles(self) -> list[dict[str, float]]:
        """One bundle for each worker."""
        return [dict(self.worker_resources) for _ in range(self.workers)]


def uses_loopback(security: SecuritySettings, node_addresses: Collection[str]) -> bool:
    """Whether servers listen on loopback alone: where all nodes are one machine, and nothing secures the job.

    ``node_addresses``: of all nodes of the Ray cluster, since workers may be on any. Raises ConfigError where there are
    several and the job has no TLS or authenticates nobody.
    """
    if security.insecure or (security.tls and security.authenticates):
        return False
    if len(set(node_addresses)) <= 1:
        return True
    lacking = "callers are not authenticated" if security.tls else "connections are not encrypted"
    raise ConfigError(
        f"the nodes of this Ray cluster are several machines, and {lacking}",
        expected="TLS with tokens or client certificates (docs/security.md)",
        actual=f"nodes at {', '.join(sorted(set(node_addresses)))}",
        remedy="give RayCluster() security=SecuritySettings(tls_ca=…, token_file=…), with files that every node has, "
        "or SecuritySettings(insecure=True) where everybody who reaches the nodes is trusted",
    )


def pushing_per_host(plan: RayPlan, node_addresses: Collection[str]) -> RayPlan:
    """``plan`` with ``per_host`` set: several workers on several machines, which Ray packs together."""
    several = plan.workers > 1 or plan.worker_range is not None
    is_automatic = plan.per_host is None and several and len(set(node_addresses)) > 1
    return replace(plan, per_host="sync") if is_automatic else plan


def _at_least(least: int, **counts: int) -> None:
    for name, count in counts.items():
        if not isinstance(count, int) or count < least:
            raise ConfigError(
                f"{name} is not a whole number from {least}",
                actual=repr(count),
                remedy=f"correct the {name} argument of RayCluster()",
            )


def _check_times(**times: float | None) -> None:
    for name, seconds in times.items():
        if seconds is not None and not (isinstance(seconds, int | float) and 0 < seconds < math.inf):
            raise ConfigError(
                f"{name} is not a length of time",
                expected="seconds, more than 0",
                actual=repr(seconds),
                remedy=f"correct the {name} argument of RayCluster()",
            )


def _check_resources(name: str, resources: Mapping[str, float]) -> None:
    amounts = resources.values()
    if any(not 0 <= amount < math.inf for amount in amounts) or not any(amount > 0 for amount in amounts):
        raise ConfigError(
            f"{name} is not what Ray can reserve",
            expected='amounts from 0, one of them above 0, such as {"CPU": 1, "GPU": 0.5}',
            actual=repr(dict(resources)),
            remedy=f"correct the {name} argument of RayCluster()",
        )


#: Resources that Ray itself makes for each node.
_OF_NODES = "node:"

Amounts = Mapping[str, float]


def asked(bundles: Sequence[Amounts], strategy: str) -> str:
    """``bundles``, equal ones together, such as "SPREAD of 2 × CPU 1, 1 × CPU 0.5"."""
    kinds = Counter(_amounts(bundle, bundle) for bundle in bundles)
    return f"{strategy} of " + ", ".join(f"{count} × {kind}" for kind, count in kinds.items())


def had(bundles: Sequence[Amounts], total: Amounts, free: Amounts, nodes: int) -> str:
    """Of each resource that ``bundles`` name, how much the cluster has and how much of it is free."""
    names = _names(bundles)
    parts = [f"{name} {total.get(name, 0.0):g} ({free.get(name, 0.0):g} free)" for name in names]
    return f"{nodes} node(s) with " + ", ".join(parts)


def fits_never(bundles: Sequence[Amounts], total: Amounts) -> list[str]:
    """The resources of which ``bundles`` ask for more than the cluster has now, free or not."""
    return [name for name in _names(bundles) if sum(bundle.get(name, 0.0) for bundle in bundles) > total.get(name, 0.0)]


def _names(bundles: Iterable[Amounts]) -> list[str]:
    return list(dict.fromkeys(name for bundle in bundles for name, amount in bundle.items() if amount))


def _amounts(bundle: Amounts, named: Iterable[str]) -> str:
    return " ".join(f"{name} {bundle[name]:g}" for name in named if bundle[name] and not name.startswith(_OF_NODES))


TIMEOUTS: Mapping[str, str] = MappingProxyType(
    {"PS_CONNECT_TIMEOUT": "connect_timeout_seconds", "PS_RECONNECT_TIMEOUT": "reconnect_timeout_seconds"}
)
"""The variables for how long a worker waits for servers, and the settings of a plan that they come from."""

_STANDBYS = "standbys"

#: What processes of one job do not take from the environment of Ray's processes.
_OURS = "PS_"


def server_command(plan: RayPlan, server: ServerName, host: str, coordinator: str) -> list[str]:
    """The command of ``server``, without ``--ready-file``.

    ``host``: the address that it listens on. ``coordinator``: host:port; of the coordinator itself where it served
    before, empty at its first start.
    """
    common: dict[str, object] = {"log_level": "warning", "data_dir": plan.data_dir}
    if server.kind is ServerKind.COORDINATOR:
        settings = {**common, "shards": plan.shards, "workers": plan.worker_range or plan.workers, "mode": plan.mode}
        # The driver asks the coordinator for what it requests. An option of the user's comes later, and wins.
        settings["engine"] = "launcher:workers" if plan.worker_restarts or plan.worker_range else None
        return coordinator_command(settings, plan.coordinator_options, bind=host, served_at=coordinator)
    if server.kind is ServerKind.STANDBY and plan.data_dir is not None:
        common["data_dir"] = plan.data_dir / _STANDBYS
    settings = {**common, "standby": plan.standbys and plan.keeps_state}
    return shard_command(server.index, coordinator, settings, plan.shard_options, bind=host)


def server_environment(inherited: Mapping[str, str], plan: RayPlan) -> dict[str, str]:
    """``inherited`` without the variables of another job, and the settings of security."""
    kept = {name: value for name, value in inherited.items() if not name.startswith(_OURS) and name != "TF_CONFIG"}
    return kept | plan.security.environment


def worker_environment(plan: RayPlan, coordinator: str, rank: int, lineage: str) -> dict[str, str]:
    """The variables by which ``connect()`` in worker ``rank`` finds the job.

    ``lineage``: text of the supervisor that starts a worker only after the end of the one before it; empty where
    something else starts it.
    """
    variables = {"PS_COORDINATOR": coordinator, "PS_ROLE": "worker", "PS_RANK": str(rank)}
    if lineage:
        variables[LINEAGE_VARIABLE] = f"{lineage} worker {rank}"
    for name, setting in TIMEOUTS.items():
        if (seconds := getattr(plan, setting)) is not None:
            variables[name] = str(seconds)
    if plan.per_host is not None:
        variables["PS_PER_HOST"] = "sync" if plan.per_host == "sync" else str(int(plan.per_host))
    return variables | plan.security.environment
