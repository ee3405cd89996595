"""Carries one model's steps to all its shards: same sequence and position everywhere, and through broken streams."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any, TypeVar

import torch

from ps_protocol.errors import ModelMoved, NotReady, StateLost, StorageFull, Unavailable
from ps_protocol.layout import Range
from ps_protocol.model import ShardMap
from ps_worker.backoff import Backoff
from ps_worker.first_values import INITIAL_TIMEOUT_SECONDS, FirstValues
from ps_worker.flat import FlatModel
from ps_worker.gradients import Gradients
from ps_worker.interfaces import TrainingSession
from ps_worker.lane import Lane, Receipt, Standing
from ps_worker.newer_map import check_newest, newer_map
from ps_worker.options_lost import OptionsLost
from ps_worker.plan import FlatPlan
from ps_worker.state import join_state, split_state
from ps_worker.summary import PLAIN, Push, StepSummary, Style, Update
from ps_worker.tables.initial import InitialRows
from ps_worker.tables.lookup import Lookup, Position
from ps_worker.tables.places import RowPlaces

T = TypeVar("T")

State = dict[int, dict[str, torch.Tensor]]
"""Tensors by number of the variable and name."""

RECONNECT_TIMEOUT_SECONDS = 60.0
"""How long a shard may be away before a step gives up."""

_FULL_SECONDS = 0.5
"""Between two tries of a push that a shard has no room to log."""


class StepPipeline:
    """Called by one thread at a time, mostly the training thread; ``interrupt`` and ``close`` from anywhere.

    A push has one sequence on all shards and is repeated with it after a broken stream, so it is applied once per
    shard. After an exception other than a shard's own refusal the streams are dropped and opened anew by the next call.
    """

    def __init__(
        self,
        session: TrainingSession,
        shard_map: ShardMap,
        flat: FlatModel,
        gradients: Gradients,
        style: Style = PLAIN,
        *,
        initial_rows: InitialRows = MappingProxyType({}),
        reconnect_timeout_seconds: float = RECONNECT_TIMEOUT_SECONDS,
        initial_timeout_seconds: float = INITIAL_TIMEOUT_SECONDS,
    ) -> None:
        self._session = session
        self._name = shard_map.spec.name
        self._shard_map = shard_map
        self._places = RowPlaces(shard_map)
        self._first_values = FirstValues(session, flat, initial_rows, initial_timeout_seconds)
        self._flat = flat
        self._gradients = gradients
        self._style = style
        self._moved: Callable[[FlatPlan], None] = lambda plan: None
        self._timeout_seconds = reconnect_timeout_seconds
        self._lanes = self._new_lanes()
        self._options_lost = OptionsLost(session.rank, shard_map.spec)
        self._interrupted = False
        self._owner = os.getpid()
        self._sequence = 0
        #: (phase, clock): where this worker stands after its last push.
        self._position = (session.phase, 0)
        self._started = False
        #: The model had been trained before this worker came.
        self.joined_running = False
        session.on_shards(self.leave_replaced)

    @property
    def name(self) -> str:
        """Of the model."""
        return self._name

    @property
    def version(self) -> int:
        """The lowest version of the parameters held, over the shards."""
        return min(lane.version for lane in self._lanes)

    def start(self) -> None:
        """Open all streams, see that every shard has values, and take them into flat memory. Raises PsError."""
        try:
            self._as_laid_out(self._start)
        except BaseException:
            self._drop()
            raise
        self._started = True
        self._tell_transport()

    def _start(self) -> None:
        standings = [self._open_at_start(lane) for lane in self._lanes]
        self.joined_running = any(standing.version > 0 for standing in standings)
        empty = [lane for lane, s in zip(self._lanes, standings, strict=True) if not s.initialised]
        if self.joined_running:
            # Training begins when every shard has values. One may have got them after its stream was opened here.
            for lane in empty:
                if not self._persistently(lane, lane.initialised):
                    raise self._state_lost(lane)
            empty = []
        self._first_values.bring(empty, self._places, self._persistently)
        self._pull()

    def exchange(self, update: Update) -> StepSummary:
        """Push the gradients in memory to every shard, then receive the next parameters from every shard.

        Raises what a shard answered once all have answered; the step counts nevertheless. Raises Unavailable when a
        shard stayed away, StateLost when one came back without its parameters, Fenced when this worker lost its place.
        """
        self._session.check()
        try:
            epoch = self._shard_map.epoch
            self._as_laid_out(self._ensure_open)
            if epoch != self._shard_map.epoch:
                update = replace(update, staged=())
            push = self._next_push(update)
            for lane in self._lanes:
                lane.send(push)
            try:
                receipts = self._answers(push)
            except ModelMoved as moved:
                self._lay_out_anew(moved)
                push = replace(push, update=replace(update, staged=()))
                receipts = self._as_laid_out(partial(self._push_again, push))
        except BaseException:
            self._drop()
            raise
        self._position = max(self._position, (push.phase, max(receipt.clock for receipt in receipts)))
        return self._summary(receipts)

    def may_stage(self) -> bool:
        """Whether parts of the next push may be sent ahead: not where whole exchanges run beside the computation."""
        return self._session.lookahead == 0 and not any(lane.is_pushing for lane in self._lanes)

    def stage(self, shard: int, span: Range) -> bool:
        """Send a part of the next push to ``shard`` ahead, where its stream is open; whether that was possible."""
        return any(lane.stage(span) for lane in self._lanes if lane.shard == shard)

    # -- rows of tables

    @property
    def next_position(self) -> Position:
        """Of the next push."""
        phase, clock = max(self._position, (self._session.phase, 0))
        return phase, clock + 1

    def look_up(self, lookup: Lookup) -> None:
        """Ask for rows, of every shard whose stream is open; the others are asked when the rows are waited for."""
        lookup.lay_out(self._places)
        for lane in self._lanes:
            if lane.is_open and lane.shard in lookup.parts:
                lane.look_up(lookup.parts[lane.shard], lookup.position, now=lookup.now)

    def finish(self, lookup: Lookup) -> None:
        """Wait until all rows are in place; what was lost with a stream, or moved, is asked for again. Raises PsError.

        Where the mode has changed so that rows cannot come before the next push, they are those for it.
        """
        if not lookup.arrived:
            self._session.check()
            try:
                self._as_laid_out(partial(self._receive_rows, lookup))
            except BaseException:
                self._drop()
                raise
        lookup.settle()

    def _receive_rows(self, lookup: Lookup) -> None:
        check_newest(self._session, self._shard_map)
        lookup.lay_out(self._places)
        asked = [lane for lane in self._lanes if lane.shard in lookup.parts]
        self._in_turns(asked, partial(self._has_rows, lookup), self._position)
        for part in lookup.parts.values():
            if isinstance(part.error, ModelMoved):
                raise part.error

    def _has_rows(self, lookup: Lookup, lane: Lane) -> bool:
        """Whether the part of ``lane`` has come, having asked for it; False: the shard says that it waits."""
        part, position = lookup.parts[lane.shard], self.next_position
        if not part.arrived and not lane.is_open:
            self._open(lane)
            self._tell_transport()
        if not part.arrived and not lane.has_asked(part):
            lane.look_up(part, position, now=lookup.now)
        while not part.arrived:
            if not lane.receive_rows():
                if lookup.position > position and not self._session.lookahead:
                    # They would come after a push that is not made before they are there.
                    lane.drop()
                return False
        return True

    # -- slices that move between shards

    def on_moved(self, callback: Callable[[FlatPlan], None]) -> None:
        """Call ``callback`` with the new plan when slices have moved, from whatever thread makes an exchange."""
        self._moved = callback

    def _new_lanes(self) -> list[Lane]:
        make = partial(Lane, self._session, self._places)
        return [make(shard, self._flat, self._gradients, self._style) for shard in self._flat.plan.holders]

    def _as_laid_out(self, action: Callable[[], T]) -> T:
        """Do what may be repeated; once more when it turns out that slices have moved."""
        while True:
            try:
                return action()
            except ModelMoved as moved:
                self._lay_out_anew(moved)

    def _lay_out_anew(self, moved: ModelMoved) -> None:
        """Take the shard map in force. Parameters, and the gradients collected last, keep their values."""
        shard_map = newer_map(self._session, self._shard_map, moved, self._timeout_seconds)
        versions = {lane.shard: lane.version for lane in self._lanes}
        for lane in self._lanes:
            if lane.is_pushing:
                lane.take_back()
            lane.drop(for_good=True)
        residuals = self.residuals()
        self._shard_map, self._places = shard_map, RowPlaces(shard_map)
        self._flat.lay_out(shard_map)
        self._gradients.lay_out(self._flat.plan)
        self._lanes = self._new_lanes()
        self.load_residuals(residuals)
        for lane in self._lanes:
            lane.version = versions.get(lane.shard, min(versions.values()))
        self._moved(self._flat.plan)

    def _push_again(self, push: Push) -> list[Receipt]:
        """Push to shards of another layout: all have ``push`` already, or none has."""
        for lane in self._lanes:
            if lane.is_dropped:
                self._persistently(lane, partial(self._repeat, lane, push))
        return self._answers(push)

    def _tell_transport(self) -> None:
        self._session.record_transport({lane.shard: lane.transport for lane in self._lanes if lane.transport})

    def arrive(self, phase: int) -> None:
        """Tell every shard that this worker enters the barrier that ends ``phase``: it holds nobody back in it.

        Arrivals are not acknowledged. Call it again while waiting: a stream that broke meanwhile is opened anew.
        """
        self._as_laid_out(self._ensure_open)
        for lane in self._lanes:
            lane.arrive(phase)

    def pull(self) -> None:
        """The newest parameters and buffers of every shard into the model, whatever the mode. Raises PsError."""
        self._as_laid_out(self._pull)

    def _pull(self) -> None:
        for lane in self._lanes:
            self._persistently(lane, lane.pull)
        self._flat.publish_parameters()
        self._flat.publish_buffers()

    def publish(self) -> None:
        """Make the parameters that exchanges have brought the model's."""
        for lane in self._lanes:
            lane.land()
        self._flat.publish_parameters()

    def interrupt(self) -> None:
        """From another thread: what waits for a shard raises Unavailable, until ``resume``."""
        self._interrupted = True
        for lane in self._lanes:
            lane.interrupt()

    def leave_replaced(self) -> None:
        """From any thread, when shards may have changed: whoever waits for one that was replaced goes on with the next.

        One that is frozen, or cut off, would never answer nor end its stream.
        """
        for lane in self._lanes:
            if lane.is_outdated:
                lane.interrupt()

    def resume(self) -> None:
        """Nothing waits any more: go on as usual."""
        self._interrupted = False

    def residuals(self) -> State:
        """What the wire format has left out of gradients so far."""
        return join_state([lane.layout for lane in self._lanes], [lane.residuals() for lane in self._lanes])

    def load_residuals(self, residuals: Mapping[int, Mapping[str, Any]]) -> None:
        """Take over what another life of this worker had left out."""
        for lane in self._lanes:
            lane.load_residuals(split_state(lane.layout, residuals))

    def save_state(self) -> State:
        """The optimizer state from all shards. Raises PsError."""
        return self._as_laid_out(self._save_state)

    def _save_state(self) -> State:
        entries = [self._persistently(lane, lane.save_state) for lane in self._lanes]
        return join_state([lane.layout for lane in self._lanes], entries)

    def on_shards(self, action: Callable[[Lane], T]) -> list[T]:
        """What ``action``, which may be repeated, gives for each shard's lane. Raises PsError."""
        return self._as_laid_out(lambda: [self._persistently(lane, partial(action, lane)) for lane in self._lanes])

    def load_state(self, state: Mapping[int, Mapping[str, Any]]) -> None:
        """Replace the optimizer state of every shard. Raises PsError."""
        self._as_laid_out(partial(self._load_state, state))

    def _load_state(self, state: Mapping[int, Mapping[str, Any]]) -> None:
        for lane in self._lanes:
            self._persistently(lane, partial(lane.load_state, split_state(lane.layout, state)))

    def close(self) -> None:
        """End all streams. Safe to repeat; does nothing in a forked child."""
        if os.getpid() == self._owner:
            self._session.forget(self.leave_replaced)
            self._drop()

    def _drop(self) -> None:
        for lane in self._lanes:
            lane.drop()

    def _next_push(self, update: Update) -> Push:
        self._position = phase, clock = self.next_position
        self._sequence += 1
        return Push(self._sequence, phase, clock, update)

    def _summary(self, receipts: list[Receipt]) -> StepSummary:
        for receipt in receipts:
            self._options_lost.tell(receipt.differences)
        errors = [receipt.error for receipt in receipts if receipt.error is not None]
        if errors:
            for other in errors[1:]:
                errors[0].add_note(f"and from another shard: {other}")
            raise errors[0]
        summary = StepSummary(
            versions=tuple(lane.version for lane in self._lanes),
            outcomes=tuple(receipt.outcome for receipt in receipts),
            staleness=max(receipt.staleness for receipt in receipts),
            clock=self._position[1],
            transferred_bytes=sum(receipt.transferred_bytes for receipt in receipts),
        )
        self._session.record_step(None, summary.staleness, summary.transferred_bytes)
        return summary

    def _open(self, lane: Lane, position: tuple[int, int] | None = None) -> Standing:
        """Open a new stream. ``position``: where this worker stands on that shard, if not where its last push ended."""
        phase, clock = position or self._position
        told = clock if phase == self._session.phase else 0
        standing = lane.open(self._session.phase, told if self._started else None)
        if self._started and not standing.initialised:
            lane.drop()
            raise self._state_lost(lane)
        return standing

    def _state_lost(self, lane: Lane) -> StateLost:
        return StateLost(
            f"{lane.peer} came back without the parameters of model '{self._name}'",
            shard=str(lane.shard),
            remedy="start the job again from a checkpoint; give ps-server a --data-dir and it keeps what it holds",
        )

    def _open_at_start(self, lane: Lane) -> Standing:
        standing = self._persistently(lane, lambda: self._open(lane))
        self._position = max(self._position, standing.position)
        return standing

    def _ensure_open(self) -> None:
        check_newest(self._session, self._shard_map)
        for lane in self._lanes:
            if not lane.is_open:
                self._open_at_start(lane)
                self._tell_transport()

    def _answers(self, push: Push) -> list[Receipt]:
        """The answers to ``push``, by shard; it is repeated on a new stream as often as one breaks."""
        receipts: dict[int, Receipt] = {}

        def receive(lane: Lane) -> bool:
            if lane.is_dropped:
                self._repeat(lane, push)
            receipt = lane.receive()
            if receipt and isinstance(receipt.error, ModelMoved):
                raise receipt.error
            if receipt and isinstance(receipt.error, StorageFull):
                # The shard lives and says what it waits for: so does this worker, for as long as that takes.
                self._pause_for_room(receipt.error)
                lane.send(push)
            elif receipt:
                receipts[lane.shard] = receipt
            return lane.shard in receipts

        self._in_turns(self._lanes, receive, (push.phase, push.clock))
        return [receipts[lane.shard] for lane in self._lanes]

    def _in_turns(self, lanes: Sequence[Lane], receive: Callable[[Lane], bool], position: Position) -> None:
        """Until all of ``lanes`` have been received from; False: the shard says that it waits.

        Whoever says that it waits, or cannot be reached, goes to the end. So no broken stream and no refusal for want
        of room is left unseen behind a shard that waits, perhaps, for a worker that waits for just that. A shard that
        was restarted since it has answered is told again where this worker stands, at ``position``: it may have
        forgotten, and hold others back.
        """
        backoffs = {lane.shard: Backoff(self._timeout_seconds) for lane in lanes}
        turns = deque(lanes)
        while turns:
            lane = turns.popleft()
            was_open = not lane.is_dropped
            try:
                if receive(lane):
                    continue
            except (Unavailable, NotReady) as error:
                if lane.age_seconds > self._timeout_seconds:
                    backoffs[lane.shard] = Backoff(self._timeout_seconds)
                self._wait(lane, backoffs[lane.shard], error)
                if was_open:
                    turns.appendleft(lane)
                    continue
            turns.append(lane)
            self._greet_again([other for other in lanes if other not in turns], position)

    def _greet_again(self, answered: list[Lane], position: Position) -> None:
        """Open the streams to shards that have answered where they have ended; whoever is away comes later."""
        for lane in answered:
            if not lane.is_open:
                try:
                    self._open(lane, position)
                except (Unavailable, NotReady):
                    lane.drop()

    def _pause_for_room(self, error: StorageFull) -> None:
        if self._interrupted:
            raise error
        self._session.check()
        self._session.wait_hint(f"waiting: {error.message}; {error.remedy}")
        time.sleep(_FULL_SECONDS)

    def _repeat(self, lane: Lane, push: Push) -> None:
        """Send ``push`` on a new stream; without its gradients where the shard has them already."""
        standing = self._open(lane, (push.phase, push.clock - 1))
        if standing.last_sequence >= push.sequence:
            push = replace(push, update=replace(push.update, skipped=True))
        lane.send(push)
        self._tell_transport()

    def _persistently(self, lane: Lane, action: Callable[[], T]) -> T:
        """Do what may be repeated until the shard answers, for the stated time."""
        backoff = Backoff(self._timeout_seconds)
        while True:
            self._session.check()
            try:
                return action()
            except (Unavailable, NotReady) as error:
                self._wait(lane, backoff, error)

    def _wait(self, lane: Lane, backoff: Backoff, error: Unavailable | NotReady) -> None:
        lane.drop()
        if self._interrupted:
            raise error
        self._session.check()
        check_newest(self._session, self._shard_map)
        advancing = isinstance(error, NotReady) and error.progress
        ending = "waiting for it" if advancing else f"trying again for {backoff.left_seconds:.0f} s"
        self._session.wait_hint(f"{error.message}; {ending}")
        backoff.pause(error)
