"""The models of one shard, and the shard's view of the cluster that they follow."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from ps_protocol.errors import PsError, Unavailable, UnknownModel
from ps_protocol.layout import Layout
from ps_protocol.model import ShardMap
from ps_protocol.view import ClusterView, Role
from ps_server.failpoints import Failpoints
from ps_server.log import MemoryLog, UpdateLog
from ps_server.shard.lane import Lane
from ps_server.shard.model import ShardModel

logger = logging.getLogger(__name__)

PATIENCE_SECONDS = 10.0
"""How long a request may name a model or a membership that this shard has not heard of yet."""


@dataclass(frozen=True)
class ShardParts:
    """What every model of a shard shares."""

    shard: int
    lane: Lane
    #: Asks the coordinator for the shard map of a model. Raises PsError.
    fetch_shard_map: Callable[[str], Awaitable[ShardMap]]
    log: UpdateLog = field(default_factory=MemoryLog)
    failpoints: Failpoints = field(default_factory=Failpoints)


class Registry:
    """Lives on the shard's event loop; ``on_view`` is called there with each new view of the cluster."""

    def __init__(self, parts: ShardParts) -> None:
        self._parts = parts
        self._view = ClusterView()
        self._models: dict[str, ShardModel] = {}
        self._fetching: dict[str, asyncio.Task[None]] = {}
        self._waiters: set[asyncio.Future[None]] = set()

    @property
    def models(self) -> list[ShardModel]:
        """Every model placed here so far."""
        return list(self._models.values())

    def on_view(self, view: ClusterView) -> None:
        """Follow the cluster: members, mode, newly declared models."""
        if view.revision <= self._view.revision:
            return
        mode_changed = view.consistency != self._view.consistency
        self._view = view
        for model in self._models.values():
            if mode_changed:
                model.configure(view.consistency)
            model.members(self._live())
        for name in view.models.keys() - self._models.keys() - self._fetching.keys():
            self._fetching[name] = asyncio.create_task(self._fetch(name))
        self._wake()

    async def model(self, name: str, epoch: int = 0) -> ShardModel:
        """The model, waiting a while for a declaration still on its way. Raises UnknownModel."""
        if not await self._until(lambda: name in self._models):
            raise UnknownModel(
                f"model '{name}' is not declared",
                shard=str(self._parts.shard),
                expected=", ".join(sorted(self._models)) or "a declared model",
                remedy="declare it with cluster.optimizer(...) first",
            )
        model = self._models[name]
        known = model.layout.shard_map.epoch
        if epoch and epoch != known:
            raise UnknownModel(
                f"model '{name}' is placed by another shard map",
                shard=str(self._parts.shard),
                expected=f"epoch {known}",
                actual=f"epoch {epoch}",
                remedy="ask the coordinator for the shard map again",
            )
        return model

    async def membership(self, revision: int) -> None:
        """Wait until the view is at least ``revision``. Raises Unavailable when it does not come."""
        if not await self._until(lambda: self._view.revision >= revision):
            raise Unavailable(
                "this shard has not heard from the coordinator",
                shard=str(self._parts.shard),
                expected=f"cluster view {revision}",
                actual=f"cluster view {self._view.revision}",
                remedy="see whether the shard can reach the coordinator",
            )

    def _live(self) -> dict[int, int]:
        return {rank: member.incarnation for rank, member in self._view.live(Role.WORKER).items()}

    async def _fetch(self, name: str) -> None:
        """Get the shard map of a new model and lay it out; try again until it works."""
        while name not in self._models:
            try:
                shard_map = await self._parts.fetch_shard_map(name)
            except PsError as error:
                logger.warning("cannot get the shard map of model '%s' yet: %s", name, error)
                await asyncio.sleep(0.5)
                continue
            self.place(shard_map)
        del self._fetching[name]

    def place(self, shard_map: ShardMap) -> ShardModel:
        """Make the model of ``shard_map``; its slices on this shard start uninitialised."""
        parts = self._parts
        layout = Layout.of(shard_map, parts.shard)
        model = ShardModel(layout, parts.lane, self._view.consistency, parts.log, parts.failpoints)
        model.members(self._live())
        self._models[model.name] = model
        logger.info(
            "model '%s': %d slices, %.1f MB, %s, %s",
            model.name,
            len(layout.slices),
            layout.region_bytes / 1e6,
            shard_map.spec.optimizer,
            self._view.consistency,
        )
        self._wake()
        return model

    async def _until(self, true: Callable[[], bool]) -> bool:
        deadline = asyncio.get_running_loop().time() + PATIENCE_SECONDS
        while not true():
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiters.add(waiter)
            try:
                await asyncio.wait_for(waiter, deadline - asyncio.get_running_loop().time())
            except TimeoutError:
                return true()
            finally:
                self._waiters.discard(waiter)
        return True

    def _wake(self) -> None:
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)
