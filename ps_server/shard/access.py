"""Decides which members may change a shard, each by its incarnation, and whether a worker fits that opens a stream."""

from __future__ import annotations

import hmac
from collections.abc import Callable, Mapping

import torch

from ps_protocol.cluster.view import Role
from ps_protocol.errors import Fenced, StateLost, Unavailable
from ps_protocol.logs import EventLogger
from ps_protocol.rpc.channel import SHARD_KEY
from ps_protocol.wire.convert.shard import ShardKey
from ps_server.consistency import WorkerKey
from ps_server.serving.authorization import check_member
from ps_server.shard.registry import Registry

logger = EventLogger(__name__)

_VERSION_CHARACTERS = 40


class Fence:
    """Asked by the services of one shard, on its event loop."""

    def __init__(self, shard: int, registry: Registry) -> None:
        self._shard = shard
        self._registry = registry
        self._key: ShardKey | None = None

    def begin(self, incarnation: int, token: str) -> None:
        """The shard holds its place as ``incarnation``, having joined with ``token``."""
        self._key = ShardKey(incarnation, token)
        self._registry.incarnation = incarnation

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


class OpenChecks:
    """One per shard, used on its event loop whenever a worker opens a stream."""

    def __init__(self, shard: int, promises: Callable[[], bool]) -> None:
        """``promises``: whether every push acknowledged to a worker must be known here."""
        self._shard = shard
        self._promises = promises
        #: By rank, the version that was logged last.
        self._told: dict[int, str] = {}

    def acknowledged(self, model: str, worker: WorkerKey, acknowledged: int, known: int) -> None:
        """Check that the worker's acknowledged push ``acknowledged`` is not above ``known``, the last one known here.

        If it is, raises StateLost when durability excludes a loss, else logs it.
        """
        if acknowledged <= known:
            return
        error = StateLost(
            f"shard {self._shard} has lost pushes of worker {worker.rank} to model '{model}' that it had acknowledged",
            shard=str(self._shard),
            expected=f"push {acknowledged}, which the worker was told had been applied",
            actual=f"push {known} is the last that is known",
            remedy="its log was damaged or replaced by an older one: restore the data directory from a copy, or start "
            "again from a checkpoint",
        )
        if self._promises():
            logger.failure(error)
            raise error
        logger.warning(
            "recovery.lost",
            "shard %d: push %d of worker %d to model '%s' was acknowledged, and the last that is known is %d: what "
            "came between is lost, which this durability allows",
            self._shard,
            acknowledged,
            worker.rank,
            model,
            known,
        )

    def torch_version(self, worker: WorkerKey, version: str) -> None:
        """``worker`` has this version of torch, empty where it does not say. Speaks of a difference once."""
        version = version[:_VERSION_CHARACTERS]
        if not version or version == str(torch.__version__) or self._told.get(worker.rank) == version:
            return
        self._told[worker.rank] = version
        logger.warning(
            "versions",
            "shard %d applies updates with torch %s, and worker %d computes gradients with torch %s: their results may "
            "differ in the last digits; install the same version on both",
            self._shard,
            torch.__version__,
            worker.rank,
            ascii(version),
        )
