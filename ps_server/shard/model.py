"""One model on one shard: the only owner of its arenas, optimizer state, clocks and version."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager, nullcontext
from copy import copy
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from ps_protocol.errors import InternalError, ModelMoved, PsError, StateLost
from ps_protocol.model import Consistency, Mode
from ps_protocol.tables import Ids
from ps_protocol.v1 import common_pb2
from ps_server.consistency import (
    FAILED,
    Decision,
    ParkedPulls,
    Position,
    PushInfo,
    Tracker,
    TrackerMemento,
    Verdict,
    WorkerKey,
)
from ps_server.failpoints import Failpoints
from ps_server.log import Loaded, ModelPart, Prepared, RecoveredModel, RowsEntry, UpdateLog, bytes_of
from ps_server.optimizers import Block, Region, StateEntry, StepSkipped
from ps_server.shard.alarm import Alarm
from ps_server.shard.applier import AGING_BYTES, Applier
from ps_server.shard.combining import Gradients, Push, must_skip
from ps_server.shard.gate import Gate
from ps_server.shard.kept import LastChanges
from ps_server.shard.lane import Lane
from ps_server.shard.live import LiveReplica
from ps_server.shard.option_differences import OptionDifferences
from ps_server.shard.published import Published
from ps_server.shard.pushed_rows import WantedRows
from ps_server.shard.replication import Replication
from ps_server.shard.travels import Travels

if TYPE_CHECKING:
    from ps_server.shard.bucket_groups import Group, Wanted
    from ps_server.tables import Table

__all__ = ["Gradients", "Push", "ShardModel"]

logger = logging.getLogger(__name__)

T = TypeVar("T")


class ShardModel:
    """Called from the shard's event loop only.

    Decisions are made there, at once and in order; tensor work follows them through the lane in the same order. So what
    is published holds exactly what was decided before it was asked for.
    """

    def __init__(
        self,
        start: RecoveredModel,
        lane: Lane,
        consistency: Consistency,
        log: UpdateLog,
        failpoints: Failpoints,
        replication: Replication | None = None,
        announce: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """Go on from ``start``, which is this model's from now on. ``announce`` is awaited before it gets values."""
        self._announce = announce
        self.layout = start.replica.layout
        self._live = LiveReplica(start.replica, start.tracker.version, lane, log)
        self._applier = Applier(self._live, log, failpoints, self._failed, self._raised)
        self.pool = self._live.pool
        self.tracker = start.tracker
        self.tracker.configure(consistency)
        #: Whether the region holds values yet: rank 0's initial ones, or later ones.
        self.initialised = start.initialised
        #: Loads that replaced values which it had.
        self.assigned = 0
        #: Checksums of the values that slices were set to last, by index, as far as they came with them.
        self.assigned_checksums: dict[int, int] = {}
        #: Staleness of each rank's last applied push.
        self.staleness: dict[int, int] = {}
        #: Options that workers push in vain (sync).
        self.differences = OptionDifferences(self.name)
        self._streams, self._uploads = Travels(self.name), Travels(self.name)
        self._lane = lane
        self._log = log
        self._replication = replication
        self.failpoints = failpoints
        #: Holds pushes back while the job is copied at one point.
        self.gate = Gate()
        #: How the model will lie if the cluster decides so; until then nothing changes it, and no snapshot begins.
        self.pending: Prepared | None = None
        self._parked: ParkedPulls[asyncio.Future[None]] = ParkedPulls()
        #: Accepted pushes whose step is still open (sync).
        self._held: dict[tuple[WorkerKey, int], Push] = {}
        #: Rings when the grace time of an open step ends (sync).
        self._grace = Alarm(self._advance)
        self._failure: PsError | None = None
        self._stopped = asyncio.Event()
        self._live_workers = 1

    @property
    def name(self) -> str:
        """Name of the model."""
        return self.layout.shard_map.spec.name

    @property
    def parked_pulls(self) -> int:
        """Pulls that wait for the consistency mode."""
        return len(self._parked)

    @property
    def loads(self) -> int:
        """Calls of ``load`` that wrote something."""
        return self._applier.loads

    @property
    def bound(self) -> bool:
        """Whether it waits to hear how it will lie."""
        return self.pending is not None

    def check(self) -> None:
        """Raises what stopped this model, if anything did."""
        if self._failure:
            # A new one each time: with a traceback it would keep the memory of whoever has met it.
            raise copy(self._failure)

    async def stopped(self) -> None:
        """Raises what stops this model, when something does."""
        await self._stopped.wait()
        self.check()

    def require_values(self) -> None:
        """Raises StateLost while nobody has loaded values."""
        if not self.initialised:
            raise StateLost(
                f"shard {self.layout.shard} holds no values of model '{self.name}'",
                shard=str(self.layout.shard),
                expected="initial values from rank 0, or values loaded from a state_dict",
                remedy="wait for the first worker; if training had begun, the shard restarted and lost its memory",
            )

    # -- who takes part, and under which mode

    def members(self, live: Mapping[int, int]) -> None:
        """The live workers: rank to incarnation."""
        self._live_workers = max(1, len(live))
        self.staleness = {rank: value for rank, value in self.staleness.items() if rank in live}
        self.differences.members(live)
        self.tracker.members(live)
        self._streams.members(live)
        self._advance()

    def configure(self, consistency: Consistency) -> None:
        """Change the consistency mode."""
        self.tracker.configure(consistency)
        self._advance()

    def attach(self, worker: WorkerKey, phase: int, clock: int | None = None) -> Position:
        """A worker opened its stream; returns where it stands. Raises Fenced."""
        self.check()
        position = self.tracker.attach(worker, phase, clock)
        self._advance()
        return position

    def arrive(self, worker: WorkerKey, phase: int) -> None:
        """A worker entered the barrier that ends ``phase``. Raises Fenced."""
        self.check()
        self.tracker.arrive(worker, phase)
        self._advance()

    @property
    def transports(self) -> Mapping[WorkerKey, common_pb2.Transport]:
        """How the open streams travel, by worker."""
        return self._streams.transports

    def place(self, worker: WorkerKey) -> AbstractContextManager[asyncio.Future[None]]:
        """The one place of a stream of ``worker``: see Travels."""
        return self._streams.place(worker)

    def uploading(self, worker: WorkerKey) -> AbstractContextManager[asyncio.Future[None]]:
        """The one place of a Load or LoadRows of ``worker``: a newer one ends the older."""
        return self._uploads.place(worker, worker.incarnation)

    @contextmanager
    def travelling(self, worker: WorkerKey, transport: common_pb2.Transport) -> Iterator[None]:
        """While a stream of ``worker`` is open: how its payloads travel, for status and for what memory it needs."""
        # Over shared memory a worker's gradients lie in a segment of its own.
        spare = nullcontext() if transport == common_pb2.TRANSPORT_SHM else self.pool.reserved()
        with self._streams.open(worker, transport), spare:
            yield

    # -- pushes

    async def push(self, push: Push) -> Decision:
        """Decide about a push and queue its work.

        Raises Fenced, InvalidRequest, NonFiniteGradient, StateLost, TableFull or StorageFull; then nothing was decided.
        """
        try:
            self.check()
            self.require_values()
            skipped = await must_skip(push, self._lane, self._live.replica.tables)
            await self._log.space(self._applier.nbytes(push))
            await self._log.reserve(self._applier.nbytes(push))
        except BaseException:
            self._applier.give_memory(push)
            raise
        info = replace(push.info, skipped=True) if skipped else push.info
        try:
            if self.gate.stops(info.worker, info.sequence):
                await self.gate.passes(info.worker, info.sequence)
            decision = self.tracker.push(info)
        except BaseException:
            self._applier.give(push)
            raise
        if decision.verdict is Verdict.APPLY:
            self.staleness[info.worker.rank] = decision.staleness
            scale, version = decision.scale, self.tracker.version
            self._applier.update([push], version, self._live_workers, scale=scale, is_round=False)
        elif decision.verdict is Verdict.HOLD:
            self._held[info.worker, info.sequence] = push
        else:
            self._applier.give(push)
        self._advance()
        return decision

    def has(self, worker: WorkerKey, sequence: int) -> bool:
        """Whether this push was accepted, or cannot come any more because its worker is gone."""
        known = {standing.worker: standing.last_sequence for standing in self.tracker.clocks()}
        return known.get(worker, sequence) >= sequence

    def thaw(self) -> None:
        """No cut holds this model any more: go on with what has waited."""
        self.gate.open()
        self._advance()

    def _advance(self) -> None:
        """After every event, and when a grace time ends: apply the steps whose time has come, then answer the pulls
        that may be answered.
        """
        self.gate.stir()
        if self.gate.still or self._failure:
            return
        for ready in self.tracker.take_ready(asyncio.get_running_loop().time()):
            pushes = [self._held.pop((info.worker, info.sequence)) for info in ready.contributions]
            for info, staleness in zip(ready.contributions, ready.staleness, strict=True):
                self.staleness[info.worker.rank] = staleness
            self.differences.note(pushes)
            if pushes:
                self._applier.update(pushes, ready.version, self._live_workers, is_round=True)
        self._grace.set(self.tracker.grace_ends)
        for parked in self._parked.release(self.tracker):
            if not parked.done():
                parked.set_result(None)

    # -- tensor work, in the lane

    async def spare_memory(self) -> None:
        """Before a region is taken for gradients: wait while the model itself takes one more than workers need."""
        await self._live.spare_memory()

    def _failed(self, error: BaseException) -> None:
        """On the loop: an update that failed stops the model, for half of it may have happened."""
        logger.error("model '%s' stopped: an update failed", self.name, exc_info=error)
        failure = InternalError(
            f"shard {self.layout.shard} stopped model '{self.name}': an update failed",
            shard=str(self.layout.shard),
            actual=f"{type(error).__name__}: {error}",
            remedy="see the log of this shard; start the job again",
        )
        self.stop(failure)

    def _raised(self, pushes: Sequence[PushInfo], skipped: StepSkipped) -> None:
        """On the loop: a step raised and was undone; a replay will skip it, too."""
        self.tracker.failed(pushes)
        failed = self.tracker.counts.outcomes[FAILED]
        if failed & (failed - 1) == 0:
            logger.error("shard %d, model '%s': %s (%d so far)", self.layout.shard, self.name, skipped, failed)

    def skipped(self, info: PushInfo) -> PsError | None:
        """Why the step of this push was skipped, if it raised; known once its version is published."""
        return self._applier.skipped.get((info.worker, info.sequence))

    def stop(self, error: PsError) -> None:
        """Decide and answer nothing any more."""
        self._failure = self._failure or error
        self._stopped.set()
        self._grace.set(None)
        self.gate.close(self._failure)
        for parked in self._parked:
            if not parked.done():
                parked.set_exception(copy(self._failure))

    def leave(self, moved: ModelMoved) -> RecoveredModel:
        """Stop, and hand on what it has, once nothing is queued in the lane: its slices lie otherwise from now on.

        Pushes that are held for an open step are forgotten: they are repeated by whoever gets ``moved``.
        """
        self.stop(moved)
        for push in self._held.values():
            self._applier.give(push)
        self._held.clear()
        # A copy: the cluster's members may still change the other.
        tracker = Tracker(self.tracker.consistency)
        tracker.restore(self.known_pushes())
        shard_map = self.layout.shard_map
        return RecoveredModel(shard_map, self._live.take(), tracker, self.initialised, pending=self.pending)

    def known_pushes(self) -> TrackerMemento:
        """What of the pushes whoever goes on has to know: all but those held for an open step, which come again."""
        memento = self.tracker.memento()
        if self._held or self.tracker.consistency.mode is Mode.SYNC:
            return memento
        # With those that changed nothing: a restart forgets them, and they were answered.
        return replace(memento, standings=self.tracker.clocks())

    async def settled(self) -> None:
        """Returns when everything decided so far has been done, and may be told. Raises what stopped the model."""
        self.check()
        newest = self._live.newest
        if not newest.ready.done():
            await asyncio.wait([newest.ready])
        await self._covered()
        self.check()

    async def _covered(self) -> None:
        """Returns when what is in the log may be told of: with a standby that acknowledges, when it has it, too."""
        number = self._log.number
        if self._replication is not None and not self._replication.covers(number):
            await self._replication.covered(number)

    async def _reserve(self, nbytes: int, *, at_cut: bool, check: Callable[[], None] | None = None) -> None:
        """Room in the log for what is written at once from here. Raises StorageFull, or what stopped the model.

        ``check`` raises when that may not be written any more.
        """
        await self._log.reserve(nbytes)
        try:
            if not at_cut:
                await self.gate.opened()
            self.check()
            if check:
                check()
        except BaseException:
            self._log.release(nbytes)
            raise

    # -- pulls

    def pull_position(self, position: Position, ahead: int) -> Position:
        """Where a pull counts as standing whose parameters are used ``ahead`` steps later: ssp bounds that use."""
        consistency = self.tracker.consistency
        ahead = min(ahead, consistency.staleness) if consistency.mode is Mode.SSP else 0
        return Position(position.phase, position.clock + ahead)

    def park(self, position: Position) -> asyncio.Future[None]:
        """Resolves when a pull of a worker at ``position`` may be answered."""
        parked: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._parked.park(position, parked)
        return parked

    def unpark(self, parked: asyncio.Future[None]) -> None:
        """Forget a parked pull whose stream is gone."""
        self._parked.discard(parked)

    @property
    def last_changes(self) -> LastChanges:
        """When each slice was changed last, by what has been decided so far."""
        return self._live.last_changes

    @asynccontextmanager
    async def published(self, *, quick: bool = False) -> AsyncIterator[Published]:
        """Parameters and buffers after everything decided so far. ``quick``: read from shared memory."""
        self.check()
        published = self._live.newest
        published.take(quick=quick)
        try:
            if not published.ready.done():
                await asyncio.shield(published.ready)
            await self._covered()
            self.check()
            yield published
        finally:
            published.give_back(quick=quick)

    # -- rows of tables

    @property
    def tables(self) -> Sequence[Table]:
        """One for each of the model's tables; changed in the lane only."""
        return self._live.replica.tables

    def held_ids(self, table: int) -> list[Ids]:
        """The ids of one table in pushes whose step is still open."""
        rows = (push.rows for push in self._held.values() if push.rows)
        return [part.ids for pushed in rows for part in pushed.parts if part.table == table]

    async def look_up(self, wanted: WantedRows, room: memoryview | None = None) -> tuple[int, memoryview]:
        """The version after everything decided so far, and of that the rows wanted, float32, table by table.

        ``room``: where they are written; None: in memory of their own. Raises InvalidRequest for ids of another shard.
        """
        self.check()
        into = np.empty(wanted.rows_bytes // 4, np.float32) if room is None else np.frombuffer(room, np.float32)
        version, values = self.tracker.version, self._live.look_up(wanted.parts, into)
        rows = await values
        await self._covered()
        self.check()
        return version, bytes_of(rows)

    async def write_rows(
        self, entry: RowsEntry, nbytes: int, *, at_cut: bool = False, check: Callable[[], None] | None = None
    ) -> None:
        """Write or drop rows, for about ``nbytes`` of log. Raises StorageFull, or what stopped the model.

        ``at_cut``: whoever holds the model at a cut wants this; others wait until it goes on. ``check`` is called when
        nothing is waited for any more before it is written, and may refuse it.
        """
        await self._reserve(nbytes, at_cut=at_cut, check=check)
        await asyncio.shield(self._applier.write_rows(entry, nbytes, self.tracker.version))
        await self._covered()
        self.check()

    async def age(self, table: int, now: float) -> bool:
        """Let a lot of rows of ``table`` go, where some have to; whether any did. Raises StorageFull.

        ``now``: seconds of the day's clock.
        """
        if not self.tables[table].ages:
            return False
        await self._log.reserve(AGING_BYTES)
        if self.gate.still or self.bound or self._failure:
            self._log.release(AGING_BYTES)
            return False
        return await self._applier.age(table, now, self.held_ids(table), self.tracker.version)

    # -- parameters and state as a whole

    async def load(
        self,
        region: Region | None,
        entries: Sequence[StateEntry] | None,
        tracker: TrackerMemento | None = None,
        *,
        only_first: bool,
        at_cut: bool = False,
        slices: Collection[int] = (),
        checksums: Mapping[int, int] = MappingProxyType({}),
        check: Callable[[], None] | None = None,
    ) -> bool:
        """Write values and state; False when ``only_first`` found values. Raises InvalidRequest, StorageFull.

        ``slices``: those of ``region`` that are written; none: all. ``checksums``: of some of them, to be told.
        ``tracker``: where a restored job stood; before anybody has opened a stream. ``at_cut`` and ``check`` as in
        ``write_rows``.
        """
        nbytes = self.layout.region_bytes + sum(tensor.nbytes for _, tensor in entries or ())
        if not self.initialised and self._announce:
            await self._announce()
        await self._reserve(nbytes, at_cut=at_cut, check=check)
        # Looked at last: of two that come at once the first wins.
        if only_first and self.initialised:
            self._log.release(nbytes)
            return False

        if tracker:
            self.tracker.restore(tracker)
        before = self.initialised
        self.initialised = before or region is not None
        loaded = Loaded(self.name, region, entries, tracker)
        loading = self._applier.load(loaded, nbytes, self.tracker.version, slices)
        try:
            await asyncio.shield(loading)
        except PsError:
            self.initialised = before
            raise
        except asyncio.CancelledError:
            # The lane reads ``region``, which is its owner's again when this returns.
            await asyncio.gather(loading, return_exceptions=True)
            raise
        self.assigned += before and region is not None
        if region is not None:
            kept = {i: c for i, c in self.assigned_checksums.items() if i not in slices} if slices else {}
            self.assigned_checksums = {**kept, **checksums}
        await self._covered()
        return True

    @asynccontextmanager
    async def save(self, slices: Collection[int] | None = None) -> AsyncIterator[tuple[Published, list[StateEntry]]]:
        """Values and a copy of the optimizer state, whole or of these slices, of one version."""
        self.check()
        copied = self._live.state(slices)
        async with self.published() as published:
            yield published, await copied

    # -- copies for the disk

    async def describe(self) -> ModelPart:
        """Where the model stands: what pushes it knows, and how far the log was when it knew them."""
        self.check()
        memento, initialised = self.tracker.memento(), self.initialised
        number = await self._live.number()
        self.check()
        return ModelPart(self.layout.shard_map, initialised, memento, number)

    async def copy_block(self, block: Block, into: memoryview) -> tuple[int, memoryview, list[StateEntry]]:
        """A copy of one block, made between two updates: the last record it contains, values, optimizer state."""
        self.check()
        copied = await self._live.copy_block(block, into)
        self.check()
        return copied

    async def with_tables(self, work: Callable[[Sequence[Table]], T]) -> T:
        """Have something done with the tables in the lane: ``work`` reads them, and may take its time."""
        self.check()
        done = await self._live.with_tables(work)
        self.check()
        return done

    async def copy_buckets(self, wanted: Wanted) -> tuple[int, Group]:
        """The last record in copies of the next buckets of ``wanted``, and these; none: there are no more."""
        self.check()
        copied = await self._live.copy_buckets(wanted)
        self.check()
        return copied
