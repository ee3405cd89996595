"""Decides which callers may change a shard: live workers, its standby, and the coordinator, each by incarnation."""

from __future__ import annotations

import enum
import hmac
from collections.abc import Mapping
from types import MappingProxyType

from ps_protocol.cluster.view import Role
from ps_protocol.errors import Fenced, Unavailable
from ps_protocol.rpc.channel import SHARD_KEY
from ps_protocol.wire.convert.key import ShardKey
from ps_server.consistency import WorkerKey
from ps_server.serving.authorization import check_member
from ps_server.shard.models.registry import Registry


class Access(enum.Enum):
    """Whose calls a method answers."""

    #: Anybody's: it changes nothing.
    READER = "reader"
    #: Those of live workers. LoadRows answers evaluators, too: psctl joins as one.
    WORKER = "worker"
    #: Those of the standby in the cluster's view.
    STANDBY = "standby"
    #: Those of the coordinator that this shard has joined.
    COORDINATOR = "coordinator"


ACCESS: Mapping[str, Access] = MappingProxyType(
    {
        "Step": Access.WORKER,
        "Load": Access.WORKER,
        "LoadRows": Access.WORKER,
        "Follow": Access.STANDBY,
        "Pause": Access.COORDINATOR,
        "Capture": Access.COORDINATOR,
        "CatchUp": Access.COORDINATOR,
        "MakeRoom": Access.COORDINATOR,
        "StageReshard": Access.COORDINATOR,
        "Resume": Access.COORDINATOR,
        "Restore": Access.COORDINATOR,
        "Pull": Access.READER,
        "Save": Access.READER,
        "GetModel": Access.READER,
        "GetRows": Access.READER,
        "SaveBuckets": Access.READER,
        "Feed": Access.READER,
        "GetRoundNorm": Access.READER,
    }
)
"""Every method of the service. One that is not here cannot be registered."""


class Fence:
    """Asked by the services of one shard, on its event loop."""

    def __init__(self, shard: int, registry: Registry) -> None:
        self._shard = shard
        self._registry = registry
        self._key: ShardKey | None = None

    def begin(self, incarnation: int, token: str) -> None:
        """The shard holds its place as ``incarnation``, having joined with ``token``."""
        self._key = ShardKey(incarnation, token)

    def check_coordinator(self, metadata: Mapping[str, str | bytes]) -> None:
        """Raises Fenced unless ``metadata`` of a call shows that it is for this incarnation, from its coordinator.

        Unavailable while this shard does not hold its place yet; InvalidRequest for a key that is none.
        """
        if self._key is None:
            raise Unavailable(f"shard {self._shard} does not hold its place yet", remedy="try again")
        value = metadata.get(SHARD_KEY, b"")
        key = ShardKey.read(value)
        known = hmac.compare_digest(key.token.encode(), self._key.token.encode())
        if key.incarnation != self._key.incarnation or not (known and key.token):
            raise Fenced(
                "only the coordinator may ask this of a shard",
                shard=str(self._shard),
                expected=f"the key of incarnation {self._key.incarnation}",
                actual=f"a key of incarnation {key.incarnation}" if value else "no key",
                remedy="use psctl, which asks the coordinator",
            )

    async def admit(self, worker: WorkerKey, revision: int, *roles: Role) -> WorkerKey:
        """The member that calls, once the view is as new as ``revision``. Raises as ``check``, and Unavailable;
        PermissionDenied when the session of the call is another member's.
        """
        check_member(roles[0] if roles else Role.WORKER, worker.rank, worker.incarnation, *roles)
        await self._registry.membership(revision)
        self.check(worker, *roles)
        return worker

    def check(self, worker: WorkerKey, *roles: Role) -> None:
        """Raises Fenced unless ``worker`` is a live worker, or a live member of one of ``roles``."""
        view, allowed = self._registry.view, roles or (Role.WORKER,)
        members = [members[worker.rank] for role in allowed if worker.rank in (members := view.live(role))]
        if not any(member.incarnation == worker.incarnation for member in members):
            raise Fenced(
                f"{worker} is not a live member of the job",
                shard=str(self._shard),
                expected=", ".join(f"{member}, incarnation {member.incarnation}" for member in members)
                or f"a live {' or '.join(role.value for role in allowed)}",
                actual=str(worker),
                remedy="its lease ended or a newer process took its rank: start it again",
            )
