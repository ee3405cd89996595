"""One model's replica while it is trained: what changes it is logged first; it is copied, and read as published."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Collection, Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import numpy.typing as npt

from ps_protocol.errors import InternalError, PsError
from ps_protocol.logs import EventLogger
from ps_protocol.model.layout import Layout
from ps_protocol.model.spec import Buffers, Options
from ps_protocol.model.tables import Ids, RowOptions
from ps_protocol.wire.means import shares
from ps_server import tables as row_tables
from ps_server.consistency import FAILED, PushInfo, Tracker, WorkerKey
from ps_server.failpoints import Failpoints
from ps_server.log.entries import AppliedUpdate, Loaded, RowsDropped, RowsEntry, UpdateLog
from ps_server.log.messages import apply_rows
from ps_server.optimizers.gradients import assign_buffers, average, average_buffers
from ps_server.optimizers.state import StateEntry
from ps_server.optimizers.undo import StepSkipped, require_counters
from ps_server.shard.counters import StepTimes
from ps_server.shard.durability.replication import Replication
from ps_server.shard.execution.executor import INLINE_WORK_BYTES, ShardExecutor
from ps_server.shard.step.gate import Gate
from ps_server.shard.step.published import CopyInProgress, LastChanges, Published
from ps_server.shard.step.push import IncomingPush
from ps_server.shard.step.push_trace import ServedPush
from ps_server.shard.step.pushed_rows import ROW_COST_BYTES, combined_rows
from ps_server.shard.step.samples import GradientSamples
from ps_server.state.blocks import Block, Group, Wanted, copy_group
from ps_server.state.region import Region, RegionPool
from ps_server.state.replica import Replica, Step, copy_region

if TYPE_CHECKING:
    from ps_server.tables.table import ShardTable

logger = EventLogger(__name__)

T = TypeVar("T")

#: A step, and memory of the pool that it is in: to be given back once it is made. None: it is in that of a push.
Combined = tuple[Step, Region | None]

#: As ``combined``.
Combine = Callable[..., Combined]

COPY_BYTES_PER_SECOND = 5e8
"""Into memory that is touched for the first time."""

QUICK_SECONDS = 200e-6
"""A change that took less the last time is made on the event loop, where nobody reads the region."""

QUICK_BYTES = 2 << 20
"""A region above this size is changed in the executor's thread in any case."""

UNUSED_PART = 8
"""After moves a region may hold an eighth more memory than it needs."""

EXPIRY_BYTES = 1 << 20
"""More than the record of one batch of expired rows takes."""

KEPT_SKIPPED = 1024
"""Pushes whose step raised that are remembered for their answers; many more than may be unanswered."""


@dataclass(slots=True)
class Due:
    """An update whose pushes are decided."""

    #: In rank order; more than one in sync.
    pushes: Sequence[IncomingPush]
    #: What it makes.
    version: int
    #: Factor on the learning rate.
    scale: float = 1.0
    is_round: bool = False
    #: Makes its step; None: what the applier has.
    combine: Combine | None = None


