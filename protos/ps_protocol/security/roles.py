"""The roles of callers, and the table of every method with who may call it. A method that is not in it is refused."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

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

_EVERY_ROLE = frozenset(AccessRole)
_ADMINS, _WORKERS, _SERVERS = frozenset({_ADMIN}), frozenset({_WORKER}), frozenset({_SERVER})
_MEMBERS = frozenset({_ADMIN, _WORKER, _READER, _SERVER})
_DATA_READERS = frozenset({_ADMIN, _WORKER, _READER})


class Fencing(enum.Enum):
    """Whose calls of a method a shard answers, by the incarnation of the caller. With authentication or without."""

    #: Everybody's: the method changes nothing.
    NONE = "none"
    #: Those of live workers. LoadRows answers evaluators, too: psctl joins as one.
    WORKER = "worker"
    #: Those of the standby in the cluster's view.
    STANDBY = "standby"
    #: Those of the coordinator that this shard has joined.
    COORDINATOR = "coordinator"


class Access(NamedTuple):
    """Who may call a method."""

    #: None: everybody, without proof.
    roles: frozenset[AccessRole] | None
    #: Of a method of a shard.
    fencing: Fencing = Fencing.NONE


_COORDINATOR, _SHARD = "ps_protocol.v1.Coordinator", "ps_protocol.v1.Shard"

METHODS: Mapping[str, Access] = MappingProxyType(
    {
        f"/{_COORDINATOR}/Join": Access(_MEMBERS),
        f"/{_COORDINATOR}/Heartbeat": Access(_MEMBERS),
        f"/{_COORDINATOR}/Leave": Access(_MEMBERS),
        f"/{_COORDINATOR}/Watch": Access(_EVERY_ROLE),
        f"/{_COORDINATOR}/DeclareModel": Access(_WORKERS),
        f"/{_COORDINATOR}/GetShardMap": Access(_EVERY_ROLE),
        f"/{_COORDINATOR}/CloseModel": Access(_WORKERS),
        f"/{_COORDINATOR}/ReleaseModel": Access(_ADMINS),
        f"/{_COORDINATOR}/SetConsistency": Access(_ADMINS),
        f"/{_COORDINATOR}/AcknowledgeDivergence": Access(_ADMINS),
        f"/{_COORDINATOR}/Barrier": Access(_WORKERS),
        f"/{_COORDINATOR}/Exchange": Access(_WORKERS),
        f"/{_COORDINATOR}/LeaseData": Access(_WORKERS),
        f"/{_COORDINATOR}/Checkpoint": Access(_ADMINS),
        f"/{_COORDINATOR}/RestoreCheckpoint": Access(_ADMINS),
        f"/{_COORDINATOR}/Reshard": Access(_ADMINS),
        f"/{_COORDINATOR}/Scale": Access(_ADMINS),
        f"/{_COORDINATOR}/Publish": Access(_WORKERS),
        f"/{_COORDINATOR}/FollowWeights": Access(_DATA_READERS),
        f"/{_COORDINATOR}/PinWeights": Access(_DATA_READERS),
        f"/{_COORDINATOR}/GetWeights": Access(_EVERY_ROLE),
        f"/{_COORDINATOR}/GetStatus": Access(_EVERY_ROLE),
        f"/{_COORDINATOR}/GetHistory": Access(_EVERY_ROLE),
        f"/{_COORDINATOR}/GetWorkerRequest": Access(_EVERY_ROLE),
        f"/{_SHARD}/Step": Access(_WORKERS, Fencing.WORKER),
        f"/{_SHARD}/Load": Access(_WORKERS, Fencing.WORKER),
        f"/{_SHARD}/LoadRows": Access(_ADMINS | _WORKERS, Fencing.WORKER),
        f"/{_SHARD}/Pull": Access(_DATA_READERS),
        f"/{_SHARD}/Save": Access(_DATA_READERS | _SERVERS),
        f"/{_SHARD}/SaveBuckets": Access(_DATA_READERS | _SERVERS),
        f"/{_SHARD}/GetRows": Access(_DATA_READERS),
        f"/{_SHARD}/Feed": Access(_DATA_READERS),
        f"/{_SHARD}/GetModel": Access(_EVERY_ROLE),
        f"/{_SHARD}/Follow": Access(_SERVERS, Fencing.STANDBY),
        f"/{_SHARD}/Pause": Access(_SERVERS, Fencing.COORDINATOR),
        f"/{_SHARD}/Capture": Access(_SERVERS, Fencing.COORDINATOR),
        f"/{_SHARD}/CatchUp": Access(_SERVERS, Fencing.COORDINATOR),
        f"/{_SHARD}/MakeRoom": Access(_SERVERS, Fencing.COORDINATOR),
        f"/{_SHARD}/StageReshard": Access(_SERVERS, Fencing.COORDINATOR),
        f"/{_SHARD}/Resume": Access(_SERVERS, Fencing.COORDINATOR),
        f"/{_SHARD}/Restore": Access(_SERVERS, Fencing.COORDINATOR),
        f"/{_SHARD}/TakePiece": Access(_SERVERS, Fencing.COORDINATOR),
        f"/{_SHARD}/FinishPiece": Access(_SERVERS, Fencing.COORDINATOR),
        f"/{_SHARD}/KeepPieces": Access(_SERVERS, Fencing.COORDINATOR),
        f"/{_SHARD}/GetPiece": Access(_DATA_READERS),
        f"/{_SHARD}/GetRoundNorm": Access(_SERVERS),
        "/grpc.health.v1.Health/Check": Access(None),
        "/grpc.health.v1.Health/Watch": Access(None),
        "/grpc.health.v1.Health/List": Access(None),
        "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": Access(_EVERY_ROLE),
    }
)
"""Every method of every service, by its full name. Authorization asks for the role, then a shard for the member."""

VIEWING = _EVERY_ROLE - _WORKERS
"""The roles that may see metrics and the page."""

JOINING: Mapping[Role, frozenset[AccessRole]] = MappingProxyType(
    {
        Role.SHARD: _SERVERS,
        Role.STANDBY: _SERVERS,
        Role.WORKER: _WORKERS,
        Role.EVALUATOR: _DATA_READERS,
    }
)
"""The roles that may join as each kind of member."""


def listed(roles: frozenset[AccessRole]) -> str:
    """``roles`` in words, in the order of their declaration."""
    return " or ".join(role.value for role in AccessRole if role in roles)
