"""One model on one shard: the only owner of its arenas, optimizer state, clocks and version."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass, replace

from ps_protocol import convert
from ps_protocol.errors import InternalError, NonFiniteGradient, PsError, StateLost
from ps_protocol.model import Buffers, Consistency, Mode, NonFinite, Options
from ps_protocol.v1 import common_pb2
from ps_server.consistency import (
    Decision,
    ParkedPulls,
    Position,
    PushInfo,
    TrackerMemento,
    Verdict,
    WorkerKey,
)
from ps_server.failpoints import Failpoints
from ps_server.log import Loaded, ModelPart, RecoveredModel, Update, UpdateLog
from ps_server.optimizers import (
    Block,
    Region,
    StateEntry,
    Step,
    assign_buffers,
    average,
    average_buffers,
    first_nonfinite,
)
from ps_server.shard.gate import Gate
from ps_server.shard.lane import INLINE_BYTES, Lane
from ps_server.shard.pool import RegionPool
from ps_server.shard.published import Copies, Published
from ps_server.shard.replication import Replication

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
        self.pool = RegionPool(self.layout)
        self.tracker = start.tracker
        self.tracker.configure(consistency)
        #: Whether the region holds values yet: rank 0's initial ones, or later ones.
        self.initialised = start.initialised
        #: Calls of ``load`` that wrote something.
        self.loads = 0
        #: Staleness of each rank's last applied push.
        self.staleness: dict[int, int] = {}
        #: How the open streams travel, by worker.
        self.transports: dict[WorkerKey, common_pb2.Transport] = {}
        #: The newest open stream of each worker.
        self._streams: dict[WorkerKey, object] = {}
        self._lane = lane
        self._log = log
        self._replication = replication
        self.failpoints = failpoints
        #: Holds pushes back while the job is copied at one point.
        self.gate = Gate()
        self._replica = start.replica
        self._copies = Copies()
        self._parked: ParkedPulls[asyncio.Future[None]] = ParkedPulls()
        #: Accepted pushes whose step is still open (sync).
        self._held: dict[tuple[WorkerKey, int], Push] = {}
        #: The newest version decided; its bytes are there once the lane has done the work queued for it.
        self._newest = self._published_now(self._replica.region)
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

    def attach(self, worker: WorkerKey, phase: int, clock: int | None = None) -> Position:
        """A worker opened its stream; returns where it stands. Raises Fenced."""
        self.check()
        position = self.tracker.attach(worker, phase, clock)
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
        """Decide about a push and queue its work.

        Raises Fenced, InvalidRequest, NonFiniteGradient, StateLost, or StorageFull; then nothing was decided.
        """
        try:
            self.check()
            self.require_values()
            skipped = await self._must_skip(push)
            await self._log.reserve(self.layout.region_bytes)
        except BaseException:
            self._give_memory(push)
            raise
        info = replace(push.info, skipped=True) if skipped else push.info
        try:
            if self.gate.stops(info.worker, info.sequence):
                await self.gate.passes(info.worker, info.sequence)
            decision = self.tracker.push(info)
        except BaseException:
            self._give(push)
            raise
        if decision.verdict is Verdict.APPLY:
            self.staleness[info.worker.rank] = decision.staleness
            self._queue([push], decision.scale, self.tracker.version, is_round=False)
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

    def has(self, worker: WorkerKey, sequence: int) -> bool:
        """Whether this push was accepted, or cannot come any more because its worker is gone."""
        known = {standing.worker: standing.last_sequence for standing in self.tracker.clocks()}
        return known.get(worker, sequence) >= sequence

    def _advance(self) -> None:
        """After every event: apply the steps that became complete, then answer the pulls that may be answered."""
        self.gate.stir()
        for ready in self.tracker.take_ready():
            pushes = [self._held.pop((info.worker, info.sequence)) for info in ready.contributions]
            for info, staleness in zip(ready.contributions, ready.staleness, strict=True):
                self.staleness[info.worker.rank] = staleness
            if pushes:
                self._queue(pushes, 1.0, ready.version, is_round=True)
        for parked in self._parked.release(self.tracker):
            if not parked.done():
                parked.set_result(None)

    # -- tensor work, in the lane

    def _queue(self, pushes: Sequence[Push], scale: float, version: int, *, is_round: bool) -> None:
        live_workers = self._live_workers

        def work() -> None:
            infos = tuple(push.info for push in pushes)
            try:
                with self._combined(pushes, scale, live_workers) as step:
                    self._apply(Update(self.name, version, infos, is_round, step))
            finally:
                for push in pushes:
                    self._give_memory(push)

        def done(queued: asyncio.Future[Region]) -> None:
            for _ in pushes:
                self._log.release(self.layout.region_bytes)
            self._applied(queued)

        self._change(version, work).add_done_callback(done)

    def _change(self, version: int, work: Callable[[], None]) -> asyncio.Future[Region]:
        """Queue work that changes the region; whoever reads what was there before goes on reading it undisturbed."""
        before, loop = self._newest, asyncio.get_running_loop()

        def change() -> Region:
            # Nobody takes ``before`` any more: its takers only become fewer.
            if before.still_read(patient=self.layout.region_bytes >= INLINE_BYTES):
                self._copies.begin()
                try:
                    self._replica.move(self.pool.take())
                    loop.call_soon_threadsafe(before.leave_to_readers)
                finally:
                    loop.call_soon_threadsafe(self._copies.end)
            work()
            return self._replica.region

        made = self._lane.submit(change, max(self.layout.region_bytes, INLINE_BYTES * self._log.waits))
        self._newest = Published(version, made, self.pool)
        return made

    async def spare_memory(self) -> None:
        """Wait while the region is being copied: then there is one more than workers need.

        Whoever takes a region for gradients calls this before.
        """
        await self._copies.ended()

    def _published_now(self, region: Region) -> Published:
        ready: asyncio.Future[Region] = asyncio.get_running_loop().create_future()
        ready.set_result(region)
        return Published(self.tracker.version, ready, self.pool)

    def _applied(self, work: asyncio.Future[Region]) -> None:
        """On the loop: an update that failed stops the model, for half of it may have happened."""
        if work.cancelled() or not (error := work.exception()):
            return
        logger.error("model '%s' stopped: an update failed", self.name, exc_info=error)
        failure = InternalError(
            f"shard {self.layout.shard} stopped model '{self.name}': an update failed",
            shard=str(self.layout.shard),
            actual=f"{type(error).__name__}: {error}",
            remedy="see the log of this shard; start the job again",
        )
        self.stop(failure)

    def stop(self, error: PsError) -> None:
        """Decide and answer nothing any more."""
        self._failure = self._failure or error
        for parked in self._parked:
            if not parked.done():
                parked.set_exception(self._failure)

    def _apply(self, update: Update) -> None:
        """In the lane. First the log: what is applied has been logged, and what cannot be logged is not applied."""
        self.failpoints.hit("before_log")
        self._log.append(update)
        self.failpoints.hit("after_log_before_apply")
        self._replica.apply(update.step)

    @contextmanager
    def _combined(self, pushes: Sequence[Push], scale: float, live_workers: int) -> Iterator[Step]:
        """In the lane: the step that ``pushes`` make together, in rank order."""
        parts = [push.gradients for push in pushes if push.gradients is not None]
        into, owned = parts[0].region, len(pushes) == 1 or not parts[0].lent
        if not owned:
            into = self.pool.take()
        try:
            absent = pushes[0].absent
            if len(pushes) > 1:
                absent = average(into, [part.region for part in parts], [push.absent for push in pushes])
            weight = self._combine_buffers(into, [push for push in pushes if push.with_buffers], live_workers)
            yield Step(into, absent, pushes[0].options, scale, weight)
        finally:
            if not owned:
                self.pool.give(into)

    def _combine_buffers(self, into: Region, pushes: Sequence[Push], live_workers: int) -> float:
        """Leave the buffers that came in ``into``, as the model's policy says; returns their weight."""
        values = [push.gradients.region for push in pushes if push.gradients is not None]
        if not values:
            return 0.0
        if self.layout.shard_map.spec.buffers is Buffers.AVERAGE and len(values) > 1:
            average_buffers(into, values)
            return 1.0
        if into is not values[0]:
            assign_buffers(into, values[0])
        return 1.0 if self.layout.shard_map.spec.buffers is Buffers.RANK0 else 1 / live_workers

    def _give(self, push: Push) -> None:
        """A push that had been reserved for is done with."""
        self._log.release(self.layout.region_bytes)
        self._give_memory(push)

    def _give_memory(self, push: Push) -> None:
        if push.gradients is not None and not push.gradients.lent:
            self.pool.give(push.gradients.region)

    async def settled(self) -> None:
        """Returns when everything decided so far has been done, and may be told. Raises what stopped the model."""
        if not self._newest.ready.done():
            await asyncio.wait([self._newest.ready])
        await self._covered()
        self.check()

    async def _covered(self) -> None:
        """Returns when what is in the log may be told of: with a standby that acknowledges, when it has it, too."""
        number = self._log.number
        if self._replication is not None and not self._replication.covers(number):
            await self._replication.covered(number)

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
    async def published(self, *, quick: bool = False) -> AsyncIterator[Published]:
        """Parameters and buffers after everything decided so far. ``quick``: read from shared memory."""
        self.check()
        published = self._newest
        published.take(quick=quick)
        try:
            if not published.ready.done():
                await asyncio.shield(published.ready)
            await self._covered()
            self.check()
            yield published
        finally:
            published.give_back(quick=quick)

    # -- parameters and state as a whole

    async def load(
        self,
        region: Region | None,
        entries: Sequence[StateEntry] | None,
        tracker: TrackerMemento | None = None,
        *,
        only_first: bool,
    ) -> bool:
        """Write values and state; False when ``only_first`` found values. Raises InvalidRequest, StorageFull.

        ``tracker``: where a restored job stood; before anybody has opened a stream.
        """
        refusals: list[PsError] = []
        nbytes = self.layout.region_bytes + sum(tensor.nbytes for _, tensor in entries or ())
        if not self.initialised and self._announce:
            await self._announce()
        await self._log.reserve(nbytes)
        # Looked at last: of two that come at once the first wins.
        if only_first and self.initialised:
            self._log.release(nbytes)
            return False

        def work() -> None:
            try:
                self._replica.load(region, entries)
            except PsError as refusal:
                refusals.append(refusal)  # nothing was changed: the model goes on
                return
            self._log.append(Loaded(self.name, region, entries, tracker))
            self.loads += 1

        if tracker:
            self.tracker.restore(tracker)
        before = self.initialised
        self.initialised = before or region is not None
        loading = self._change(self.tracker.version, work)
        loading.add_done_callback(lambda _: self._log.release(nbytes))
        loading.add_done_callback(self._applied)
        await asyncio.shield(loading)
        if refusals:
            self.initialised = before
            raise refusals[0]
        await self._covered()
        return True

    @asynccontextmanager
    async def save(self) -> AsyncIterator[tuple[Published, list[StateEntry]]]:
        """Values and a copy of the optimizer state, of one version."""
        copied = self._lane.submit(self._replica.state, self.layout.region_bytes)
        async with self.published() as published:
            yield published, await copied

    # -- copies for the disk

    async def describe(self) -> ModelPart:
        """Where the model stands: what pushes it knows, and how far the log was when it knew them."""
        memento, initialised = self.tracker.memento(), self.initialised
        number = await self._lane.submit(lambda: self._log.number, 0)
        self.check()
        return ModelPart(self.layout.shard_map, initialised, memento, number)

    async def copy_block(self, block: Block, into: memoryview) -> tuple[int, memoryview, list[StateEntry]]:
        """A copy of one block, made between two updates: the last record it contains, values, optimizer state."""

        def work() -> tuple[int, memoryview, list[StateEntry]]:
            values = into[: block.end - block.begin]
            values[:] = self._replica.region.bytes[block.begin : block.end]
            return self._log.number, values, self._replica.state(block)

        copied = await self._lane.submit(work, block.end - block.begin)
        self.check()
        return copied
