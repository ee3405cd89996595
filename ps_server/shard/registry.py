"""The models of one shard, and the shard's view of the cluster that they follow."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ps_protocol.convert import shard_map_to_pb
from ps_protocol.errors import (
    InternalError,
    ModelMismatch,
    NotReady,
    PsError,
    StorageFull,
    Unavailable,
    UnknownModel,
)
from ps_protocol.model import ShardMap
from ps_protocol.view import ClusterView, Role
from ps_server.checkpoint import Checkpoint
from ps_server.failpoints import Failpoints
from ps_server.log import MemoryLog, Placed, RecoveredModel, UpdateLog, new_model
from ps_server.model_differences import in_structure, raise_differences
from ps_server.shard.lane import INLINE_BYTES, Lane
from ps_server.shard.model import ShardModel
from ps_server.shard.replication import Replication
from ps_server.shard.restore import read, saved_tracker

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
    #: What the standby has; None where there is no log to follow.
    replication: Replication | None = None
    #: Awaited before a model gets its first values: from then on this directory counts. Raises PsError.
    announce: Callable[[], Awaitable[None]] | None = None


class Registry:
    """Lives on the shard's event loop; ``on_view`` is called there with each new view of the cluster."""

    def __init__(self, parts: ShardParts, recovered: Mapping[str, RecoveredModel] | None = None) -> None:
        """``recovered``: models brought back from disk. They wait until the cluster places them as they were."""
        self._parts = parts
        self._view = ClusterView()
        self._recovered = dict(recovered or {})
        self._models: dict[str, ShardModel] = {}
        self._placed: dict[str, ShardModel] = {}
        #: Models that cannot be had here, and why.
        self._refused: dict[str, PsError] = {}
        self._fetching: dict[str, asyncio.Task[None]] = {}
        self._waiters: set[asyncio.Future[None]] = set()

    @property
    def models(self) -> list[ShardModel]:
        """Every model that can be used here."""
        return list(self._models.values())

    @property
    def placed(self) -> list[ShardModel]:
        """Every model the log says to be here: also those whose values are still being restored."""
        return list(self._placed.values())

    def recover(self, models: Mapping[str, RecoveredModel]) -> None:
        """Before the first view: models that a standby has followed."""
        self._recovered = dict(models)

    def stop(self, error: PsError) -> None:
        """Decide and answer nothing any more, for every model."""
        for model in self._placed.values():
            model.stop(error)

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
        for name in view.models.keys() - self._models.keys() - self._fetching.keys() - self._refused.keys():
            self._fetching[name] = asyncio.create_task(self._fetch(name))
        self._wake()

    async def model(self, name: str, epoch: int = 0) -> ShardModel:
        """The model, waiting a while for a declaration still on its way. Raises UnknownModel."""
        if not await self._until(lambda: name in self._models or name in self._refused):
            raise UnknownModel(
                f"model '{name}' is not declared",
                shard=str(self._parts.shard),
                expected=", ".join(sorted(self._models)) or "a declared model",
                remedy="declare it with cluster.optimizer(...) first",
            )
        if error := self._refused.get(name):
            raise error
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
        while name not in self._models and name not in self._refused:
            try:
                await self.place(await self._parts.fetch_shard_map(name))
            except (Unavailable, NotReady, StorageFull, UnknownModel) as error:
                logger.warning("model '%s' cannot be placed here yet: %s", name, error)
                await asyncio.sleep(0.5)
            except PsError as error:
                logger.error("%s", error)
                self._refused[name] = error
                self._wake()
        del self._fetching[name]

    async def place(self, shard_map: ShardMap) -> ShardModel:
        """Make the model of ``shard_map``: as it was recovered, else as a checkpoint has it, else uninitialised.

        Raises ModelMismatch when another model was recovered under its name, StorageFull, and what reading a checkpoint
        raises.
        """
        parts, name = self._parts, shard_map.spec.name
        if name in self._recovered:
            start = self._recovered[name]
            _check_same(parts.shard, start.shard_map, shard_map)
            del self._recovered[name]
        else:
            await self._log(Placed(shard_map))
            start = new_model(shard_map, parts.shard)
        model = ShardModel(
            start, parts.lane, self._view.consistency, parts.log, parts.failpoints, parts.replication, parts.announce
        )
        self._placed[name] = model
        if shard_map.restored_from and not model.initialised:
            await self._restore(model, Path(shard_map.restored_from))
        self._show(model)
        return model

    async def _log(self, placed: Placed) -> None:
        """Raises StorageFull, InternalError."""
        log, nbytes = self._parts.log, shard_map_to_pb(placed.shard_map).ByteSize()
        await log.reserve(nbytes)
        try:
            await self._parts.lane.submit(lambda: log.append(placed), INLINE_BYTES * log.waits)
        except OSError as error:
            raise InternalError(f"shard {self._parts.shard} cannot write its log: {error}") from error
        finally:
            log.release(nbytes)

    async def _restore(self, model: ShardModel, folder: Path) -> None:
        """Give a new model the values of a checkpoint, before anybody sees it. Raises PsError."""
        checkpoint = await asyncio.to_thread(Checkpoint.open, folder)
        region, entries = await asyncio.to_thread(read, checkpoint, model.layout)
        await model.load(region, entries, saved_tracker(checkpoint, model.name), only_first=True)
        logger.info("model '%s': restored from %s", model.name, folder)

    def _show(self, model: ShardModel) -> None:
        layout, shard_map = model.layout, model.layout.shard_map
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

    @property
    def waiting_models(self) -> Mapping[str, RecoveredModel]:
        """Models brought back from disk that the cluster has not placed yet."""
        return self._recovered

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


def _check_same(shard: int, held: ShardMap, placed: ShardMap) -> None:
    """Raises ModelMismatch when the data directory holds a model that is not the one the cluster has placed."""
    name = placed.spec.name
    raise_differences(
        f"the data directory of shard {shard} holds another model under the name '{name}'",
        in_structure(held.spec, placed.spec),
        "run the script that trained it, give the model another name, or use an empty --data-dir",
    )
    if (held.shards, held.epoch, held.slices) != (placed.shards, placed.epoch, placed.slices):
        raise ModelMismatch(
            f"the data directory of shard {shard} holds model '{name}' cut for another cluster",
            shard=str(shard),
            expected=f"{placed.shards} shards, epoch {placed.epoch}",
            actual=f"{held.shards} shards, epoch {held.epoch}",
            remedy="start as many shards as before, or restore a checkpoint into empty data directories",
        )