class Applier:
    """Used by one ShardModel and its parts, on the shard's event loop.

    What it queues in the executor is done in that order. Every update is logged, then made; then its memory and its
    room in the log are free again.
    """

    def __init__(
        self,
        replica: Replica,
        tracker: Tracker,
        executor: ShardExecutor,
        log: UpdateLog,
        gate: Gate,
        replication: Replication | None,
        failpoints: Failpoints,
        stop: Callable[[PsError], None],
    ) -> None:
        """``replica`` is this one's until ``take``; it has the tracker's version. ``stop`` is called when work may be
        half done.
        """
        self.layout = replica.layout
        self.tracker = tracker
        self.log = log
        self.gate = gate
        self.stop = stop
        self._executor = executor
        self._replication = replication
        self._failpoints = failpoints
        self._replica: Replica | None = replica
        self.pool = RegionPool(replica.layout)
        self.copies = CopyInProgress()
        #: Of the values: recorded when a change is decided, before it is done.
        self.last_changes = LastChanges(replica.layout)
        self._loop = asyncio.get_running_loop()
        ready: asyncio.Future[Region] = self._loop.create_future()
        ready.set_result(replica.region)
        self._newest: Published | None = Published(tracker.version, ready, self.pool)
        #: Of the newest version decided: done once it is made.
        self.made = ready
        self._name, self._has_tables = replica.layout.shard_map.spec.name, bool(replica.tables)
        #: What an update of the last change took; written in the executor.
        self._change_seconds = math.inf
        #: Of processor time where no disk is waited for: one that had to wait for other programs is not long.
        self._clock = time.perf_counter if log.keeps else time.thread_time
        #: Durations of updates.
        self.times = StepTimes()
        #: Of gradients that are applied on arrival.
        self.samples = GradientSamples()
        #: Makes the step of pushes; another function where gradients are clipped.
        self.combine: Combine = combined
        #: Pushes whose step raised and was undone, and why: the newest. Written in the executor.
        self.undone: dict[tuple[WorkerKey, int], StepSkipped] = {}
        #: Loads that wrote something; counted in the executor.
        self.loads = 0
        #: Of the last update that was queued, by parameter group; and of the last with rows, by table.
        self.options: Sequence[Options] = ()
        self.row_options: Sequence[RowOptions] = ()

    @property
    def newest(self) -> Published:
        """The newest version decided; its bytes are there once the executor has done the work queued for it."""
        if self._newest is None:
            raise self._taken()
        return self._newest

    @property
    def replica(self) -> Replica:
        """Changed in the executor only."""
        if self._replica is None:
            raise self._taken()
        return self._replica

    def unread(self) -> Callable[[], bool]:
        """For the executor, once this was handed on: whether nobody reads the region any more.

        It waits for readers as long as a copy of the region might take, where it is not called on the event loop.
        """
        newest, size_bytes = self.newest, self.layout.region_bytes
        patience_seconds = size_bytes / COPY_BYTES_PER_SECOND if size_bytes >= INLINE_WORK_BYTES else 0.0
        return lambda: newest.unread(patience_seconds)

    @property
    def table_list(self) -> Sequence[ShardTable]:
        """The model's tables; none once it was handed on."""
        return self._replica.tables if self._replica is not None else ()

    def take(self) -> Replica:
        """Hand the replica on. Readers of its region are not disturbed."""
        replica = self.replica
        self._replica = self._newest = None
        # What is made has the region, and streams keep this object for a while. Nothing is gathered any more.
        self.made = self._loop.create_future()
        return replica

    # -- the log

    async def reserve(self, nbytes: int, *, at_cut: bool, check: Callable[[], None] | None = None) -> None:
        """Room in the log for what is written without waiting from here on. Raises StorageFull, or what stopped the
        model.

        ``at_cut``: also while the model is paused. ``check`` raises when that may not be written any more.
        """
        await self.log.reserve(nbytes)
        try:
            if not at_cut:
                await self.gate.opened()
            self.gate.check()
            if check:
                check()
        except BaseException:
            self.log.release(nbytes)
            raise

    def answerable(self) -> Published | None:
        """The newest version decided, where an answer may bring it now; None: something has to be waited for."""
        newest, replication = self._newest, self._replication
        if newest is None or not newest.ready.done() or self.gate.engaged:
            return None
        return newest if replication is None or not replication.engaged else None

    def reserve_now(self, push: IncomingPush) -> bool:
        """Reserve room in the log for ``push``, which has no rows, where it can be decided without waiting for anything
        but updates; False: nothing is reserved.
        """
        replication, nbytes = self._replication, self.layout.region_bytes
        if (
            self._newest is None
            or self.gate.engaged
            or (replication is not None and replication.engaged)
            or not self.log.reserve_now(nbytes)
        ):
            return False
        push.reserved_bytes = nbytes
        return True

    async def reserve_push(self, push: IncomingPush) -> None:
        """Room in the log for the update that ``push`` makes. Raises StorageFull."""
        nbytes = self.layout.region_bytes + (len(push.rows.buffer) if push.rows else 0)
        await self.log.space(nbytes)
        await self.log.reserve(nbytes)
        push.reserved_bytes = nbytes

    async def covered(self, trace: ServedPush | None = None) -> None:
        """Wait until answers may depend on the log's records: with a standby that acknowledges, until it has them, too.

        Raises what closed the replication. ``trace``: of the push that waits.
        """
        if self._replication is not None and self._replication.engaged:
            begin_ns = time.monotonic_ns() if trace is not None else 0
            await self._replication.covered(self.log.number)
            if trace is not None:
                trace.replicated(begin_ns, time.monotonic_ns())

    def covers(self, number: int) -> bool:
        """Whether answers may rest on the log up to record ``number``."""
        return self._replication is None or self._replication.covers(number)

    async def settled(self) -> None:
        """Returns when everything decided so far is done and answers may rest on it. Raises what stopped the model."""
        self.gate.check()
        newest = self.newest
        if not newest.ready.done():
            await asyncio.wait([newest.ready])
        await self.covered()
        self.gate.check()

    # -- changes

    def change(
        self,
        version: int,
        work: Callable[[Replica], object],
        cost: int = 0,
        *,
        untouched: frozenset[int] | None = frozenset(),
        updates: int = 1,
    ) -> asyncio.Future[Region]:
        """Queue work that makes ``version``; readers of the version before it are not disturbed.

        ``cost``: bytes that could be moved in the time it takes, beside those of the region. ``untouched``: indexes of
        parameter slices that it does not change; None: it changes none at all. ``updates``: how many it is made of.
        """
        before, replica, loop = self._newest, self._replica, self._loop
        if before is None or replica is None:
            raise self._taken()
        self.last_changes.record(untouched)
        nbytes = self.layout.region_bytes + cost
        if waits := self.log.waits:
            nbytes = max(nbytes, INLINE_WORK_BYTES)
        is_small = nbytes < INLINE_WORK_BYTES
        quick = (
            not (is_small or before.takers or waits or nbytes > QUICK_BYTES) and self._change_seconds < QUICK_SECONDS
        )

        def change() -> Region:
            # Nobody takes ``before`` any more: its takers only become fewer.
            if before.takers and before.still_read(patient=not (quick or is_small)):
                self.copies.begin()
                try:
                    replica.move(self.pool.take())
                    loop.call_soon_threadsafe(before.leave_to_readers)
                finally:
                    loop.call_soon_threadsafe(self.copies.end)
            if is_small:
                work(replica)
            else:
                began = self._clock()
                work(replica)
                self._change_seconds = (self._clock() - began) / updates
            return replica.region

        made = self.made = self._executor.submit(change, nbytes, quick=quick)
        self._newest = Published(version, made, self.pool)
        return made

    def update(self, due: Sequence[Due], live_workers: int) -> asyncio.Future[Region]:
        """Queue updates, each of pushes that are reserved for, to be made one after another."""
        since, cost, last = time.perf_counter(), 0, due[-1]
        # A step is made with the options of its first push, and those of its first push with rows.
        self.options = last.pushes[0].options
        for each in due if self._has_tables else ():
            if rows := [push.rows for push in each.pushes if push.rows is not None]:
                self.row_options, cost = rows[0].options, cost + sum([one.cost for one in rows])

        work = partial(self._update, due, live_workers, since)
        absent = last.pushes[0].absent
        if absent and (len(due) > 1 or len(last.pushes) > 1):
            absent = frozenset.intersection(*[push.absent for each in due for push in each.pushes])
        queued = self.change(last.version, work, cost, untouched=absent, updates=len(due))
        if queued.done():
            self._updated(due, queued)  # at once: another turn of the event loop costs more
        else:
            queued.add_done_callback(partial(self._updated, due))
        return queued

    def _update(self, due: Sequence[Due], live_workers: int, since: float, replica: Replica) -> None:
        """In the executor, for which they have waited ``since`` then. First the log, for all of them together: what
        cannot be logged is not applied.
        """
        began, began_ns, log = time.perf_counter(), time.monotonic_ns(), self.log
        updates: list[AppliedUpdate] = []
        taken: list[Region] = []
        traces: list[ServedPush] = []
        keeps = log.keeps
        try:
            for each in due:
                pushes, first = each.pushes, each.pushes[0]
                if len(pushes) == 1:
                    infos: tuple[PushInfo, ...] = (first.info,)
                    if first.trace is not None:
                        traces.append(first.trace)
                else:
                    infos = tuple([push.info for push in pushes])
                    traces += [push.trace for push in pushes if push.trace is not None]
                combine = each.combine or self.combine
                step, memory = combine(pushes, each.scale, live_workers, self.pool, replica.tables, keep=keeps)
                if memory is not None:
                    taken.append(memory)
                if not each.is_round:
                    self.samples.sample(step, began, first.squared_norm)
                updates.append(AppliedUpdate(self._name, each.version, infos, each.is_round, step))
            if self._failpoints.armed:
                self._failpoints.hit("before_log")
            log_ns = time.monotonic_ns() if traces else 0
            if len(updates) == 1:
                log.append(updates[0])
            else:
                log.append_all(updates)
            for trace in traces:
                trace.logged(log_ns, time.monotonic_ns())
            if self._failpoints.armed:
                self._failpoints.hit("after_log_before_apply")
            for update in updates:
                try:
                    replica.apply(update.step)
                except StepSkipped as skipped:
                    self._note_undone(update, skipped)
        finally:
            for memory in taken:
                self.pool.give(memory)
            for trace in traces:
                trace.applied(began_ns, time.monotonic_ns())
            times, waited = self.times, began - since
            seconds = (time.perf_counter() - began) / len(due)
            for each in due:
                times.apply.observe(seconds)
                for push in each.pushes:
                    queued = waited + push.checked_seconds
                    times.queued += queued
                    times.queued_bytes += queued * push.reserved_bytes
                    self.free(push)

    def _updated(self, due: Sequence[Due], queued: asyncio.Future[Region]) -> None:
        for each in due:
            for push in each.pushes:
                self.log.release(push.reserved_bytes)
        if queued.cancelled() or queued.exception() is not None:
            self._ended(queued)
            for each in due:
                for push in each.pushes:
                    self.free(push)  # an update before its own has failed
        if self.undone:
            for each in due:
                if skipped := self.undone.get(_key(each.pushes[0].info)):
                    self._note_skipped([push.info for push in each.pushes], skipped)

    def _note_undone(self, update: AppliedUpdate, skipped: StepSkipped) -> None:
        """In the executor: before anybody can ask. A copy: the traceback refers to memory that is reused."""
        for info in (each for push in update.pushes for each in push.contributions):
            self.undone[_key(info)] = copy(skipped)
        while len(self.undone) > KEPT_SKIPPED:
            del self.undone[next(iter(self.undone))]

    def write_rows(self, entry: RowsEntry, nbytes: int, version: int) -> asyncio.Future[Region]:
        """Queue that rows are written or dropped, for which ``nbytes`` are reserved; logged first."""

        def work(replica: Replica) -> None:
            self.log.append(entry)
            apply_rows(replica, entry)

        def done(queued: asyncio.Future[Region]) -> None:
            self.log.release(nbytes)
            self._ended(queued)

        written = self.change(version, work, nbytes, untouched=None)
        written.add_done_callback(done)
        return written

    async def expire(self, table: int, now: float, held: Sequence[Ids], version: int) -> bool:
        """Queue that expired rows are dropped, but none of ``held``; ``EXPIRY_BYTES`` are reserved.

        Returns whether any were.
        """
        dropped = False

        def work(replica: Replica) -> None:
            nonlocal dropped
            keep = np.concatenate(held) if held else np.empty(0, np.int64)
            ids, waiting = replica.tables[table].to_drop(now, keep)
            if dropped := bool(ids.size or waiting.size):
                entry = RowsDropped(self.layout.shard_map.spec.name, table, ids, waiting)
                self.log.append(entry)
                apply_rows(replica, entry)

        def done(queued: asyncio.Future[Region]) -> None:
            self.log.release(EXPIRY_BYTES)
            self._ended(queued)

        expired = self.change(version, work, EXPIRY_BYTES, untouched=None)
        expired.add_done_callback(done)
        await asyncio.wait([expired])
        return dropped

    def load(self, loaded: Loaded, nbytes: int, version: int, slices: Collection[int] = ()) -> asyncio.Future[Region]:
        """Queue that values and state are written, for which ``nbytes`` are reserved, and logged.

        Of the region only ``slices``, where there are any: the others become what they are here then.

        The future holds the PsError that refuses them, if one does; nothing was changed then.
        """
        refusals: list[PsError] = []

        def work(replica: Replica) -> None:
            if slices and loaded.region is not None:
                for begin, end in self.layout.ranges(slices):
                    loaded.region.data[begin:end].copy_(replica.region.data[begin:end])
            try:
                require_counters(replica.layout, loaded.entries or ())
                replica.load(loaded.region, loaded.entries)
            except PsError as refusal:
                refusals.append(refusal)  # the model continues
                return
            self.log.append(loaded)
            self.loads += 1

        def done(queued: asyncio.Future[Region]) -> None:
            self.log.release(nbytes)
            self._ended(queued)
            if error := refusals[0] if refusals else queued.exception():
                told.set_exception(error)
                told.exception()  # seen: its caller may be gone
            else:
                told.set_result(queued.result())

        told: asyncio.Future[Region] = asyncio.get_running_loop().create_future()
        self.change(version, work).add_done_callback(done)
        return told

    def give_up(self, push: IncomingPush) -> None:
        """A push that had been reserved for is not applied."""
        self.log.release(push.reserved_bytes)
        self.free(push)

    def free(self, push: IncomingPush) -> None:
        """Its memory is not needed any more."""
        region, push.region, push.rows = push.region, None, None
        if region is not None and not push.lent:
            self.pool.give(region)

    # -- copies, made in the executor after everything decided so far

    def state(self, slices: Collection[int] | None = None) -> asyncio.Future[list[StateEntry]]:
        """A copy of the optimizer state, whole or of these slices, after everything decided so far."""
        replica = self.replica
        return self._executor.submit(lambda: replica.state(slices), self.layout.region_bytes)

    def look_up(
        self, wanted: Sequence[tuple[int, Ids]], values: npt.NDArray[np.float32]
    ) -> asyncio.Future[npt.NDArray[np.float32]]:
        """Write rows of some tables to ``values``, in the order of the ids, after everything decided so far.

        The future holds InvalidRequest for an id of another shard.
        """
        tables = self.replica.tables

        def work() -> npt.NDArray[np.float32]:
            at = 0
            for table, ids in wanted:
                end = at + ids.size * tables[table].spec.dim
                tables[table].check_here(ids)
                tables[table].look_up(ids, values[at:end].reshape(ids.size, tables[table].spec.dim))
                at = end
            return values

        cost = sum(ids.size for _, ids in wanted) * ROW_COST_BYTES
        if any(tables[table].on_disk for table, _ in wanted):
            cost += INLINE_WORK_BYTES  # The event loop does not wait for a disk.
        return self._executor.submit(work, cost)

    def number(self) -> asyncio.Future[int]:
        """The last record of the log when everything decided so far has been done."""
        return self._executor.submit(lambda: self.log.number, 0)

    def copy_block(self, block: Block, into: memoryview) -> asyncio.Future[tuple[int, memoryview, list[StateEntry]]]:
        """A copy of one block, made between two updates: the last record it contains, values, optimizer state."""
        replica = self.replica

        def work() -> tuple[int, memoryview, list[StateEntry]]:
            return self.log.number, *replica.copy_block(block, into)

        return self._executor.submit(work, block.end - block.begin)

    def copy_buckets(self, wanted: Wanted) -> asyncio.Future[tuple[int, Group]]:
        """Copies of the next buckets of ``wanted``, made between two updates: the last record in them, and these."""
        tables = self.replica.tables

        def work() -> tuple[int, Group]:
            return self.log.number, copy_group(tables, wanted)

        return self._executor.submit(work, INLINE_WORK_BYTES)

    def with_tables(self, work: Callable[[Sequence[ShardTable]], T]) -> asyncio.Future[T]:
        """The result of ``work`` with the tables, between two updates: it reads them, and may take its time."""
        tables = self.replica.tables
        return self._executor.submit(lambda: work(tables), INLINE_WORK_BYTES)

    async def compact(self) -> None:
        """Give back memory of slices that have left; continue in a smaller region where that takes one.

        Nobody changes the layout meanwhile. Raises OSError, MemoryError where there is no memory for both.
        """
        replica = self.replica
        await asyncio.wait([self._executor.submit(replica.trim, 0)])
        if self.replica.region.unused_bytes <= self.layout.region_bytes // UNUSED_PART:
            return
        target = await asyncio.to_thread(Region, self.layout)
        if self._replica is not None:
            version = self.newest.version
            await asyncio.wait([self.change(version, lambda replica: replica.move(target), untouched=None)])

    def touch(self, layout: Layout) -> None:
        """In a helper thread: have memory for the next ``layout``. Raises OSError."""
        if (replica := self._replica) is not None:
            replica.touch(layout)
        self.pool.touch(layout.region_bytes)

    # -- failures

    def _note_skipped(self, pushes: Sequence[PushInfo], skipped: StepSkipped) -> None:
        """A step raised and was undone; a replay will skip it, too."""
        self.tracker.counts.failed(len(pushes))
        failed = self.tracker.counts.outcomes[FAILED]
        if failed & (failed - 1) == 0:
            name, shard = self.layout.shard_map.spec.name, self.layout.shard
            logger.error("step.skipped", "shard %d, model '%s': %s (%d so far)", shard, name, skipped, failed)

    def _ended(self, work: asyncio.Future[Region]) -> None:
        if not work.cancelled() and (error := work.exception()) is not None:
            self.failed(error)

    def failed(self, error: BaseException) -> None:
        """An update that failed stops the model, for half of it may have happened."""
        name, shard = self.layout.shard_map.spec.name, self.layout.shard
        logger.error("model.stopped", "model '%s' stopped: an update failed", name, exc_info=error)
        self.stop(
            InternalError(
                f"shard {shard} stopped model '{name}': an update failed",
                shard=str(shard),
                actual=f"{type(error).__name__}: {error}",
                remedy="see the log of this shard; start the job again",
            )
        )

    def _taken(self) -> InternalError:
        name = self.layout.shard_map.spec.name
        return InternalError(f"model '{name}' is used after it was handed on", shard=str(self.layout.shard))


