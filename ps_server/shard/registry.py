"""The models of one shard, and the shard's view of the cluster that they follow."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import copy

from ps_protocol.cluster.view import ClusterView, Role
from ps_protocol.errors import InternalError, ModelReleased, PsError, Retryable, Unavailable, UnknownModel
from ps_protocol.logs import EventLogger
from ps_protocol.model.layout import Layout
from ps_protocol.model.spec import ShardMap
from ps_server.log.entries import Released
from ps_server.shard import times
from ps_server.shard.context import ShardContext
from ps_server.shard.durability.snapshotter import PassiveReplica, SnapshotSource
from ps_server.shard.peers import ShardPeers
from ps_server.shard.placing import PlacingProgress, new_state, recovered_state, restore_model, warm_up
from ps_server.shard.reconcile import moved_on
from ps_server.shard.step.model import ShardModel
from ps_server.state.model_state import ModelState
from ps_server.tasks import Conditions

logger = EventLogger(__name__)

_RELEASE_BYTES = 1 << 10
"""More than a ReleaseRecord takes."""


async def log_release(context: ShardContext, entry: Released) -> None:
    """Log that a model is dropped; tried again until the disk takes it."""
    while True:
        try:
            await context.write(entry, _RELEASE_BYTES, ("before_release_log", "after_release_log"))
            return
        except PsError as error:
            logger.warning("model.released", "the release of model '%s' cannot be logged yet: %s", entry.model, error)
            await asyncio.sleep(0.5)


class Registry:
    """Lives on the shard's event loop; ``on_view`` is called there with each new view of the cluster."""

    def __init__(self, context: ShardContext, recovered: Mapping[str, ModelState] | None = None) -> None:
        """``recovered``: models from disk. They wait until the cluster places them."""
        self.context = context
        self._view = ClusterView()
        #: Of this shard; 0 until it has joined.
        self.incarnation = 0
        self._recovered = dict(recovered or {})
        self._models: dict[str, ShardModel] = {}
        self._placed: dict[str, ShardModel] = {}
        #: Models that cannot be used here, and why.
        self._refused: dict[str, PsError] = {}
        #: By name, while a model is placed or dropped.
        self._following: dict[str, asyncio.Task[None]] = {}
        #: By name, the last epoch of models that were released and are not here any more.
        self._dropped: dict[str, int] = {}
        self._progress: dict[str, PlacingProgress] = {}
        self._conditions = Conditions()
        self._watchers: list[Callable[[ClusterView], None]] = []
        #: The other shards of the job.
        self.peers = ShardPeers(lambda: self._view, context.open_channel)
        #: The same, over other channels: for what moves. Closed when nothing does, and when a call has failed.
        self.sources = ShardPeers(lambda: self._view, context.open_channel)

    @property
    def view(self) -> ClusterView:
        """The newest view of the cluster."""
        return self._view

    @property
    def models(self) -> list[ShardModel]:
        """Every model that can be used here."""
        return list(self._models.values())

    @property
    def placed(self) -> list[ShardModel]:
        """Every model that is placed here according to the log, including those whose values are still being
        restored.
        """
        return list(self._placed.values())

    @property
    def activity(self) -> str:
        """Which models are being placed, and how far that is; empty: none is. From any thread."""
        return "; ".join(map(str, list(self._progress.values())))

    @property
    def versions(self) -> dict[str, int]:
        """The version of each model of which this shard holds anything. From any thread."""
        return {name: each.tracker.version for name, each in list(self._models.items()) if each.layout.holds_any}

    @property
    def kept(self) -> list[SnapshotSource]:
        """Every model that snapshots have to hold: those that are placed, and those that wait to be."""
        log, executor = self.context.log, self.context.executor
        waiting = [PassiveReplica(model, executor, lambda: log.number) for model in self._recovered.values()]
        return [*self._placed.values(), *waiting]

    def recover(self, models: Mapping[str, ModelState]) -> None:
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
        for watcher in self._watchers:
            watcher(view)
        self._catch_up()
        self._conditions.wake()

    def watch(self, watcher: Callable[[ClusterView], None]) -> None:
        """Have ``watcher`` called with each new view."""
        self._watchers.append(watcher)

    def _epoch(self, name: str) -> int:
        """The epoch of a model's shard map here, or of the staged one; 0: it is not here."""
        model = self._models.get(name)
        if model is None:
            return 0
        return model.pending.shard_map.epoch if model.pending else model.layout.shard_map.epoch

    async def model(self, name: str, epoch: int = 0) -> ShardModel:
        """The model, waiting a while for a declaration or a move still on its way; ``epoch`` 0: any.

        Raises NotReady, with its progress, while it is being placed here, UnknownModel for one that is not declared,
        ModelReleased, ModelMoved for an out-of-date epoch, Unavailable for an epoch that this shard does not reach, or
        for a declared model whose view has not arrived: a caller that names an epoch has its shard map.
        """

        def is_released() -> bool:
            view = self._view
            return view.was_released(name, epoch) if epoch else name in view.released_models.keys() - view.models.keys()

        patience = times.PLACING_SECONDS if name in self._progress else times.UNKNOWN_SECONDS
        found = await self._until(lambda: name in self._models or name in self._refused or is_released(), patience)
        if is_released():
            raise _released(self.context.shard, name)
        if not found:
            if name in self._progress:
                raise self._progress[name].error(self.context.shard)
            if epoch or name in self._recovered:
                raise _unheard(self.context.shard, name, epoch, self._known(name))
            raise _unknown(self.context.shard, name, self._models)
        await self._until(lambda: self._known(name) >= epoch or name in self._refused or is_released())
        if is_released():
            raise _released(self.context.shard, name)
        if error := self._refused.get(name):
            raise copy(error)
        known = self._known(name)
        if known < epoch:
            raise _unheard(self.context.shard, name, epoch, known)
        if epoch and epoch < known:
            raise moved_on(self.context.shard, name, known, epoch)
        return self._models[name]

    def _known(self, name: str) -> int:
        return self._models[name].layout.shard_map.epoch if name in self._models else 0

    async def membership(self, revision: int) -> None:
        """Wait until the view is at least ``revision``. Raises Unavailable when it does not come."""
        if not await self._until(lambda: self._view.revision >= revision):
            raise Unavailable(
                "this shard has not received the cluster view in time",
                shard=str(self.context.shard),
                expected=f"cluster view {revision}",
                actual=f"cluster view {self._view.revision}",
                remedy="see whether the shard can reach the coordinator",
            )

    def _live(self) -> dict[int, int]:
        return {rank: member.incarnation for rank, member in self._view.live(Role.WORKER).items()}

    def _is_behind(self, name: str) -> bool:
        """Whether a model of this name has to be placed here, or dropped."""
        return self._to_drop(name) > 0 or self._to_place(name) > 0

    def _to_drop(self, name: str) -> int:
        """The last epoch of a model that was released, and has not been dropped here; 0: there is none."""
        released = self._view.released_models.get(name, 0)
        return released if released > self._dropped.get(name, 0) else 0

    def _to_place(self, name: str) -> int:
        """The epoch of a shard map that is still to be placed here; 0: none, or it was refused."""
        epoch = self._view.models.get(name, 0)
        return epoch if name not in self._refused and self._epoch(name) < epoch else 0

    def _catch_up(self) -> None:
        for name in {**self._view.models, **self._view.released_models}:  # in the same order in every process
            if name not in self._following and self._is_behind(name):
                self._following[name] = asyncio.create_task(self._follow(name), name="follow")

    async def _follow(self, name: str) -> None:
        """Drop a model that was released; get the shard map of a new or moved one and lay it out. Until it works."""
        try:
            while self._is_behind(name):
                if released := self._to_drop(name):
                    await self._drop(name, released)
                    self._dropped[name] = released
                elif self._to_place(name):
                    with self._placing(name) as progress:
                        await self._fetch(name, progress)
        finally:
            del self._following[name]

    async def _fetch(self, name: str, progress: PlacingProgress) -> None:
        """Get a shard map and lay the model out, in one try; wait a while after one that failed."""
        try:
            shard_map = await self.context.fetch_shard_map(name)
            epoch = shard_map.epoch
            # A map that is ahead of the view may be of another model than the one that is here.
            if not await self._until(lambda: self._view.models.get(name, 0) >= epoch or self._to_drop(name) > 0):
                raise _unheard(self.context.shard, name, epoch, self._known(name))
            if not self._to_drop(name) and not self._view.was_released(name, epoch):
                await self.place(shard_map)
        except (Retryable, UnknownModel, ModelReleased) as error:
            logger.warning("model.waits", "model '%s' cannot be placed here yet: %s", name, error)
            progress.fail(error)
            await asyncio.sleep(0.5)
        except PsError as error:
            logger.failure(error)
            self.refuse(name, error)
        except Exception as error:
            logger.exception("model.stopped", "model '%s' cannot be placed here", name)
            self.refuse(name, _unplaceable(self.context.shard, name, error))

    async def _drop(self, name: str, released: int) -> None:
        """Hold nothing of the model of this name any more, unless it is of a later epoch than ``released``."""
        # One that is being resharded comes out of it first, for the log needs them in this order.
        while not await self._until(lambda: name not in self._placed or not self._placed[name].is_pending):
            pass
        placed = self._placed.get(name)
        recovered = self._recovered.get(name)
        epoch = recovered.shard_map.epoch if recovered else placed.layout.shard_map.epoch if placed else 0
        if epoch > released:
            return
        if (model := self._models.pop(name, None)) is not None:
            model.leave(_released(self.context.shard, name))
        self._conditions.wake()
        if epoch:
            # Snapshots and copies contain the model until its release is in the log.
            await log_release(self.context, Released(name, released))
            self._placed.pop(name, None)
            self._recovered.pop(name, None)
            logger.info("model.released", "model '%s' is released: this shard has dropped it", name)
        self._refused.pop(name, None)

    @contextmanager
    def _placing(self, name: str) -> Iterator[PlacingProgress]:
        """While the model is on its way to being usable here: its progress, for those who ask."""
        if (known := self._progress.get(name)) is not None:
            yield known
            return
        self._progress[name] = PlacingProgress(name)
        try:
            yield self._progress[name]
        finally:
            del self._progress[name]

    async def place(self, shard_map: ShardMap) -> ShardModel:
        """Make the model of ``shard_map``: as it was recovered, else as a checkpoint has it, else uninitialised.

        Raises ModelMismatch when another model was recovered under its name, or slices of it moved without this shard;
        StorageFull, and what reading a checkpoint raises.
        """
        with self._placing(shard_map.spec.name) as progress:
            return await self._place(shard_map, progress)

    async def _place(self, shard_map: ShardMap, progress: PlacingProgress) -> ShardModel:
        name = shard_map.spec.name
        self.context.log.check_bound(name, Layout.of(shard_map, self.context.shard).region_bytes)
        await warm_up(shard_map.spec, progress)
        progress.begin("its memory is laid out")
        if name in self._recovered:
            start = await recovered_state(self.context, self._recovered[name], shard_map, self._held())
            del self._recovered[name]
        else:
            held = self._models.get(name)
            if held is not None and (held.layout.holds_any or Layout.of(shard_map, self.context.shard).holds_any):
                raise _left_out(self.context.shard, held.layout.shard_map, shard_map)
            start = await new_state(self.context, shard_map, self._held())
        model = self._made(start)
        self._placed[name] = model
        if shard_map.restored_from and not model.initialised:
            await restore_model(self.context, model, shard_map.restored_from, progress)
        self._show(model)
        return model

    def _held(self) -> list[ShardMap]:
        return [model.layout.shard_map for model in self._placed.values()]

    def replace(self, model: ShardModel, start: ModelState) -> None:
        """Replace ``model`` by one that begins with ``start``."""
        made = self._made(start)
        made.continues(model)
        self._placed[made.name] = made
        self._show(made)

    def refuse(self, name: str, error: PsError) -> None:
        """A model cannot be used here any more."""
        self._refused[name] = error
        if (model := self._models.pop(name, None)) is not None:
            model.stop(error)
        self._conditions.wake()

    def _made(self, start: ModelState) -> ShardModel:
        context = self.context
        return ShardModel(
            start,
            context.executor,
            self._view.consistency,
            context.log,
            context.failpoints,
            context.replication,
            context.announce,
            self.peers.round_norm,
        )

    def _show(self, model: ShardModel) -> None:
        layout, shard_map = model.layout, model.layout.shard_map
        model.members(self._live())
        self._models[model.name] = model
        logger.info(
            "model.placed",
            "model '%s': %d slices, %.1f MB, %s, %s",
            model.name,
            len(layout.slices),
            layout.region_bytes / 1e6,
            shard_map.spec.optimizer,
            self._view.consistency,
        )
        self._conditions.wake()

    @property
    def waiting_models(self) -> Mapping[str, ModelState]:
        """Recovered models that the cluster has not placed yet."""
        return self._recovered

    async def _until(self, true: Callable[[], bool], patience_seconds: float | None = None) -> bool:
        return await self._conditions.until(
            true, times.UNKNOWN_SECONDS if patience_seconds is None else patience_seconds
        )


