"""The streams of one model to all its shards: opened, kept through outages, laid out again when slices have moved."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import Any, TypeVar

import torch

from ps_protocol.cluster.view import ClusterView
from ps_protocol.errors import ModelMoved, ModelReleased, NotReady, Retryable, StateLost
from ps_protocol.logs import EventLogger
from ps_protocol.model.spec import ShardMap
from ps_protocol.retry import SHARD, Attempts
from ps_protocol.wire.shared_memory import KeptMappings
from ps_worker.memory.flat import FlatModel
from ps_worker.memory.plan import FlatPlan
from ps_worker.model.optimizer_state import join_state, split_state
from ps_worker.model.unused_options import UnusedOptions
from ps_worker.session.reporting import WaitReason
from ps_worker.session.session import Session
from ps_worker.step.alternating import Gradients
from ps_worker.step.shard_stream import ShardStream
from ps_worker.step.summary import StreamPosition, Style
from ps_worker.tables.lookup import Position
from ps_worker.tables.row_router import RowRouter

T = TypeVar("T")

State = dict[int, dict[str, torch.Tensor]]
"""Tensors by number of the variable and name."""

logger = EventLogger("ps_worker")


class ModelStreams:
    """Used by the thread that uses the pipeline; ``interrupt``, ``interrupt_outdated`` and ``resume`` from anywhere."""

    def __init__(
        self,
        session: Session,
        shard_map: ShardMap,
        flat: FlatModel,
        gradients: Gradients,
        style: Style,
        timeout_seconds: float,
    ) -> None:
        self._session = session
        self._name = shard_map.spec.name
        self._flat = flat
        self._gradients = gradients
        self._style = style
        self._timeout_seconds = timeout_seconds
        self._options_lost = UnusedOptions(session.rank, shard_map.spec)
        self._moved: Callable[[FlatPlan], None] = lambda plan: None
        self._interrupted = False
        #: What was mapped when slices moved, until the next exchange has ended.
        self.kept_memory = KeptMappings()
        self.shard_map = shard_map
        self.router = RowRouter(shard_map)
        self.all = self._new_streams()
        #: (phase, clock): where this worker stands after its last push.
        self.position: Position = (session.phase, 0)
        #: The cluster's view that all streams were last looked at under; None: not since there are others.
        self._seen: ClusterView | None = None
        #: Every shard has values; one that opens without them has lost its state.
        self.started = False
        session.on_shards(self.interrupt_outdated)

    def _new_streams(self) -> list[ShardStream]:
        given = self._flat, self._gradients, self._style, self._options_lost, self.kept_memory
        return [ShardStream(self._session, self.router, shard, *given) for shard in self._flat.plan.holders]

    # -- opening

    def enter(self) -> list[StreamPosition]:
        """Open all streams for the first time: where this worker stands on each shard, and what it finds there.

        Shards may let a newcomer in at different positions. One that has it lower than another is told: it would wait
        for pushes that this worker never makes, and its rows, which come before the first push, wait with it.
        """
        found = [self.open_first(stream) for stream in self.all]
        for number, stream in enumerate(self.all):
            if found[number].position < self.position:
                found[number] = self.persistently(stream, partial(self.open, stream, self.position))
        return found

    def are_ready(self) -> bool:
        """Whether all streams are as ``ensure_open`` left them, and the cluster's view is the same."""
        return self._session.view is self._seen and all(map(attrgetter("is_alive"), self.all))

    def ensure_open(self) -> None:
        """Open the streams that are not open. Raises ModelMoved, PsError."""
        seen = self._session.view
        self.check_newest()
        for stream in self.all:
            if not stream.is_open:
                self.open_first(stream)
                self.report_transports()
        self._seen = seen

    def open_first(self, stream: ShardStream) -> StreamPosition:
        """Open ``stream`` while no push is under way; the worker goes on from the highest position of any shard."""
        standing = self.persistently(stream, lambda: self.open(stream))
        self.position = max(self.position, standing.position)
        return standing

    def open(self, stream: ShardStream, position: Position | None = None) -> StreamPosition:
        """Open ``stream`` again. ``position``: this worker's on that shard, if it is not that of the last push."""
        phase, clock = position or self.position
        told = clock if phase == self._session.phase else 0
        began = time.perf_counter()
        try:
            standing = stream.open(self._session.phase, told if self.started or position else None)
        finally:
            if self.started:
                self._session.counters.waits[WaitReason.RECONNECT] += time.perf_counter() - began
        self._session.counters.reconnects += self.started
        if self.started and not standing.initialised:
            stream.drop()
            raise self.state_lost(stream)
        return standing

    def state_lost(self, stream: ShardStream) -> StateLost:
        """The error for a shard that has lost the model's values."""
        return StateLost(
            f"{stream.peer} came back without the parameters of model '{self._name}'",
            shard=str(stream.shard),
            remedy="start the job again from a checkpoint; with --data-dir ps-server keeps its state",
        )

    def report_transports(self) -> None:
        """Tell the session the transport of each stream."""
        self._session.record_transport({stream.shard: stream.transport for stream in self.all if stream.transport})

    def drop(self) -> None:
        """End all streams now."""
        self.kept_memory.clear()
        for stream in self.all:
            stream.drop()

    def close(self) -> None:
        """End all streams for good."""
        self._session.forget(self.interrupt_outdated)
        self.drop()

    # -- outages

    def persistently(self, stream: ShardStream, action: Callable[[], T]) -> T:
        """The result of ``action``, which may be repeated until the shard answers, up to the reconnect timeout."""
        attempts: Attempts | None = None
        while True:
            self._session.check()
            try:
                return action()
            except Retryable as error:
                attempts = attempts or Attempts(SHARD.within(self._timeout_seconds))
                self._wait(stream, attempts, error)

    def on_each(self, action: Callable[[ShardStream], T]) -> list[T]:
        """The result of ``action``, which may be repeated, for each shard. Raises PsError."""
        return self.following_moves(lambda: [self.persistently(stream, partial(action, stream)) for stream in self.all])

    def in_turns(
        self, streams: Sequence[ShardStream], receive: Callable[[ShardStream], bool], position: Position
    ) -> None:
        """Call ``receive`` until it has returned True for each of ``streams``; False: the shard waits.

        A shard that waits or cannot be reached goes to the end. A broken stream, or a refusal for want of room, is
        therefore noticed although another shard waits, perhaps for a worker that waits for this one. A shard that was
        restarted after its answer is told ``position`` again: it may have lost it and make others wait.
        """
        attempts: dict[int, Attempts] = {}
        turns = deque(streams)
        while turns:
            stream = turns.popleft()
            was_open = not stream.is_dropped
            try:
                if receive(stream):
                    continue
            except Retryable as error:
                if stream.shard not in attempts or stream.age_seconds > self._timeout_seconds:
                    attempts[stream.shard] = Attempts(SHARD.within(self._timeout_seconds))
                self._wait(stream, attempts[stream.shard], error)
                if was_open:
                    turns.appendleft(stream)
                    continue
            turns.append(stream)
            self._reopen([other for other in streams if other not in turns], position)

    def _reopen(self, answered: list[ShardStream], position: Position) -> None:
        """Open streams that have ended since their shards answered; a shard that is away is left for later."""
        for stream in answered:
            if not stream.is_open:
                try:
                    self.open(stream, position)
                except Retryable:
                    stream.drop()

    def _wait(self, stream: ShardStream, attempts: Attempts, error: Retryable) -> None:
        stream.drop()
        self.check_wait(error)
        self.check_newest()
        advancing = isinstance(error, NotReady) and error.progress
        ending = "waiting for it" if advancing else f"trying again for {attempts.left_seconds:.0f} s"
        self._session.wait_hint(f"{error.message}; {ending}")
        began = time.perf_counter()
        try:
            attempts.sleep_after(error)
        finally:
            self._session.counters.waits[WaitReason.RECONNECT] += time.perf_counter() - began

    def check_wait(self, error: Retryable) -> None:
        """Raises ``error`` where waiting was interrupted, and Fenced."""
        if self._interrupted:
            raise error
        self._session.check()

    def interrupt(self) -> None:
        """From another thread: a call that waits for a shard raises Unavailable, until ``resume``."""
        self._interrupted = True
        for stream in self.all:
            stream.interrupt()

    def interrupt_outdated(self) -> None:
        """From any thread, when shards may have been replaced: calls that wait for a replaced one go on with the next.

        A replaced process may be frozen or cut off, and would neither answer nor end its stream.
        """
        for stream in self.all:
            if stream.is_outdated:
                stream.interrupt()

    def resume(self) -> None:
        """Waiting is possible again."""
        self._interrupted = False

    # -- slices that move between shards

    def on_moved(self, callback: Callable[[FlatPlan], None]) -> None:
        """Call ``callback`` with the new plan when slices have moved, from the thread that makes the exchange."""
        self._moved = callback

    def check_newest(self) -> None:
        """Raises ModelMoved when there is a newer shard map: a shard that is waited for may be gone for good."""
        if self._session.epoch(self._name) > self.shard_map.epoch:
            raise ModelMoved(f"slices of model '{self._name}' have moved")

    def following_moves(self, action: Callable[[], T]) -> T:
        """The result of ``action``, which is repeated after slices have moved."""
        while True:
            try:
                return action()
            except ModelMoved as moved:
                self.lay_out(moved)

    def lay_out(self, moved: ModelMoved) -> None:
        """Take the shard map in force. Parameters, and the gradients collected last, keep their values."""
        shard_map = newer_map(self._session, self.shard_map, moved, self._timeout_seconds)
        versions = {stream.shard: stream.version for stream in self.all}
        self.kept_memory.clear()
        for stream in self.all:
            if stream.is_pushing:
                stream.take_back()
            stream.drop(for_good=True)
        residuals = self.residuals()
        self.shard_map, self.router = shard_map, RowRouter(shard_map)
        self._flat.lay_out(shard_map)
        self._gradients.lay_out(self._flat.plan)
        self.all, self._seen = self._new_streams(), None
        self.load_residuals(residuals)
        for stream in self.all:
            stream.version = versions.get(stream.shard, min(versions.values()))
        self._moved(self._flat.plan)

    def residuals(self) -> State:
        """What the wire format has left out of gradients so far."""
        return join_state([stream.layout for stream in self.all], [stream.residuals() for stream in self.all])

    def load_residuals(self, residuals: Mapping[int, Mapping[str, Any]]) -> None:
        """Take over what an earlier process of this worker had left out."""
        for stream in self.all:
            stream.load_residuals(split_state(stream.layout, residuals))


def newer_map(session: Session, known: ShardMap, moved: ModelMoved, timeout_seconds: float) -> ShardMap:
    """The first shard map after ``known``.

    Raises Unavailable when the coordinator does not give it in time, ModelReleased when that is of another model.
    """
    attempts = Attempts(SHARD.within(timeout_seconds))
    while (newer := session.shard_map(known.spec.name)).epoch <= known.epoch:
        session.check()
        attempts.sleep_after(moved)
    if newer.spec != known.spec or session.view.was_released(known.spec.name, known.epoch):
        raise ModelReleased(
            f"model '{known.spec.name}' was released, and another one has its name",
            remedy="use the new one: call cluster.optimizer(...) or cluster.follow(...) again",
        )
    logger.info("move", "model '%s': slices have moved to other shards", known.spec.name)
    return newer
