"""One model on one shard: the only owner of its arenas, optimizer state, clocks and version."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass, replace

from ps_protocol import convert
from ps_protocol.errors import InternalError, NonFiniteGradient, PsError, StateLost
from ps_protocol.layout import Layout
from ps_protocol.model import Buffers, Consistency, Mode, NonFinite, Options
from ps_protocol.v1 import common_pb2
from ps_server.consistency import Decision, ParkedPulls, Position, PushInfo, Tracker, Verdict, WorkerKey
from ps_server.failpoints import Failpoints
from ps_server.log import Update, UpdateLog
from ps_server.optimizers import (
    Region,
    ShardOptimizer,
    StateEntry,
    assign_buffers,
    average,
    average_buffers,
    blend_buffers,
    first_nonfinite,
)
from ps_server.shard.lane import INLINE_BYTES, Lane
from ps_server.shard.pool import RegionPool
from ps_server.shard.snapshots import Copies, Snapshot, copy_region

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Gradients:
    """A region of gradients: one of the pool's, or ``lent`` by a worker, to be read only and never to be kept."""

    region: Region
    lent: bool = False


@dataclass(frozen=True, slots=True)
class Push:
    """A push that has arrived whole. Its region belongs to the model from ``ShardModel.push`` on."""

    info: PushInfo
    #: None for a skipped push.
    gradients: Gradients | None
    absent: frozenset[int]
    options: Sequence[Options]
    with_buffers: bool = False
    #: No parameters are wanted back.
    push_only: bool = False
    #: The worker has looked: there is no NaN or infinity in it.
    finite: bool = False
    #: Steps that the parameters wanted back are used later than usual.
    ahead: int = 0