def _unknown(shard: int, name: str, known: Iterable[str]) -> UnknownModel:
    """Nobody has declared the model."""
    return UnknownModel(
        f"model '{name}' is not declared",
        shard=str(shard),
        expected=", ".join(sorted(known)) or "a declared model",
        remedy="declare it with cluster.optimizer(...) first",
    )


def _released(shard: int, name: str) -> ModelReleased:
    """The model was declared, and has been released."""
    return ModelReleased(
        f"model '{name}' was released",
        shard=str(shard),
        expected="a model that is held by the shards",
        actual="dropped, with its state",
        remedy="declare a model under this name again: cluster.optimizer(..., name=...)",
    )


def _unheard(shard: int, name: str, epoch: int, known: int) -> Unavailable:
    """The caller knows a newer shard map, of this ``epoch``, than the shard, which has that of epoch ``known``."""
    return Unavailable(
        f"this shard has not received the newest shard map of model '{name}'",
        shard=str(shard),
        expected=f"epoch {epoch}" if epoch else "a shard map",
        actual=f"epoch {known}" if known else "none",
        remedy="see whether the shard can reach the coordinator",
    )


def _unplaceable(shard: int, name: str, error: Exception) -> InternalError:
    """It cannot be placed here, because of ``error``."""
    return InternalError(
        f"model '{name}' cannot be placed on shard {shard}",
        shard=str(shard),
        actual=f"{type(error).__name__}: {error}",
        remedy="see the log of the shard",
    )


def _left_out(shard: int, held: ShardMap, placed: ShardMap) -> InternalError:
    """Its slices moved from ``held`` to ``placed`` without this shard."""
    return InternalError(
        f"slices of model '{held.spec.name}' moved, and shard {shard} was not asked",
        shard=str(shard),
        expected=f"epoch {held.epoch}",
        actual=f"epoch {placed.epoch}",
        remedy="start this shard again: what was staged is in its log",
    )
