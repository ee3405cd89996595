"""Tells the judge what the shipped classes do, from outside: each observed method is wrapped for the time of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ps_protocol.cluster.view import Member, Role
from ps_protocol.model.layout import Layout
from ps_protocol.v1 import shard_pb2 as pb
from ps_server.consistency import Tracker, Verdict
from ps_server.coordinator.data.data_leases import DataLeases
from ps_server.coordinator.driver import Driver
from ps_server.coordinator.service import CoordinatorService
from ps_server.log.durable import DurableLog
from ps_server.log.entries import AppliedUpdate, Loaded, MemoryLog
from ps_server.shard.access.fence import Fence
from ps_server.shard.models import Registry
from ps_server.shard.step.model import ShardModel
from ps_server.shard.step.stream import StepStream
from ps_server.shard.step.values import ModelValues
from ps_server.shard.transport.grpc_stream import GrpcServerTransport
from ps_server.state.region import Region
from ps_worker.step.shard_stream import ShardStream
from ps_worker.step.summary import Outcome
from simulation.judge import Judge, model_number
from simulation.runtime.kernel import Kernel

_VERDICTS = {
    pb.OUTCOME_APPLIED: Verdict.APPLY,
    pb.OUTCOME_DUPLICATE: Verdict.DUPLICATE,
    pb.OUTCOME_LATE: Verdict.LATE,
    pb.OUTCOME_STALE: Verdict.STALE,
    pb.OUTCOME_SKIPPED: Verdict.SKIP,
}

_NOTHING = (Outcome.LATE, Outcome.STALE, Outcome.SKIPPED)


class Shard(Protocol):
    """A process that serves a shard."""

    number: int
    incarnation: int


class Observers:
    """What is wrapped, and which process is whose."""

    def __init__(self, kernel: Kernel, judge: Judge) -> None:
        self._kernel = kernel
        self._judge = judge
        self.shards: dict[Any, Shard] = {}
        #: By number of the shard: the incarnation that holds the place.
        self._newest: dict[int, int] = {}
        #: Processes that train.
        self.workers: set[Any] = set()
        #: By carrier: the push that is being answered.
        self._answered: dict[Any, Any] = {}
        #: By tracker: the name of its model.
        self._models: dict[Tracker, str] = {}
        self._places: dict[int, tuple[Layout, npt.NDArray[np.int64]]] = {}

    def value_of(self, region: Region) -> float:
        """The value that all variables in ``region`` have."""
        layout = region.layout
        if id(layout) not in self._places:
            ranges = [np.arange(each.begin // 8, each.end // 8) for each in layout.slices]
            self._places[id(layout)] = layout, np.concatenate(ranges or [np.empty(0, np.int64)])
        values = np.frombuffer(region.bytes, np.float64)[self._places[id(layout)][1]].tolist()
        if values.count(values[0]) != len(values):
            self._judge.fail(f"{self._kernel.process} has values of different updates: {min(values)} to {max(values)}")
        return values[0]

    def forget(self) -> None:
        """Let go of all processes."""
        self.shards.clear()
        self.workers.clear()
        self._answered.clear()
        self._models.clear()
        self._places.clear()

    def _serving(self) -> Shard | None:
        """The shard whose code runs now, once it holds its place."""
        shard = self.shards.get(self._kernel.process)
        # One that another has replaced may not know it yet: what it does then is not the shard's history.
        return shard if shard is not None and shard.incarnation == self._newest.get(shard.number) else None

    def _place(self, shard: int, model: str) -> int:
        """The judge's number for one model on one shard."""
        return shard + self._judge.shards * model_number(model)

    def _judged(self, tracker: Tracker) -> int | None:
        """The judge's number for what ``tracker`` decides; None: it is not the shard's, or not any more."""
        shard, model = self._serving(), self._models.get(tracker)
        return None if shard is None or model is None else self._place(shard.number, model)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Within the block the judge hears of everything."""
        before: list[tuple[type, str, Any]] = []
        try:
            for kind, name, wrapper in self._wrappers():
                original = vars(kind)[name]
                before.append((kind, name, original))
                setattr(kind, name, wrapper(original))
            yield
        finally:
            for kind, name, original in reversed(before):
                setattr(kind, name, original)

    def _wrappers(self) -> Iterable[tuple[type, str, Callable[[Any], Any]]]:
        yield from (
            (Fence, "begin", self._fence_begin),
            (Registry, "recover", self._recover),
            (ShardModel, "__init__", self._model_made),
            (ModelValues, "load", self._load),
            (Tracker, "members", self._members),
            (Tracker, "configure", self._configure),
            (Tracker, "attach", self._attach),
            (Tracker, "arrive", self._arrive),
            (Tracker, "push", self._push),
            (Tracker, "take_ready", self._take_ready),
            (DurableLog, "append", self._append),
            (MemoryLog, "append", self._append),
            (StepStream, "_reply", self._reply),
            (GrpcServerTransport, "send_parameters", self._send_parameters),
            (ShardStream, "send", self._send),
            (ShardStream, "receive", self._receive),
            (Driver, "__init__", self._driver_made),
            (Driver, "join", self._join),
            (Driver, "adopt", self._adopt),
            (Driver, "_settle", self._settle),
            (Driver, "barrier", self._barrier),
            (Driver, "lease_data", self._lease_data),
            (DataLeases, "lease", self._lease),
            (CoordinatorService, "_message", self._message),
        )

    # -- shards

    def _fence_begin(self, original: Any) -> Any:
        def begin(fence: Fence, incarnation: int, token: str) -> None:
            if (shard := self.shards.get(self._kernel.process)) is not None:
                shard.incarnation = self._newest[shard.number] = incarnation
            original(fence, incarnation, token)

        return begin

    def _recover(self, original: Any) -> Any:
        def recover(registry: Registry, models: Any) -> None:
            shard = self._serving()
            if shard is not None:
                for name, model in models.items():
                    value = self.value_of(model.replica.region) if model.initialised else None
                    self._judge.restored(self._place(shard.number, name), model.tracker, value)
                for name in sorted(self._judge.models - models.keys()):
                    self._judge.restored_nothing(self._place(shard.number, name))
            original(registry, models)

        return recover

    def _model_made(self, original: Any) -> Any:
        def made(model: ShardModel, start: Any, *arguments: Any, **keywords: Any) -> None:
            self._models[start.tracker] = start.replica.layout.shard_map.spec.name
            original(model, start, *arguments, **keywords)

        return made

    def _load(self, original: Any) -> Any:
        async def load(values: Any, *arguments: Any, **keywords: Any) -> bool:
            written: bool = await original(values, *arguments, **keywords)
            if written and (shard := self._serving()) is not None:
                self._judge.values_acknowledged(self._place(shard.number, values._layout.shard_map.spec.name))
            return written

        return load

    def _members(self, original: Any) -> Any:
        def members(tracker: Tracker, live: Any) -> Any:
            if (place := self._judged(tracker)) is not None:
                self._judge.members(place, live)
            return original(tracker, live)

        return members

    def _configure(self, original: Any) -> Any:
        def configure(tracker: Tracker, consistency: Any) -> Any:
            if (place := self._judged(tracker)) is not None:
                self._judge.configured(place, consistency)
            return original(tracker, consistency)

        return configure

    def _attach(self, original: Any) -> Any:
        def attach(tracker: Tracker, worker: Any, *arguments: Any) -> Any:
            position = original(tracker, worker, *arguments)
            if (place := self._judged(tracker)) is not None:
                self._judge.attached(place, worker, position)
            return position

        return attach

    def _arrive(self, original: Any) -> Any:
        def arrive(tracker: Tracker, worker: Any, phase: int) -> None:
            original(tracker, worker, phase)
            if (place := self._judged(tracker)) is not None:
                self._judge.arrived(place, worker, phase)

        return arrive

    def _push(self, original: Any) -> Any:
        def push(tracker: Tracker, info: Any) -> Any:
            decision = original(tracker, info)
            if (place := self._judged(tracker)) is not None:
                self._judge.decided_push(place, info, decision)
            return decision

        return push

    def _take_ready(self, original: Any) -> Any:
        def take_ready(tracker: Tracker, now: float) -> Any:
            place = self._judged(tracker)
            for ready in original(tracker, now):
                if place is not None:
                    self._judge.round_decided(place, ready.position, ready.contributions)
                yield ready

        return take_ready

    def _append(self, original: Any) -> Any:
        def append(log: Any, entry: Any) -> Any:
            if (shard := self._serving()) is not None:
                if isinstance(entry, AppliedUpdate):
                    scale = entry.step.scale
                    self._judge.logged(
                        self._place(shard.number, entry.model), entry.version, entry.pushes, scale, entry.is_round
                    )
                elif isinstance(entry, Loaded) and entry.region is not None:
                    self._judge.loaded(self._place(shard.number, entry.model), self.value_of(entry.region))
            return original(log, entry)

        return append

    def _reply(self, original: Any) -> Any:
        async def reply(stream: Any, result: Any, info: Any = None) -> None:
            shard = self._serving()
            if shard is not None and info is not None:
                place = self._place(shard.number, stream._model.name)
                self._judge.answers_pull(place, info)
                self._answered[stream._transport] = place, info
            try:
                await original(stream, result, info)
            finally:
                self._answered.pop(stream._transport, None)

        return reply

    def _send_parameters(self, original: Any) -> Any:
        async def send_parameters(carrier: Any, result: Any, region: Any, ranges: Any) -> None:
            shard, answered = self._serving(), self._answered.get(carrier)
            if shard is not None and answered is not None:
                place, info = answered
                verdict, value = _VERDICTS.get(result.outcome), self.value_of(region)
                self._judge.replied(place, shard.incarnation, info, verdict, result.version, value)
            await original(carrier, result, region, ranges)

        return send_parameters

    # -- workers

    def _send(self, original: Any) -> Any:
        def send(lane: Any, push: Any) -> None:
            if self._kernel.process in self.workers:
                member = Member(Role.WORKER, lane._session.rank, lane._session.incarnation)
                gradients = np.frombuffer(lane._gradients.memory(lane.shard), np.float64)
                value = float(gradients[lane.layout.slices[0].begin // 8])
                self._judge.sent(
                    self._place(lane.shard, lane._router.shard_map.spec.name),
                    member,
                    push.sequence,
                    push.skipped,
                    value,
                )
            original(lane, push)

        return send

    def _receive(self, original: Any) -> Any:
        def receive(lane: Any) -> Any:
            receipt = original(lane)
            if receipt and receipt.outcomes[0] is not Outcome.REFUSED and self._kernel.process in self.workers:
                member = Member(Role.WORKER, lane._session.rank, lane._session.incarnation)
                dropped = receipt.outcomes[0] in _NOTHING
                self._judge.received(
                    self._place(lane.shard, lane._router.shard_map.spec.name), member, lane._sequence, dropped=dropped
                )
            return receipt

        return receive

    # -- the coordinator

    def _driver_made(self, original: Any) -> Any:
        def made(driver: Any, *arguments: Any, **keywords: Any) -> None:
            original(driver, *arguments, **keywords)
            self._judge.coordinator_started(driver.view, driver._state.membership.phase)

        return made

    def _join(self, original: Any) -> Any:
        def join(driver: Any, ask: Any) -> Any:
            joined = original(driver, ask)
            self._judge.joined(ask, joined)
            return joined

        return join

    def _adopt(self, original: Any) -> Any:
        def adopt(driver: Any, *arguments: Any) -> Any:
            placed = original(driver, *arguments)
            self._judge.placed(placed)
            return placed

        return adopt

    def _settle(self, original: Any) -> Any:
        def settle(driver: Any, decision: Any) -> Any:
            if decision.reason:
                self._judge.decided(driver._state.view, driver._state.membership.phase)
            return original(driver, decision)

        return settle

    def _barrier(self, original: Any) -> Any:
        async def barrier(driver: Any, rank: int, incarnation: int, phase: int, wait_seconds: float) -> Any:
            self._judge.arrived_at_coordinator(Member(Role.WORKER, rank, incarnation), phase)
            state = await original(driver, rank, incarnation, phase, wait_seconds)
            if state.released:
                self._judge.released(phase)
            return state

        return barrier

    def _lease(self, original: Any) -> Any:
        def lease(leases: Any, rank: int, incarnation: int, ask: Any) -> Any:
            decision = original(leases, rank, incarnation, ask)
            self._judge.reported(rank, incarnation, ask)
            return decision

        return lease

    def _lease_data(self, original: Any) -> Any:
        async def lease_data(driver: Any, rank: int, incarnation: int, ask: Any, wait_seconds: float) -> Any:
            answer = await original(driver, rank, incarnation, ask, wait_seconds)
            self._judge.leased(Member(Role.WORKER, rank, incarnation), ask, answer)
            return answer

        return lease_data

    def _message(self, original: Any) -> Any:
        def message(service: Any, view: Any) -> Any:
            self._judge.told(view)
            return original(service, view)

        return message
