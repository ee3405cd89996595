"""Decides when slices of this shard move: staged at a cut, then made or dropped as the cluster decides.

Two-phase commit: Gray, "Notes on Data Base Operating Systems", 1978. The decision is in the coordinator's journal; a
shard that has staged a move waits for it.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass

from ps_protocol.cluster.view import ClusterView, Role
from ps_protocol.errors import InternalError, ModelMoved, PsError, Unavailable
from ps_protocol.logs import EventLogger
from ps_protocol.model.layout import Layout
from ps_protocol.model.spec import ShardMap
from ps_protocol.wire.convert.model import SHARD_MAP
from ps_protocol.wire.convert.shard import STATE_HEADER
from ps_server.log.entries import Resharded, StagedReshard, UpdateLog
from ps_server.optimizers.state import describe
from ps_server.shard import times
from ps_server.shard.execution.executor import INLINE_WORK_BYTES
from ps_server.shard.quiesce import Quiescence
from ps_server.shard.reconcile import moved_on
from ps_server.shard.registry import Registry
from ps_server.shard.step.model import ShardModel
from ps_server.shard.transfer import IncomingBlock, IncomingMemory, coming_slices, fetch, transfer_plan
from ps_server.state.model_state import ModelState
from ps_server.state.reshard import resharded
from ps_server.tasks import Conditions, Timer

logger = EventLogger(__name__)

_COMMIT_BYTES = 1 << 10
"""More than a SwitchRecord takes."""

_MESSAGE_BYTES = 64 << 10
"""About what the record of a move takes beside a shard map and what comes."""

_BUCKET_BYTES = 64
"""More than what announces a bucket takes."""


@dataclass(frozen=True, eq=False)
class _Promise:
    """What this shard has promised to be able to reshard."""

    cut: str
    models: Sequence[ShardModel]


class Resharding:
    """Called by the service and with each view of the cluster, on the shard's event loop. One move at a time."""

    def __init__(self, registry: Registry, quiescence: Quiescence) -> None:
        self._context = registry.context
        self._registry = registry
        self._quiescence = quiescence
        self._promised: _Promise | None = None
        #: By model, while it is resharded.
        self._committing: dict[str, asyncio.Task[None]] = {}
        #: Calls of ``stage`` that have not ended.
        self._staging = 0
        self._outcomes = Conditions()
        self._incoming = IncomingMemory()
        self._room = LogRoom(registry.context.log)
        #: What it gave to the models of the present batch, by name.
        self._blocks: dict[str, IncomingBlock] = {}
        #: Rings when no batch has come for some time: then memory is given back.
        self._rest = Timer(self._rested)
        self._compacting: asyncio.Task[None] | None = None
        registry.watch(self._on_view)

    async def make_room(self, maps: Sequence[ShardMap]) -> None:
        """Ahead of ``stage``, while pushes go on: memory for the next ``maps``, log and connections for what comes.

        A map that does not follow the present one is left to ``stage``. Raises StorageFull.
        """
        sizes, largest = list[int](), 0
        for shard_map in maps:
            model = next((each for each in self._registry.models if each.name == shard_map.spec.name), None)
            if model is None or shard_map.epoch != model.layout.shard_map.epoch + 1:
                continue
            layout = Layout.of(shard_map, self._context.shard)
            # What cannot be had now is asked for again when they come.
            with suppress(OSError, MemoryError):
                await asyncio.to_thread(model.touch, layout)
            slices = coming_slices(model.layout, layout)
            coming = sum(span.end - span.begin for span in slices) + model.state_bytes(slices)
            with suppress(MemoryError):
                await asyncio.to_thread(self._incoming.make, coming)
            sources = {plan.source for plan in transfer_plan(model.layout.shard_map, shard_map, self._context.shard)}
            calls = (self._registry.sources.connect(source, model.name) for source in sources)
            await asyncio.gather(*calls, return_exceptions=True)
            message = 2 * SHARD_MAP.to_pb(shard_map).ByteSize() + _MESSAGE_BYTES
            sizes += (coming + message, _COMMIT_BYTES)
            largest = max(largest, layout.region_bytes)
        self._rest_later()
        # A file of the log takes seconds to make. The updates of the next layout may want larger ones.
        await self._room.hold(*sizes)
        await self._context.log.reserve(largest)
        self._context.log.release(largest)

    async def stage(self, cut: str, revision: int, maps: Sequence[ShardMap]) -> int:
        """Fetch and log what the next ``maps`` need; then stay paused until the cluster's view shows the outcome.

        What comes is fetched from the shards of the cluster's view, which is at least of this ``revision``. Returns the
        bytes of values and state that came. Raises Unavailable when the move is over, and what prevents it here:
        StorageFull, StateLost, InvalidRequest, ModelMismatch, UnknownModel, InternalError. Then nothing was
        changed, and the shard goes on.
        """
        await self._registry.membership(revision)
        members = self._registry.view.live(Role.SHARD)
        if self._promised:
            raise Unavailable(f"shard {self._context.shard} has staged a move already", remedy="try again")
        self._staging += 1
        try:
            with self._quiescence.staging(cut):
                self._check(cut)
                staged = [(await self._standing(shard_map), shard_map) for shard_map in maps]
                arrived = [(model, await self._fetch(model, shard_map, members)) for model, shard_map in staged]
                self._check(cut)
                await self._promise(cut, arrived)
        except BaseException:
            self.abort(cut)
            # To a shard that was lost a channel would wait before it connects again.
            await self._registry.sources.close()
            raise
        finally:
            self._staging -= 1
            self._room.release()
            self._rest_later()
        received = sum(each.nbytes for _, each in arrived)
        logger.info("move", "shard %d: %.1f MB came for the next shard maps", self._context.shard, received / 1e6)
        return received

    async def _fetch(self, model: ShardModel, wanted: ShardMap, members: Collection[int]) -> StagedReshard:
        block = self._blocks[model.name] = self._incoming.take()
        held, shard = model.layout.shard_map, self._context.shard
        return await fetch(held, wanted, shard, members, self._registry.sources, block)

    async def settled(self) -> None:
        """Returns when nothing waits for a decision or is resharded, or some time has passed."""
        await self._outcomes.until(lambda: not (self._promised or self._committing), times.OUTCOME_SECONDS)

    def abort(self, cut: str) -> None:
        """Drop what was staged for ``cut``, if anything was."""
        if self._promised and self._promised.cut == cut:
            self._forget()

    def _check(self, cut: str) -> None:
        if self._registry.view.moving != cut:
            raise Unavailable(f"shard {self._context.shard} came too late: the move is over", remedy="try again")

    async def _standing(self, shard_map: ShardMap) -> ShardModel:
        model = await self._registry.model(shard_map.spec.name, shard_map.epoch - 1)
        model.gate.check()
        model.values.require()
        if not model.gate.paused and model.layout.holds_any:
            raise Unavailable(f"model '{model.name}' came to shard {self._context.shard} too late", remedy="try again")
        model.gate.pause()
        return model

    async def _promise(self, cut: str, arrived: Sequence[tuple[ShardModel, StagedReshard]]) -> None:
        """From now on this shard can do both: continue as it is, and reshard. Raises as ``stage``."""
        context, promised = self._context, _Promise(cut, [model for model, _ in arrived])
        if context.announce and any(staged.incoming or staged.buckets for _, staged in arrived):
            await context.announce()
        await self._reserve(len(arrived))
        # Before the log has it: a snapshot that begins behind it would not hold what came.
        self._promised = promised
        for model, staged in arrived:
            model.pending = staged
        await context.keep(lambda: self._log(arrived))
        if context.replication:
            await context.replication.covered(context.log.number, always=True)
        if self._promised is not promised:
            raise Unavailable(f"shard {context.shard} came too late: the move is over", remedy="try again")

    async def _reserve(self, count: int) -> None:
        """Room for the records of the decision, which cannot be refused any more. Raises StorageFull."""
        for done in range(count):
            if self._room.take(_COMMIT_BYTES, _COMMIT_BYTES) is not None:
                continue
            try:
                await self._context.log.reserve(_COMMIT_BYTES)
            except BaseException:
                for _ in range(done):
                    self._context.log.release(_COMMIT_BYTES)
                raise

    async def _log(self, arrived: Sequence[tuple[ShardModel, StagedReshard]]) -> None:
        for _, staged in arrived:
            message = SHARD_MAP.to_pb(staged.shard_map).ByteSize()
            state = STATE_HEADER.all_to_pb(describe(staged.entries))
            message += sum(tensor.ByteSize() + 8 for tensor in state) + 8 * len(staged.incoming)
            message += _BUCKET_BYTES * len(staged.buckets)
            size = staged.nbytes + message
            held = self._room.take(size, math.inf)
            try:
                points = ("before_prepare_log", "after_prepare_log")
                await self._context.write(staged, size, points, reserved=held is not None)
            finally:
                if held is not None:
                    self._context.log.release(held)

    # -- the decision

    def _on_view(self, view: ClusterView) -> None:
        promised = self._promised
        if promised is None or view.moving == promised.cut:
            return
        moved = [m for m in promised.models if m.pending and view.models.get(m.name) == m.pending.shard_map.epoch]
        for model in moved:
            commit = self._commit(model, model.leave(self._moved(model)))
            self._committing[model.name] = asyncio.create_task(commit, name="reshard")
        self._forget(without=moved)
        self._quiescence.resume(promised.cut)

    def _forget(self, without: Sequence[ShardModel] = ()) -> None:
        """Drop what the models have staged, except for the models ``without``, which are resharded now."""
        promised, self._promised = self._promised, None
        for model in promised.models if promised else ():
            if model not in without:
                model.pending = None
                self._context.log.release(_COMMIT_BYTES)
                # Not used again: a record of it may still be written.
                self._blocks.pop(model.name, None)
        self._outcomes.wake()
        self._rest_later()

    async def _commit(self, model: ShardModel, start: ModelState) -> None:
        """Log the cluster's decision to move slices of ``model``, and continue with the next shard map."""
        context, epoch = self._context, start.pending.shard_map.epoch if start.pending else 0

        def work() -> ModelState:
            context.failpoints.hit("before_switch_log")
            context.log.append(Resharded(model.name, epoch))
            context.failpoints.hit("after_switch_log")
            return resharded(start, context.shard)

        size = max(model.layout.region_bytes, INLINE_WORK_BYTES * context.log.waits)
        if start.pending:
            coming = sum(contents.nbytes for _, contents in start.pending.buckets)
            size = max(size, Layout.of(start.pending.shard_map, context.shard).region_bytes + coming)
        block = self._blocks.pop(model.name, None)
        try:
            self._registry.replace(model, await context.executor.submit(work, size))
            if block is not None:
                self._incoming.give(block)
        except (PsError, OSError, RuntimeError, MemoryError) as error:
            logger.error("model.stopped", "model '%s' stopped: it could not be resharded", model.name, exc_info=error)
            self._registry.refuse(
                model.name,
                InternalError(
                    f"shard {context.shard} could not reshard model '{model.name}' to epoch {epoch}",
                    shard=str(context.shard),
                    actual=f"{type(error).__name__}: {error}",
                    remedy="start this shard again: what it needs is in its log",
                ),
            )
        finally:
            model.pending = None
            context.log.release(_COMMIT_BYTES)
            del self._committing[model.name]
            self._outcomes.wake()
            self._rest_later()

    def _rest_later(self) -> None:
        self._rest.set(asyncio.get_running_loop().time() + times.REST_SECONDS)

    def _rested(self) -> None:
        if self._promised or self._committing or self._staging:
            return
        self._room.release()
        self._incoming.clear()
        self._blocks.clear()
        self._compacting = asyncio.create_task(self._compact(), name="compact")

    async def _compact(self) -> None:
        await self._registry.sources.close()
        for model in self._registry.models:
            # Without memory for both it stays where it is.
            with suppress(OSError, MemoryError, PsError):
                await model.compact()

    def _moved(self, model: ShardModel) -> ModelMoved:
        known = model.pending.shard_map.epoch if model.pending else 0
        return moved_on(self._context.shard, model.name, known, model.layout.shard_map.epoch)


class LogRoom:
    """Of one shard, on its event loop."""

    def __init__(self, log: UpdateLog) -> None:
        self._log = log
        self._held: list[int] = []

    async def hold(self, *sizes: int) -> None:
        """Reserve room for records of these sizes, in place of earlier room. Raises StorageFull; then there is none."""
        self.release()
        try:
            for nbytes in sizes:
                await self._log.reserve(nbytes)
                self._held.append(nbytes)
        except BaseException:
            self.release()
            raise

    def take(self, least: int, most: float) -> int | None:
        """Hand on room for a record of ``least`` to ``most`` bytes; returns what its taker has to release, None: none.

        To reserve it again might wait for another file, for updates under way that are written already count, too.
        """
        found = min((nbytes for nbytes in self._held if least <= nbytes <= most), default=None)
        if found is not None:
            self._held.remove(found)
        return found

    def release(self) -> None:
        """Let the next that reserves take it."""
        held, self._held = self._held, []
        for nbytes in held:
            self._log.release(nbytes)
