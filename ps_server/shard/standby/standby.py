"""Decides when a standby takes over its shard; until then it follows the primary."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from ps_protocol.client.coordinator import CoordinatorClient
from ps_protocol.client.membership import Membership, OnFenced, OnView, log_waiting
from ps_protocol.cluster.view import TOOK_OVER, ClusterView, JoinRequest, Member, Role
from ps_protocol.errors import Fenced, InternalError, NotReady, StorageFull, Unavailable
from ps_protocol.logs import EventLogger
from ps_server.shard import times
from ps_server.shard.standby.follower import LogFollower, StandbyPlace
from ps_server.tasks import cancelled, first_of

logger = EventLogger(__name__)


class Standby:
    """Used on the shard's event loop, by each of two processes started with the same options.

    The first one becomes the primary; the other follows it. When the primary is lost the coordinator decides: it knows
    which directories contain every acknowledged push.
    """

    def __init__(
        self,
        client: CoordinatorClient,
        wanted: JoinRequest,
        follower: LogFollower,
        timeout_seconds: float,
        stop: asyncio.Event,
    ) -> None:
        """``wanted``: the shard's place, and the address at which this process will serve."""
        self._client = client
        self._wanted = wanted
        self._follower = follower
        self._timeout_seconds = timeout_seconds
        self._stop = stop
        #: Called with the membership as a standby.
        self.on_join: Callable[[Membership], None] = lambda membership: None
        #: Also set when the job ends.
        self.exits_with_job = False
        self._view = ClusterView()
        self._fenced: Fenced | None = None
        self._changed = asyncio.Event()
        self._refusal = ""
        #: Set once it follows or waits to follow.
        self.waits = asyncio.Event()

    async def take_place(self) -> Membership | None:
        """Wait for the membership as shard; None if stopped before.

        Raises Fenced when another standby replaces this one, and the errors that prevent following.
        """
        if membership := await self._try():
            return membership
        standby = await self._join_as_standby()
        if standby is None:
            return None
        reason = "stopped"
        try:
            self.waits.set()
            while not self._stop.is_set():
                if holder := self._holder():
                    await self._follow_while_it_holds(standby.member, holder)
                elif membership := await self._try():
                    reason = TOOK_OVER
                    return membership
                else:
                    await self._news(times.RETRY_SECONDS)
            return None
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            raise
        finally:
            await asyncio.to_thread(standby.leave, reason)

    def _holder(self) -> Member | None:
        return self._view.live(Role.SHARD).get(self._follower.shard)

    async def _try(self) -> Membership | None:
        """Ask for the place."""
        await self._follower.settled()
        spec = JoinRequest(
            Role.SHARD,
            self._follower.shard,
            self._wanted.address,
            data_incarnation=self._follower.incarnation,
            directory=self._wanted.directory,
            yields=True,
            add=self._wanted.add,
        )
        try:
            return await joined(self._client, spec, self._timeout_seconds, self._stop)
        except NotReady as refusal:
            if refusal.message != self._refusal:
                logger.info("standby", "shard %d stands by: %s", self._follower.shard, refusal)
            self._refusal = refusal.message
            return None
        except Unavailable as error:
            if not self.waits.is_set():
                raise
            logger.warning("standby", "shard %d stands by: %s", self._follower.shard, error)
            return None

    async def _join_as_standby(self) -> Membership | None:
        spec = JoinRequest(Role.STANDBY, self._follower.shard, directory=self._wanted.directory)
        while not self._stop.is_set():
            try:
                membership = await joined(self._client, spec, self._timeout_seconds, self._stop)
            except NotReady as refusal:
                logger.failure(refusal, logging.WARNING)
                await self._news(1.0)
                continue
            if membership:
                self.on_join(membership)
                await asyncio.to_thread(membership.subscribe, *self._callbacks())
            return membership
        return None

    def _callbacks(self) -> tuple[OnView, OnFenced]:
        loop = asyncio.get_running_loop()

        def show(view: ClusterView) -> None:
            self._view = view
            if view.released and self.exits_with_job:
                self._stop.set()
            self._changed.set()

        def fence(error: Fenced) -> None:
            self._fenced = error
            self._changed.set()

        def on_view(view: ClusterView) -> None:
            loop.call_soon_threadsafe(show, view)

        def on_fenced(error: Fenced) -> None:
            loop.call_soon_threadsafe(fence, error)

        return on_view, on_fenced

    async def _follow_while_it_holds(self, standby: Member, holder: Member) -> None:
        following = asyncio.create_task(self._follow(standby, holder), name="follow")
        try:
            while self._holder() == holder and not self._stop.is_set() and not following.done():
                await self._news(1.0, following)
        finally:
            await cancelled(following)
        if not following.cancelled():
            following.result()

    async def _follow(self, standby: Member, holder: Member) -> None:
        said = ""
        while True:
            try:
                await self._follower.follow(holder, StandbyPlace(standby, self._view.revision))
            except (Unavailable, StorageFull) as error:
                if error.message != said:
                    logger.warning("standby.failed", "shard %d is not followed: %s", self._follower.shard, error)
                said = error.message
                await asyncio.sleep(times.FULL_RETRY_SECONDS if isinstance(error, StorageFull) else times.RETRY_SECONDS)
            except OSError as error:
                raise InternalError(f"shard {self._follower.shard} cannot be followed: {error}") from error

    async def _news(self, seconds: float, *others: asyncio.Future[None]) -> None:
        """Wait until the view has changed, one of ``others`` is done, or a time limit has passed. Raises Fenced."""
        await first_of(self._changed.wait(), self._stop.wait(), *others, seconds=seconds)
        self._changed.clear()
        if self._fenced:
            raise self._fenced


async def joined(
    client: CoordinatorClient, spec: JoinRequest, timeout_seconds: float, stop: asyncio.Event
) -> Membership | None:
    """Become a member; None if stopped before the coordinator answers. Raises as Membership.join."""
    joining = asyncio.ensure_future(asyncio.to_thread(Membership.join, client, spec, timeout_seconds, log_waiting))
    await first_of(joining, stop.wait())
    if joining.done():
        return joining.result()
    client.close()  # ends the attempt in the other thread
    await asyncio.gather(joining, return_exceptions=True)
    return None