def _key(info: PushInfo) -> tuple[WorkerKey, int]:
    return info.worker, info.sequence


def combined(
    pushes: Sequence[IncomingPush],
    scale: float,
    live_workers: int,
    pool: RegionPool,
    tables: Sequence[row_tables.ShardTable],
    *,
    keep: bool = False,
) -> Combined:
    """In the executor: the step that ``pushes`` make together, in rank order.

    ``keep``: nothing of it is in memory that a worker can change, for it is logged before it is made.
    """
    first, is_alone = pushes[0], len(pushes) == 1
    is_own = is_alone and not (keep and first.lent)
    if is_own and first.region is not None and not (tables or first.with_buffers):
        return Step(first.region, first.absent, first.options, scale), None
    gradients = [push.region for push in pushes if push.region is not None]
    taken = pool.take() if first.lent and (keep or not is_alone) else None
    into = gradients[0] if taken is None else taken
    try:
        absent, weights = first.absent, None
        if not is_alone:
            weights = shares([push.weight for push in pushes])
            absent = average(into, gradients, [push.absent for push in pushes], weights)
        elif taken is not None:
            copy_region(gradients[0], taken)
        weight = 0.0
        if first.with_buffers or not is_alone:
            with_buffers = [push for push in pushes if push.with_buffers]
            weight = _combine_buffers(into, with_buffers, live_workers) if with_buffers else 0.0
        rows = combined_rows([push.rows for push in pushes], tables, weights, keep=keep) if tables else ()
        return Step(into, absent, first.options, scale, weight, rows), taken
    except BaseException:
        if taken is not None:
            pool.give(taken)
        raise


def _combine_buffers(into: Region, pushes: Sequence[IncomingPush], live_workers: int) -> float:
    """Combine the pushed buffers into ``into`` according to the model's policy; returns their weight."""
    policy = into.layout.shard_map.spec.buffers
    values = [push.region for push in pushes if push.region is not None]
    if policy is Buffers.AVERAGE and len(values) > 1:
        # What a combined push brings is the mean of its workers' buffers.
        average_buffers(into, values, shares([push.info.workers for push in pushes]))
        return 1.0
    if into is not values[0]:
        assign_buffers(into, values[0])
    return 1.0 if policy is Buffers.RANK0 else min(1.0, pushes[0].info.workers / live_workers)