class ShardModel:
    """Called from the shard's event loop only.

    Decisions are made there, at once and in order; tensor work follows them through the lane in the same order. So a
    snapshot holds exactly what was decided before it was asked for.
    """

    def __init__(
        self, layout: Layout, lane: Lane, consistency: Consistency, log: UpdateLog, failpoints: Failpoints
    ) -> None:
        self.layout = layout
        self.pool = RegionPool(layout)
        self.tracker = Tracker(consistency)
        #: Whether the region holds values yet: rank 0's initial ones, or later ones.
        self.initialised = False
        #: Staleness of each rank's last applied push.
        self.staleness: dict[int, int] = {}
        #: How the open streams travel, by worker.
        self.transports: dict[WorkerKey, common_pb2.Transport] = {}
        #: The newest open stream of each worker.
        self._streams: dict[WorkerKey, object] = {}
        self._lane = lane
        self._log = log
        self.failpoints = failpoints
        self._region = Region(layout)
        self._optimizer = ShardOptimizer(layout, self._region)
        self._copies = Copies()
        self._parked: ParkedPulls[asyncio.Future[None]] = ParkedPulls()
        #: Accepted pushes whose step is still open (sync).
        self._held: dict[tuple[WorkerKey, int], Push] = {}
        #: The newest version decided; its bytes are there once the lane has done the work queued for it.
        self._newest = self._ready_snapshot(self._region)
        self._failure: PsError | None = None
        self._live_workers = 1

    @property
    def name(self) -> str:
        """Name of the model."""
        return self.layout.shard_map.spec.name

    @property
    def parked_pulls(self) -> int:
        """Pulls that wait for the consistency mode."""
        return len(self._parked)

    def check(self) -> None:
        """Raises what stopped this model, if anything did."""
        if self._failure:
            raise self._failure

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
        self.tracker.members(live)
        self._advance()

    def configure(self, consistency: Consistency) -> None:
        """Change the consistency mode."""
        self.tracker.configure(consistency)
        self._advance()

    def attach(self, worker: WorkerKey, phase: int) -> Position:
        """A worker opened its stream; returns where it stands. Raises Fenced."""
        self.check()
        position = self.tracker.attach(worker, phase)
        self._advance()
        return position

    def arrive(self, worker: WorkerKey, phase: int) -> None:
        """A worker entered the barrier that ends ``phase``. Raises Fenced."""
        self.tracker.arrive(worker, phase)
        self._advance()

    @contextmanager
    def travelling(self, worker: WorkerKey, transport: common_pb2.Transport) -> Iterator[None]:
        """While a stream of ``worker`` is open: how its payloads travel, for status and for what memory it needs."""
        if transport != self.transports.get(worker):
            logger.info("model '%s': %s travels over %s", self.name, worker, convert.transport_name(transport))
        self.transports[worker] = transport
        stream = self._streams[worker] = object()
        try:
            # Over shared memory a worker's gradients lie in a segment of its own.
            with nullcontext() if transport == common_pb2.TRANSPORT_SHM else self.pool.reserved():
                yield
        finally:
            # A worker that lost its stream may have opened the next before this one was seen to end.
            if self._streams.get(worker) is stream:
                del self._streams[worker], self.transports[worker]

    # -- pushes

    async def push(self, push: Push) -> Decision:
        """Decide about a push and queue its work. Raises Fenced, InvalidRequest, NonFiniteGradient, StateLost."""
        try:
            self.check()
            self.require_values()
            skipped = await self._must_skip(push)
            info = replace(push.info, skipped=True) if skipped else push.info
            decision = self.tracker.push(info)
        except BaseException:
            self._give(push)
            raise
        if decision.verdict is Verdict.APPLY:
            self.staleness[info.worker.rank] = decision.staleness
            self._queue([push], decision.scale, self.tracker.version)
        elif decision.verdict is Verdict.HOLD:
            self._held[info.worker, info.sequence] = push
        else:
            self._give(push)
        self._advance()
        return decision

    async def _must_skip(self, push: Push) -> bool:
        """Whether the push has nothing to apply. Raises NonFiniteGradient where the model's policy is to refuse."""
        policy = self.layout.shard_map.spec.nonfinite
        gradients = push.gradients
        if gradients is None or push.finite or policy is NonFinite.ALLOW:
            return push.info.skipped
        name = await self._lane.submit(
            lambda: first_nonfinite(self.layout, gradients.region, push.absent), self.layout.parameter_bytes
        )
        if name is not None and policy is NonFinite.REFUSE:
            raise NonFiniteGradient(
                f"a gradient from worker {push.info.worker.rank} holds NaN or infinity; nothing was applied",
                variable=name,
                shard=str(self.layout.shard),
                remedy='lower the learning rate, clip gradients, or pass nonfinite="skip" to cluster.optimizer',
            )
        return name is not None

    def _advance(self) -> None:
        """After every event: apply the steps that became complete, then answer the pulls that may be answered."""
        for ready in self.tracker.take_ready():
            pushes = [self._held.pop((info.worker, info.sequence)) for info in ready.contributions]
            for info, staleness in zip(ready.contributions, ready.staleness, strict=True):
                self.staleness[info.worker.rank] = staleness
            if pushes:
                self._queue(pushes, 1.0, ready.version)
        for parked in self._parked.release(self.tracker):
            if not parked.done():
                parked.set_result(None)

    # -- tensor work, in the lane

    def _queue(self, pushes: Sequence[Push], scale: float, version: int) -> None:
        self._change(version, lambda: self._apply(pushes, scale, version)).add_done_callback(self._applied)

    def _change(self, version: int, work: Callable[[], None]) -> asyncio.Future[Region]:
        """Queue work that changes the region; whoever reads what was there before goes on reading it undisturbed."""
        before, loop = self._newest, asyncio.get_running_loop()

        def change() -> Region:
            # Nobody takes ``before`` any more: its takers only become fewer.
            if before.still_read(patient=self.layout.region_bytes >= INLINE_BYTES):
                self._copies.begin()
                try:
                    self._move()
                    loop.call_soon_threadsafe(before.leave_to_readers)
                finally:
                    loop.call_soon_threadsafe(self._copies.end)
            work()
            return self._region

        made = self._lane.submit(change, self.layout.region_bytes)
        self._newest = Snapshot(version, made, self.pool)
        return made

    async def spare_memory(self) -> None:
        """Wait while the region is being copied: then there is one more than workers need.

        Whoever takes a region for gradients calls this before.
        """
        await self._copies.ended()

    def _move(self) -> None:
        """In the lane: leave the region to its readers and go on in a copy."""
        target = self.pool.take()
        copy_region(self._region, target)
        self._optimizer.rebind(target)
        self._region = target

    def _ready_snapshot(self, region: Region) -> Snapshot:
        ready: asyncio.Future[Region] = asyncio.get_running_loop().create_future()
        ready.set_result(region)
        return Snapshot(self.tracker.version, ready, self.pool)

    def _applied(self, work: asyncio.Future[Region]) -> None:
        """On the loop: an update that failed stops the model, for half of it may have happened."""
        if work.cancelled() or not (error := work.exception()):
            return
        logger.error("model '%s' stopped: an update failed", self.name, exc_info=error)
        self._failure = self._failure or InternalError(
            f"shard {self.layout.shard} stopped model '{self.name}': an update failed",
            shard=str(self.layout.shard),
            actual=f"{type(error).__name__}: {error}",
            remedy="see the log of this shard; start the job again",
        )
        for parked in self._parked:
            if not parked.done():
                parked.set_exception(self._failure)

    def _apply(self, pushes: Sequence[Push], scale: float, version: int) -> None:
        """One update: the mean of ``pushes``, in rank order, as one optimizer step."""
        parts = [push.gradients for push in pushes if push.gradients is not None]
        into = parts[0].region
        if len(pushes) > 1 and parts[0].lent:
            into = self.pool.take()
        try:
            regions = [part.region for part in parts]
            absent, options = pushes[0].absent, pushes[0].options
            if len(pushes) > 1:
                absent = average(into, regions, [push.absent for push in pushes])
            self.failpoints.hit("before_apply")
            self._optimizer.apply(into, absent, options, scale)
            self._take_buffers(into, [push for push in pushes if push.with_buffers])
            self.failpoints.hit("after_apply_before_log")
            infos = tuple(push.info for push in pushes)
            self._log.append(Update(self.name, version, infos, into, absent, options, scale))
        finally:
            if into is not parts[0].region:
                self.pool.give(into)
            for push in pushes:
                self._give(push)

    def _take_buffers(self, into: Region, pushes: Sequence[Push]) -> None:
        """Write the buffers that came with an update, as the model's policy says, and leave them in ``into``."""
        values = [push.gradients.region for push in pushes if push.gradients is not None]
        if not values:
            return
        if self.layout.shard_map.spec.buffers is Buffers.RANK0:
            assign_buffers(into, values[0])
            assign_buffers(self._region, into)
        elif len(values) > 1:
            average_buffers(into, values)
            assign_buffers(self._region, into)
        else:
            assign_buffers(into, values[0])
            blend_buffers(self._region, into, 1 / self._live_workers)

    def _give(self, push: Push) -> None:
        if push.gradients is not None and not push.gradients.lent:
            self.pool.give(push.gradients.region)

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

    @asynccontextmanager
    async def snapshot(self, *, quick: bool = False) -> AsyncIterator[Snapshot]:
        """Parameters and buffers after everything decided so far. ``quick``: read from shared memory."""
        self.check()
        snapshot = self._newest
        snapshot.take(quick=quick)
        try:
            if not snapshot.ready.done():
                await asyncio.shield(snapshot.ready)
            self.check()
            yield snapshot
        finally:
            snapshot.give_back(quick=quick)

    # -- parameters and state as a whole

    async def load(self, region: Region | None, entries: Sequence[StateEntry] | None, *, only_first: bool) -> bool:
        """Write values and state; False when ``only_first`` found values. Raises InvalidRequest."""
        if only_first and self.initialised:
            return False

        refusals: list[PsError] = []

        def work() -> None:
            try:
                if entries is not None:
                    self._optimizer.load_state(entries)
            except PsError as refusal:
                refusals.append(refusal)  # nothing was changed: the model goes on
                return
            if region is not None:
                copy_region(region, self._region)

        before = self.initialised
        self.initialised = before or region is not None
        await asyncio.shield(self._change(self.tracker.version, work))
        if refusals:
            self.initialised = before
            raise refusals[0]
        return True

    @asynccontextmanager
    async def save(self) -> AsyncIterator[tuple[Snapshot, list[StateEntry]]]:
        """Values and a copy of the optimizer state, of one version."""

        def work() -> list[StateEntry]:
            return [(key, tensor.clone()) for key, tensor in self._optimizer.state()]

        copied = self._lane.submit(work, self.layout.region_bytes)
        async with self.snapshot() as snapshot:
            yield snapshot, await copied
