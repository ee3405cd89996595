"""One model on one shard: the only owner of its arenas, optimizer state, clocks and version."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from copy import copy
from dataclasses import replace
from functools import partial
from itertools import zip_longest
from typing import TYPE_CHECKING, TypeVar

from ps_protocol.cluster.model_status import ModelStatus, TableStatus, WorkerStatus
from ps_protocol.errors import ModelMoved, PsError
from ps_protocol.model.layout import Layout, SliceSpan
from ps_protocol.model.spec import Consistency
from ps_server.consistency import (
    FOREVER,
    ParkedPulls,
    Position,
    PushDecision,
    Tracker,
    TrackerState,
    Verdict,
    WorkerKey,
)
from ps_server.failpoints import Failpoints
from ps_server.log.entries import StagedReshard, UpdateLog
from ps_server.log.snapshots import ModelPart
from ps_server.optimizers.state import StateEntry
from ps_server.shard.durability.replication import Replication
from ps_server.shard.execution.executor import ShardExecutor
from ps_server.shard.step.applier import Applier, Due
from ps_server.shard.step.clipped import AskNorm, ClippedRounds, ClippedSteps
from ps_server.shard.step.connections import Connections
from ps_server.shard.step.gate import Gate
from ps_server.shard.step.model_rows import ModelRows
from ps_server.shard.step.options import OptionDifferences
from ps_server.shard.step.published import Published
from ps_server.shard.step.push import HeldPushes, IncomingPush, must_skip
from ps_server.shard.step.push_trace import ServedPush
from ps_server.shard.step.values import ModelValues
from ps_server.state.blocks import Block
from ps_server.state.lent_regions import LentRegions
from ps_server.state.model_state import ModelState
from ps_server.tasks import Timer

if TYPE_CHECKING:
    from ps_server.state.blocks import Group, Wanted
    from ps_server.state.region import Region
    from ps_server.tables.table import ShardTable

logger = logging.getLogger(__name__)

T = TypeVar("T")


def _tell(gathered: Sequence[IncomingPush], _: asyncio.Future[Region]) -> None:
    for push in gathered:
        push.decided(push)


class ShardModel:
    """Called from the shard's event loop only.

    Decisions are made there, at once and in order; tensor work follows them through the executor in the same order. So
    what is published holds exactly what was decided before it was asked for.
    """

    def __init__(
        self,
        start: ModelState,
        executor: ShardExecutor,
        consistency: Consistency,
        log: UpdateLog,
        failpoints: Failpoints,
        replication: Replication | None = None,
        announce: Callable[[], Awaitable[None]] | None = None,
        ask_norm: AskNorm | None = None,
    ) -> None:
        """Continue from ``start``, which this model owns from now on. ``announce``: see ModelValues.

        ``ask_norm`` asks other shards where gradients are clipped; None: this shard is the only one.
        """
        self.layout = start.replica.layout
        self.tracker = start.tracker
        self.tracker.configure(consistency.with_rule(self.layout.shard_map.spec.stale))
        #: Holds pushes back while the job is captured at one point, and is closed by what stops the model.
        self.gate = Gate(self.decide_gathered)
        self._applier = Applier(
            start.replica, self.tracker, executor, log, self.gate, replication, failpoints, self.stop
        )
        self.times, self.samples = self._applier.times, self._applier.samples
        self.pool, self.copies = self._applier.pool, self._applier.copies
        #: The newest version decided, where an answer may bring it now; None: something has to be waited for.
        self.answerable: Callable[[], Published | None] = self._applier.answerable
        #: By worker and sequence, the newest pushes whose step raised and was undone, and why: known once their version
        #: is published.
        self.undone: Mapping[tuple[WorkerKey, int], PsError] = self._applier.undone
        #: When each slice was changed last, by what has been decided so far.
        self.last_changes = self._applier.last_changes
        #: Regions that workers map and fill with gradients.
        self.lent = LentRegions(self.layout)
        #: Accepted pushes whose step is still open (sync).
        self._held = HeldPushes()
        self.rows = ModelRows(self._applier, self._held, lambda: self.is_pending)
        self.values = ModelValues(self._applier, announce, initialised=start.initialised)
        #: Staleness of each rank's last applied push.
        self.staleness: dict[int, int] = {}
        #: Options that workers push without effect (sync).
        self.differences = OptionDifferences(self.name)
        #: Open step streams, one of each rank; and calls that upload values or rows, one of each incarnation.
        self.streams, self.uploads = Connections(self.name), Connections(self.name)
        #: Live workers that have been sent the values, or had them when they opened a stream.
        self.supplied: set[WorkerKey] = set()
        self._executor, self._loop = executor, asyncio.get_running_loop()
        #: Pushes that came in this turn of the event loop.
        self._gathered: list[IncomingPush] = []
        self.failpoints = failpoints
        #: The next shard map and what it needs, until the cluster decides; nothing changes and no snapshot begins then.
        self.pending: StagedReshard | None = None
        self._parked: ParkedPulls[asyncio.Future[None]] = ParkedPulls()
        #: Rings when the grace time of an open step ends (sync).
        self._grace: Timer | None = None
        self._live_workers = 1
        #: Rounds that are clipped together with other shards' parts of them; None: there are none.
        self.clipped: ClippedRounds | None = None
        if clip := self.layout.shard_map.spec.clip_grad_norm:
            alone = ask_norm is None or len(self.layout.shard_map.holders) == 1
            self._applier.combine = ClippedSteps(clip, alone=alone).combine
            if ask_norm is not None and not alone:
                self.clipped = ClippedRounds(
                    self.layout, self._applier, executor, self._held, ask_norm, self._advance, failpoints
                )

    @property
    def name(self) -> str:
        """Name of the model."""
        return self.layout.shard_map.spec.name

    @property
    def parked_pulls(self) -> int:
        """Pulls that wait for the consistency mode."""
        return len(self._parked)

    @property
    def initialised(self) -> bool:
        """Whether it has values."""
        return self.values.initialised

    @property
    def loads(self) -> int:
        """Loads that wrote something."""
        return self._applier.loads

    @property
    def is_pending(self) -> bool:
        """Whether it waits for the cluster's decision on its next shard map."""
        return self.pending is not None

    @property
    def tables(self) -> Sequence[ShardTable]:
        """One for each of the model's tables; changed in the executor only. None once it was handed on."""
        return self._applier.table_list

    def continues(self, before: ShardModel) -> None:
        """Take the place of ``before``: go on with its counts, and with memory that its streams have used."""
        self.staleness = dict(before.staleness)
        self.supplied = set(before.supplied)
        self.times = self._applier.times = before.times
        before.pool.continue_in(self.pool)
        self.lent.keep(before.lent)

    # -- members and mode

    def members(self, live: Mapping[int, int]) -> None:
        """The live workers: rank to incarnation."""
        self.decide_gathered()
        self._live_workers = max(1, len(live))
        if self.clipped is not None:
            self.clipped.live_workers = self._live_workers
        self.staleness = {rank: value for rank, value in self.staleness.items() if rank in live}
        self.supplied = {worker for worker in self.supplied if live.get(worker.rank) == worker.incarnation}
        self.differences.members(live)
        self.tracker.members(live)
        self.streams.members(live)
        self.lent.members(live)
        self._advance()

    def configure(self, consistency: Consistency) -> None:
        """Change the consistency mode; the model keeps a rule of its own for stale pushes."""
        self.decide_gathered()
        self.tracker.configure(consistency.with_rule(self.layout.shard_map.spec.stale))
        self._advance()

    def attach(self, worker: WorkerKey, phase: int, clock: int | None = None) -> Position:
        """A worker opened its stream; returns where it stands. ``clock``: it has been here before. Raises Fenced."""
        self.gate.check()
        self.decide_gathered()
        position = self.tracker.attach(worker, phase, clock)
        if clock is not None:
            self.supplied.add(worker)
        self._advance()
        return position

    def answered(self, worker: WorkerKey, sequence: int) -> None:
        """See Tracker. A quiesce that waits for one of these pushes goes on."""
        if self.tracker.answered(worker, sequence):
            self.gate.notify()

    def arrive(self, worker: WorkerKey, phase: int) -> None:
        """A worker entered the barrier that ends ``phase``. Raises Fenced."""
        self.gate.check()
        self.decide_gathered()
        self.tracker.arrive(worker, phase)
        self._advance()

    # -- pushes

    async def push(self, push: IncomingPush) -> PushDecision | None:
        """Decide about a push, which has its ``decision`` then, and queue its work.

        Raises Fenced, InvalidRequest, NonFiniteGradient, StateLost, TableFull or StorageFull; then nothing was decided.
        """
        try:
            if self._gathered:
                self.decide_gathered()
            if self.gate.closed:
                self.gate.check()
            if not self.values.initialised:
                self.values.require()
            unchecked = push.region is not None and (push.rows is not None or not push.finite)
            if unchecked and await must_skip(push, self._executor, self._applier.replica.tables):
                push.info = replace(push.info, skipped=True)
            await self._applier.reserve_push(push)
        except BaseException:
            self._applier.free(push)
            raise
        try:
            if self.gate.engaged and not await self.gate.pass_push(push.info):
                push.decision = self.tracker.separate("others of its workers have to wait")
                self._applier.give_up(push)
                return push.decision
        except BaseException:
            self._applier.give_up(push)
            raise
        self._decide([push])
        if push.error is not None:
            raise push.error
        return push.decision

    def forget(self, push: IncomingPush) -> None:
        """Its stream has ended before it was decided about, and nothing was reserved."""
        self._applier.free(push)

    def gather(self, push: IncomingPush, decided: Callable[[IncomingPush], None]) -> bool:
        """Decide about a push without rows, which was checked, with all others that this turn of the event loop brings.

        While an update is made, with all that come until it is made. Then ``decided`` is called, in their order, once
        their updates are made; ``error`` of a push that is refused says why. Nothing is called when the model stops
        before. False, with nothing done: it has to wait for something else than updates.
        """
        if not (self.values.initialised and self._applier.reserve_now(push)):
            return False
        push.decided = decided
        if not self._gathered:
            made = self._applier.made
            if made.done():
                self._loop.call_soon(self.decide_gathered)
            else:
                made.add_done_callback(lambda _: self.decide_gathered())
        self._gathered.append(push)
        return True

    def decide_gathered(self) -> None:
        """Decide now about what was gathered: before anything else is decided, or has to wait."""
        if not self._gathered:
            return
        gathered, self._gathered = self._gathered, []
        made = self._decide(gathered)
        if made is None or made.done():
            for push in gathered:
                push.decided(push)
        else:
            made.add_done_callback(partial(_tell, gathered))

    def _decide(self, pushes: Sequence[IncomingPush]) -> asyncio.Future[Region] | None:
        """Decide about pushes that have been reserved for, in order, and queue their work, which is returned."""
        due, made = [], None
        for push in pushes:
            info = push.info
            try:
                decision = push.decision = self.tracker.push(info)
            except Exception as error:  # noqa: BLE001 -- it belongs to the stream of this push
                push.error = error
                self._applier.give_up(push)
                continue
            if decision.verdict is Verdict.APPLY:
                self.staleness[info.worker.rank] = decision.staleness
                for other in info.others:
                    self.staleness[other.worker.rank] = decision.staleness
                due.append(Due([push], self.tracker.version, decision.scale))
            elif decision.verdict is Verdict.HOLD:
                self._held.hold(push)
            else:
                self._applier.give_up(push)
        if due:
            made = self._applier.update(due, self._live_workers)
        self._advance()
        return made

    def resume(self) -> None:
        """The model is not paused any more: continue with what has waited."""
        self.gate.open()
        self._advance()

    def _advance(self) -> None:
        """After every event, and when a grace time ends: apply the steps whose time has come, then answer the pulls
        that may be answered.
        """
        if self.gate.engaged:
            self.gate.notify()
            if self.gate.paused or self.gate.closed:
                return
        if self.tracker.rounds.lowest is not FOREVER or self.clipped is not None or self._grace is not None:
            self._take_rounds()
        if self._parked.lowest is not None:
            for parked in self._parked.release(self.tracker):
                if not parked.done():
                    parked.set_result(None)

    def _take_rounds(self) -> None:
        now = asyncio.get_running_loop().time()
        for ready in self.tracker.take_ready(now) if self.clipped is None else self.clipped.take_ready(now):
            pushes = self._held.take(ready, self.times)
            for info, staleness in zip(ready.contributions, ready.staleness, strict=True):
                self.staleness[info.worker.rank] = staleness
                for other in info.others:
                    self.staleness[other.worker.rank] = staleness
            if len(pushes) > 1:
                self.differences.note(pushes)
            if pushes:
                combine = self.clipped.joined.pop(ready.position).combine if self.clipped is not None else None
                due = Due(pushes, ready.version, is_round=True, combine=combine)
                self._applier.update([due], self._live_workers)
        grace_ends = self.tracker.grace_ends
        if grace_ends is not None or self._grace is not None:
            self._grace = self._grace or Timer(self._advance)
            self._grace.set(grace_ends)

    # -- the end

    async def stopped(self) -> None:
        """Raises what stops this model, when something does."""
        await self.gate.closing()

    def stop(self, error: PsError) -> None:
        """Decide and answer nothing any more."""
        gathered, self._gathered = self._gathered, []
        for push in gathered:
            self._applier.give_up(push)
        self.gate.close(error)
        if self._grace:
            self._grace.set(None)
        if self.clipped is not None:
            self.clipped.stop()
        for parked in self._parked:
            if not parked.done():
                parked.set_exception(copy(self.gate.closed or error))

    def leave(self, why: PsError) -> ModelState:
        """Stop, and hand on what it has, once nothing is queued in the executor: slices moved, or it was released.

        Pushes that are held for an open step are forgotten: workers repeat them when ``why`` is ModelMoved.
        """
        self.stop(why)
        for push in self._held.take_all():
            self._applier.give_up(push)
        # A copy: the cluster's members may still change the other.
        tracker = Tracker(self.tracker.consistency)
        tracker.restore(self.known_pushes())
        if isinstance(why, ModelMoved):
            self.lent.hold()
            self.pool.hold()
        shard_map, unread = self.layout.shard_map, self._applier.unread()
        replica = self._applier.take()
        return ModelState(shard_map, replica, tracker, self.initialised, pending=self.pending, unread=unread)

    # -- pulls

    async def may_pull(self, position: Position) -> None:
        """Returns when a pull of a worker at ``position`` may be answered. Raises what stopped the model."""
        parked: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._parked.park(position, parked)
        try:
            await parked
        finally:
            if not parked.done() or parked.cancelled():
                self._parked.discard(parked)

    async def settled(self) -> None:
        """Returns when everything decided so far is done and answers may rest on it. Raises what stopped the model."""
        await self._applier.settled()

    async def take_published(self, *, quick: bool = False, trace: ServedPush | None = None) -> Published:
        """Parameters and buffers after everything decided so far, which the caller gives back once they are read.

        ``quick``: they are read from shared memory. ``trace``: of the push that they answer. Raises what stopped the
        model.
        """
        if self.gate.closed:
            self.gate.check()
        published = self._applier.newest
        published.take(quick=quick)
        try:
            if not published.ready.done():
                await asyncio.shield(published.ready)
            await self._applier.covered(trace)
            if self.gate.closed:
                self.gate.check()
        except BaseException:
            published.give_back(quick=quick)
            raise
        return published

    @asynccontextmanager
    async def published(self) -> AsyncIterator[Published]:
        """As ``take_published``, given back at the end of the block."""
        published = await self.take_published()
        try:
            yield published
        finally:
            published.give_back(quick=False)

    @asynccontextmanager
    async def save(self, slices: Collection[int] | None = None) -> AsyncIterator[tuple[Published, list[StateEntry]]]:
        """Values and a copy of the optimizer state, whole or of these slices, of one version."""
        self.gate.check()
        copied = self._applier.state(slices)
        async with self.published() as published:
            yield published, await copied

    def status(self) -> ModelStatus:
        """Where it stands now."""
        tracker, options, row_options = self.tracker, self._applier.options, self._applier.row_options
        return ModelStatus(
            epoch=self.layout.shard_map.epoch,
            version=tracker.version,
            initialised=self.values.told,
            clocks=tuple(
                WorkerStatus(
                    standing.worker.rank,
                    standing.worker.incarnation,
                    standing.position.phase,
                    standing.position.clock,
                    standing.last_sequence,
                    self.streams.transports.get(standing.worker),
                    standing.worker in self.supplied,
                )
                for standing in tracker.clocks()
            ),
            staleness_counts=tuple(tracker.counts.staleness),
            outcomes=tracker.counts.outcomes,
            parked_pulls=self.parked_pulls,
            assigned=self.values.assigned,
            assigned_checksums=self.values.checksums,
            learning_rates=tuple(map(_learning_rate, options)),
            tables=tuple(
                TableStatus(
                    name=table.spec.name,
                    rows=table.rows,
                    waiting=table.waiting,
                    size_bytes=table.size_bytes,
                    updates=table.updates,
                    inserted=table.inserted,
                    expired=table.expired,
                    evicted=table.evicted,
                    learning_rate=rate,
                )
                for table, rate in zip_longest(self.tables, map(_learning_rate, row_options))
            ),
        )

    # -- copies, made in the executor between two updates

    async def describe(self) -> ModelPart:
        """Where the model stands: what pushes it knows, and how far the log was when it knew them."""
        state, initialised = self.tracker.persisted_state(), self.initialised
        number = await self.gate.guard(self._applier.number)
        return ModelPart(self.layout.shard_map, initialised, state, number)

    def known_pushes(self) -> TrackerState:
        """What a successor has to know of pushes: all but those whose round is open, which come again."""
        state, waiting = self.tracker.persisted_state(), self.tracker.rounds.open()
        # With those that changed nothing. A restart forgets them, but values that move here may hold them.
        known = (
            applied if decided.worker in waiting else decided
            for applied, decided in zip(state.standings, self.tracker.clocks(), strict=True)
        )
        return replace(state, standings=tuple(known))

    async def copy_block(self, block: Block, into: memoryview) -> tuple[int, memoryview, list[StateEntry]]:
        """A copy of one block, made between two updates: the last record it contains, values, optimizer state."""
        return await self.gate.guard(lambda: self._applier.copy_block(block, into))

    async def copy_buckets(self, wanted: Wanted) -> tuple[int, Group]:
        """The last record in copies of the next buckets of ``wanted``, and these; none: there are no more."""
        return await self.gate.guard(lambda: self._applier.copy_buckets(wanted))

    async def with_tables(self, work: Callable[[Sequence[ShardTable]], T]) -> tuple[int, T]:
        """The last record in what the tables are between two updates, and the result of ``work`` with them then: it
        reads them.
        """
        applier = self._applier
        return await self.gate.guard(lambda: applier.with_tables(lambda tables: (applier.log.number, work(tables))))

    async def compact(self) -> None:
        """Some time after slices have left: give memory back that is not needed any more. Raises as Applier."""
        if not self.gate.engaged and not self.gate.closed:
            await self._applier.compact()

    def touch(self, layout: Layout) -> None:
        """In a helper thread: have memory for the next ``layout``, so that a move need not wait for it.

        Raises OSError where the system has none.
        """
        self._applier.touch(layout)
        self.lent.touch(layout.region_bytes)

    def state_bytes(self, slices: Sequence[SliceSpan]) -> int:
        """About what the optimizer's state of ``slices`` takes, which are not here yet."""
        return self._applier.replica.state_bytes(slices)


def _learning_rate(options: Mapping[str, object]) -> float:
    rate = options.get("lr")
    return float(rate) if isinstance(rate, int | float) else math.nan
