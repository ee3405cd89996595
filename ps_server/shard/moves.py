"""Decides when parts of this shard lie otherwise: prepared at a cut, switched or forgotten as the cluster decides.

Two-phase commit: Gray, "Notes on Data Base Operating Systems", 1978. The decision is in the coordinator's journal; a
shard that has prepared waits for it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from ps_protocol.convert import shard_map_to_pb
from ps_protocol.errors import InternalError, ModelMoved, PsError, Unavailable
from ps_protocol.layout import Layout
from ps_protocol.model import ShardMap
from ps_protocol.view import ClusterView, Role
from ps_server.log import Prepared, RecoveredModel, Switched, switched
from ps_server.optimizers import describe
from ps_server.shard.cut import Cuts
from ps_server.shard.fetching import fetch
from ps_server.shard.lane import INLINE_BYTES
from ps_server.shard.model import ShardModel
from ps_server.shard.placing import moved_on
from ps_server.shard.registry import Registry

logger = logging.getLogger(__name__)

_SWITCH_BYTES = 1 << 10
"""More than a SwitchRecord takes."""

_BUCKET_BYTES = 64
"""More than what announces a bucket takes."""

SETTLE_SECONDS = 10.0
"""How long a new cut waits for the outcome of a move."""


@dataclass(frozen=True, eq=False)
class _Bound:
    """What this shard has promised to be able to do."""

    cut: str
    models: Sequence[ShardModel]


class Moves:
    """Called by the service and with each view of the cluster, on the shard's event loop. One move at a time."""

    def __init__(self, registry: Registry, cuts: Cuts) -> None:
        self._parts = registry.parts
        self._registry = registry
        self._cuts = cuts
        self._bound: _Bound | None = None
        #: By model, while it is made anew.
        self._switching: dict[str, asyncio.Task[None]] = {}
        self._settled = asyncio.Event()
        self._settled.set()
        registry.watch(self._on_view)

    async def prepare(self, cut: str, revision: int, maps: Sequence[ShardMap]) -> int:
        """Get and log what the next ``maps`` need; from then on stand still until the cluster's view tells the outcome.

        What comes is fetched from the shards of the cluster's view, which is at least of this ``revision``. Returns the
        bytes of values and state that came. Raises Unavailable when the move is over, and whatever keeps this shard
        from it: StorageFull, StateLost, InvalidRequest, ModelMismatch, UnknownModel, InternalError. Then nothing was
        changed, and the shard goes on.
        """
        await self._registry.membership(revision)
        members = self._registry.view.live(Role.SHARD)
        if self._bound:
            raise Unavailable(f"shard {self._parts.shard} has prepared for a move already", remedy="try again")
        try:
            with self._cuts.prepared(cut):
                self._check(cut)
                prepared = [(await self._standing(shard_map), shard_map) for shard_map in maps]
                arrived = [
                    (model, await fetch(model.layout.shard_map, shard_map, self._parts.shard, members))
                    for model, shard_map in prepared
                ]
                self._check(cut)
                await self._bind(cut, arrived)
        except BaseException:
            self.abort(cut)
            raise
        received = sum(each.nbytes for _, each in arrived)
        logger.info("shard %d: %.1f MB came for the next shard maps", self._parts.shard, received / 1e6)
        return received

    async def settled(self) -> None:
        """Returns when nothing waits for a decision or switches, or some time has passed."""
        with suppress(TimeoutError):
            async with asyncio.timeout(SETTLE_SECONDS):
                await self._settled.wait()

    def abort(self, cut: str) -> None:
        """Forget what was prepared for ``cut``, if anything was."""
        if self._bound and self._bound.cut == cut:
            self._unbind()

    def _check(self, cut: str) -> None:
        if self._registry.view.moving != cut:
            raise Unavailable(f"shard {self._parts.shard} came too late: the move is over", remedy="try again")

    async def _standing(self, shard_map: ShardMap) -> ShardModel:
        model = await self._registry.model(shard_map.spec.name, shard_map.epoch - 1)
        model.check()
        model.require_values()
        if not model.gate.still and model.layout.holds_any:
            raise Unavailable(f"model '{model.name}' came to shard {self._parts.shard} too late", remedy="try again")
        model.gate.hold()
        return model

    async def _bind(self, cut: str, arrived: Sequence[tuple[ShardModel, Prepared]]) -> None:
        """From now on this shard can do both: go on as it is, and switch. Raises as ``prepare``."""
        parts, bound = self._parts, _Bound(cut, [model for model, _ in arrived])
        if parts.announce and any(prepared.incoming or prepared.buckets for _, prepared in arrived):
            await parts.announce()
        await self._reserve(len(arrived))
        # Before the log has it: a snapshot that begins behind it would not hold what came.
        self._bound = bound
        self._stir()
        for model, prepared in arrived:
            model.pending = prepared
        await parts.keep(lambda: self._log(arrived))
        if parts.replication:
            await parts.replication.covered(parts.log.number, always=True)
        if self._bound is not bound:
            raise Unavailable(f"shard {parts.shard} came too late: the move is over", remedy="try again")

    async def _reserve(self, count: int) -> None:
        """Room for the records of a switch, which cannot be refused any more. Raises StorageFull."""
        for done in range(count):
            try:
                await self._parts.log.reserve(_SWITCH_BYTES)
            except BaseException:
                for _ in range(done):
                    self._parts.log.release(_SWITCH_BYTES)
                raise

    async def _log(self, arrived: Sequence[tuple[ShardModel, Prepared]]) -> None:
        for _, prepared in arrived:
            message = shard_map_to_pb(prepared.shard_map).ByteSize()
            message += sum(tensor.ByteSize() + 8 for tensor in describe(prepared.entries)) + 8 * len(prepared.incoming)
            message += _BUCKET_BYTES * len(prepared.buckets)
            await self._parts.write(prepared, prepared.nbytes + message, ("before_prepare_log", "after_prepare_log"))

    # -- the decision

    def _on_view(self, view: ClusterView) -> None:
        bound = self._bound
        if bound is None or view.moving == bound.cut:
            return
        moved = [m for m in bound.models if m.pending and view.models.get(m.name) == m.pending.shard_map.epoch]
        for model in moved:
            switch = self._switch(model, model.leave(self._moved(model)))
            self._switching[model.name] = asyncio.create_task(switch, name="switch")
        self._unbind(without=moved)
        self._cuts.thaw(bound.cut)

    def _unbind(self, without: Sequence[ShardModel] = ()) -> None:
        """Forget what was prepared; not that of the models that switch now."""
        bound, self._bound = self._bound, None
        for model in bound.models if bound else ():
            if model not in without:
                model.pending = None
                self._parts.log.release(_SWITCH_BYTES)
        self._stir()

    def _stir(self) -> None:
        if self._bound or self._switching:
            self._settled.clear()
        else:
            self._settled.set()

    async def _switch(self, model: ShardModel, start: RecoveredModel) -> None:
        """Write down that it lies otherwise now, and go on so."""
        parts, epoch = self._parts, start.pending.shard_map.epoch if start.pending else 0

        def work() -> RecoveredModel:
            parts.failpoints.hit("before_switch_log")
            parts.log.append(Switched(model.name, epoch))
            parts.failpoints.hit("after_switch_log")
            return switched(start, parts.shard)

        size = max(model.layout.region_bytes, INLINE_BYTES * parts.log.waits)
        if start.pending:
            coming = sum(contents.nbytes for _, contents in start.pending.buckets)
            size = max(size, Layout.of(start.pending.shard_map, parts.shard).region_bytes + coming)
        try:
            self._registry.replace(model, await parts.lane.submit(work, size))
        except (PsError, OSError, RuntimeError, MemoryError) as error:
            logger.error("model '%s' stopped: it could not switch its shard map", model.name, exc_info=error)
            self._registry.refuse(
                model.name,
                InternalError(
                    f"shard {parts.shard} could not switch model '{model.name}' to epoch {epoch}",
                    shard=str(parts.shard),
                    actual=f"{type(error).__name__}: {error}",
                    remedy="start this shard again: what it needs is in its log",
                ),
            )
        finally:
            model.pending = None
            parts.log.release(_SWITCH_BYTES)
            del self._switching[model.name]
            self._stir()

    def _moved(self, model: ShardModel) -> ModelMoved:
        known = model.pending.shard_map.epoch if model.pending else 0
        return moved_on(self._parts.shard, model.name, known, model.layout.shard_map.epoch)
