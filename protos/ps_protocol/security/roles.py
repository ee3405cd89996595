"""The roles of callers, and the table of every method with the roles that may call it. What is not in it is refused."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from types import MappingProxyType

from ps_protocol.cluster.view import Role


class AccessRole(enum.Enum):
    """What a caller may do in a job."""

    #: Mode, moves, drains, releases, checkpoints, restores; reads everything.
    ADMIN = "admin"
    #: Joins as a worker; pushes, pulls, leases data.
    WORKER = "worker"
    #: Joins as an evaluator; reads parameters, rows and feeds.
    READER = "reader"
    #: Status, metrics, page.
    VIEWER = "viewer"
    #: Coordinator, shards and standbys among themselves.
    SERVER = "server"


_ADMIN, _WORKER, _READER = AccessRole.ADMIN, AccessRole.WORKER, AccessRole.READER
_VIEWER, _SERVER = AccessRole.VIEWER, AccessRole.SERVER

ANYBODY: frozenset[AccessRole] | None = None
"""In the table: callers that prove nothing, too."""

_EVERY_ROLE = frozenset(AccessRole)
_MEMBERS = frozenset({_ADMIN, _WORKER, _READER, _SERVER})
_DATA_READERS = frozenset({_ADMIN, _WORKER, _READER})

_COORDINATOR: Mapping[str, frozenset[AccessRole]] = {
    "Join": _MEMBERS,
    "Heartbeat": _MEMBERS,
    "Leave": _MEMBERS,
    "Watch": _EVERY_ROLE,
    "DeclareModel": frozenset({_WORKER}),
    "GetShardMap": _EVERY_ROLE,
    "CloseModel": frozenset({_WORKER}),
    "ReleaseModel": frozenset({_ADMIN}),
    "SetConsistency": frozenset({_ADMIN}),
    "Barrier": frozenset({_WORKER}),
    "Exchange": frozenset({_WORKER}),
    "LeaseData": frozenset({_WORKER}),
    "Checkpoint": frozenset({_ADMIN}),
    "RestoreCheckpoint": frozenset({_ADMIN}),
    "Reshard": frozenset({_ADMIN}),
    "Scale": frozenset({_ADMIN}),
    "GetStatus": _EVERY_ROLE,
    "GetHistory": _EVERY_ROLE,
    "GetWorkerRequest": _EVERY_ROLE,
}

_SHARD: Mapping[str, frozenset[AccessRole]] = {
    "Step": frozenset({_WORKER}),
    "Load": frozenset({_WORKER}),
    "LoadRows": frozenset({_ADMIN, _WORKER}),
    "Pull": _DATA_READERS,
    "Save": _DATA_READERS | {_SERVER},
    "SaveBuckets": _DATA_READERS | {_SERVER},
    "GetRows": _DATA_READERS,
    "Feed": _DATA_READERS,
    "GetModel": _EVERY_ROLE,
    "Follow": frozenset({_SERVER}),
    "Pause": frozenset({_SERVER}),
    "Capture": frozenset({_SERVER}),
    "CatchUp": frozenset({_SERVER}),
    "MakeRoom": frozenset({_SERVER}),
    "StageReshard": frozenset({_SERVER}),
    "Resume": frozenset({_SERVER}),
    "Restore": frozenset({_SERVER}),
    "GetRoundNorm": frozenset({_SERVER}),
}

METHODS: Mapping[str, frozenset[AccessRole] | None] = MappingProxyType(
    {
        **{f"/ps_protocol.v1.Coordinator/{name}": roles for name, roles in _COORDINATOR.items()},
        **{f"/ps_protocol.v1.Shard/{name}": roles for name, roles in _SHARD.items()},
        **{f"/grpc.health.v1.Health/{name}": ANYBODY for name in ("Check", "Watch", "List")},
        "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": _EVERY_ROLE,
    }
)
"""Every method of every service, by its full name. One that is missing here is refused."""

VIEWING = _EVERY_ROLE - {_WORKER}
"""The roles that may see metrics and the page."""

JOINING: Mapping[Role, frozenset[AccessRole]] = MappingProxyType(
    {
        Role.SHARD: frozenset({_SERVER}),
        Role.STANDBY: frozenset({_SERVER}),
        Role.WORKER: frozenset({_WORKER}),
        Role.EVALUATOR: _DATA_READERS,
    }
)
"""The roles that may join as each kind of member."""


def listed(roles: frozenset[AccessRole]) -> str:
    """``roles`` in words, in the order of their declaration."""
    return " or ".join(role.value for role in AccessRole if role in roles)
