"""The arguments and the environment of each process of a job in a Ray cluster. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from ps_protocol.client.coordinator import LINEAGE_VARIABLE
from ps_worker.ray.plan import RayPlan, ServerKind, ServerName

TIMEOUTS: Mapping[str, str] = MappingProxyType(
    {"PS_CONNECT_TIMEOUT": "connect_timeout_seconds", "PS_RECONNECT_TIMEOUT": "reconnect_timeout_seconds"}
)
"""The variables that say how long a worker waits for servers, and the settings of a plan that they come from."""

_STANDBYS = "standbys"

#: The coordinator is asked for what it requests: by the driver. An option of the user's comes later, and wins.
_ASKS_DRIVER = ("--engine", "launcher:workers")

#: What processes of one job do not take from the environment of Ray's processes.
_OURS = "PS_"

_PROGRAMS: Mapping[ServerKind, str] = {
    ServerKind.COORDINATOR: "ps_server.coordinator.main",
    ServerKind.SHARD: "ps_server.shard.main",
    ServerKind.STANDBY: "ps_server.shard.main",
}


def server_command(plan: RayPlan, server: ServerName, host: str, coordinator: str) -> list[str]:
    """The module of ``server`` and its arguments, without ``--ready-file``.

    ``host``: the address that it listens on. ``coordinator``: host:port; of the coordinator itself where it served
    before, empty at its first start: it comes back where its members look for it.
    """
    common = ["--bind", host, "--log-level", "warning"]
    if server.kind is ServerKind.COORDINATOR:
        port = coordinator.rpartition(":")[2] or "0"
        counts = [
            "--shards",
            str(plan.shards),
            "--workers",
            str(plan.worker_range or plan.workers),
            "--mode",
            plan.mode,
        ]
        folder = [] if plan.data_dir is None else ["--data-dir", str(plan.data_dir)]
        asks = _ASKS_DRIVER if plan.worker_restarts or plan.worker_range else ()
        return [_PROGRAMS[server.kind], *common, "--port", port, *counts, *folder, *asks, *plan.coordinator_options]
    place = ["--shard", str(server.index), "--coordinator", coordinator, "--port", "0"]
    return [_PROGRAMS[server.kind], *common, *place, *_storage(plan, server), *plan.shard_options]


def _storage(plan: RayPlan, server: ServerName) -> list[str]:
    if plan.data_dir is None:
        return []
    folder = plan.data_dir / _STANDBYS if server.kind is ServerKind.STANDBY else plan.data_dir
    return ["--data-dir", str(folder), *(["--standby"] if plan.standbys else [])]


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
    return variables | plan.security.environment
