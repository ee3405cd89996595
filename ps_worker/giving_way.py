"""Sees to it that workers who wait for each other in steps of different models go on: the younger one gives way."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from ps_protocol.errors import PsError
from ps_protocol.model import Consistency, Mode
from ps_worker.calls import ShardCalls
from ps_worker.interfaces import TrainingSession
from ps_worker.progress import log
from ps_worker.replies import Peer
from ps_worker.stand_in import Standing, end_empty_steps

_LOOK_SECONDS = 0.2
"""A step that takes longer than this is looked at, and when nothing is asked again after twice as long, and so on."""

_LONGEST_SECONDS = 2.0

_AGAIN_SECONDS = 0.02
"""The same after an empty step: the next may be asked for at once."""


@dataclass(frozen=True, slots=True)
class Stand:
    """Where one worker stands with one model on one shard."""

    incarnation: int
    phase: int
    clock: int


Stands = Mapping[int, Stand]
"""By rank, of one model on one shard."""


class Model(Standing, Protocol):
    """One model's optimizer."""

    @property
    def name(self) -> str:
        """Name of the model in the job."""
        ...

    @property
    def holders(self) -> Sequence[int]:
        """Numbers of the shards that hold slices of the model."""
        ...

    @property
    def is_busy(self) -> bool:
        """Whether an exchange of it goes on beside the training thread."""
        ...


def is_held_back(rank: int, shards: Iterable[Stands], consistency: Consistency) -> bool:
    """Whether a step that worker ``rank`` has pushed waits, on any of the ``shards``, for others to come as far."""
    for stands in shards:
        own = stands.get(rank)
        if own is not None:
            bound = own.phase, own.clock - _bound(consistency)
            behind = sum((other.phase, other.clock) < bound for other in stands.values())
            if behind > consistency.backup:
                return True
    return False


def is_asked(rank: int, shards: Iterable[Stands], consistency: Consistency) -> bool:
    """Whether, on any of the ``shards``, an older worker has stepped further than it may without worker ``rank``.

    One that stands in a later phase has entered the barrier and waits for no step.
    """
    return any(
        other.incarnation < own.incarnation
        and other.phase == own.phase
        and other.clock > own.clock + _bound(consistency)
        for stands in shards
        if (own := stands.get(rank)) is not None
        for other in stands.values()
    )


def stands_of(session: TrainingSession, model: Model) -> list[Stands]:
    """Where the workers stand with ``model``, as each of its shards says. Raises PsError."""
    stands: list[Stands] = []
    for shard in model.holders:
        peer = Peer(shard, session.shard_address(shard))
        status = ShardCalls(session.shard_channel(shard), peer, model.name, epoch=0).status()
        stands.append({each.rank: Stand(each.incarnation, each.phase, each.clock) for each in status.clocks})
    return stands


def _bound(consistency: Consistency) -> int:
    # A pull that overlaps the next step counts as standing one step further.
    return max(0, consistency.staleness - 1) if consistency.mode is Mode.SSP else 0


@dataclass(eq=False, slots=True)
class _Wait:
    """A step of the training thread under way."""

    model: Model
    look_at: float
    pause_seconds: float = _LOOK_SECONDS
    #: The last empty step of each model that made some meanwhile.
    empty: dict[Model, Future[None]] = field(default_factory=dict)


class GivingWay:
    """Made by the Cluster when it has several models. ``waiting`` is called by the training thread; a daemon thread
    looks at steps that take long.

    In sync and ssp a worker waits in a step of one model for the steps that others make of it. Workers that step their
    models in one common order never wait in a circle. But one that joins, or has made empty steps while it waited for
    data, may be at another place of that order than the rest: it waits in a step of A for one who waits for its step of
    B. Then the younger worker makes an empty step of B, as often as the older needs one; after that both are at the
    same place.

    Why nobody waits for ever: of all who wait in a step, take the oldest, waiting in A, and of those it waits for the
    one whose clock of A is lowest. That one does not wait in A, where nobody is behind it, so it waits in another
    model; it is younger; so it makes an empty step of A. And why nobody gives way who is where the others are: one who
    has stepped B further than this worker in the common order has had an answer to the step that this one waits in, so
    all had come that far and nobody holds it back.
    """

    def __init__(
        self,
        rank: int,
        models: Callable[[], Iterable[Model]],
        stands: Callable[[Model], list[Stands]],
        consistency: Callable[[], Consistency],
    ) -> None:
        """``stands`` asks each shard, from the daemon thread; it raises PsError where one does not answer."""
        self._rank = rank
        self._models = models
        self._stands = stands
        self._consistency = consistency
        #: Guards ``_wait`` and its empty steps.
        self._lock = threading.Lock()
        self._wait: _Wait | None = None
        self._stop = threading.Event()
        self._steps = ThreadPoolExecutor(thread_name_prefix="ps-give-way")
        self._thread = threading.Thread(target=self._watch, name="ps-giving-way", daemon=True)
        self._thread.start()

    @contextmanager
    def waiting(self, model: Model) -> Iterator[None]:
        """Around what the training thread does with ``model`` and may wait in.

        Other models have the newest parameters at the end, where they made empty steps. Raises what taking these does.
        """
        with self._lock:
            wait = self._wait = _Wait(model, time.monotonic() + _LOOK_SECONDS)
        try:
            yield
        except BaseException:
            self._end(wait)
            raise
        for gave_way in self._end(wait):
            gave_way.pull()

    def close(self) -> None:
        """End the thread. Comes before the optimizers are closed; safe to repeat."""
        self._stop.set()
        self._thread.join(_LOOK_SECONDS * 2)
        self._steps.shutdown(wait=False)

    def _end(self, wait: _Wait) -> list[Model]:
        """The step is over: end the empty ones, too; returns the models that made some."""
        with self._lock:
            self._wait = None
        if wait.empty and (error := end_empty_steps({step: model for model, step in wait.empty.items()})):
            # It comes again with the next step of its model.
            log.debug("an empty step failed: %s", error)
        return list(wait.empty)

    def _watch(self) -> None:
        pause_seconds = _LOOK_SECONDS
        while not self._stop.wait(pause_seconds):
            pause_seconds = _LOOK_SECONDS
            if (wait := self._wait) is not None:
                if wait.look_at <= time.monotonic():
                    self._look(wait)
                pause_seconds = max(0.0, min(_LOOK_SECONDS, wait.look_at - time.monotonic()))

    def _look(self, wait: _Wait) -> None:
        """Begin an empty step of each model that is asked for; then say when to look again."""
        wait.pause_seconds = min(_LONGEST_SECONDS, 2 * wait.pause_seconds)
        try:
            for model in self._models():
                if self._gives_way(wait, model):
                    self._begin(wait, model)
                    wait.pause_seconds = _AGAIN_SECONDS
        except (PsError, ValueError) as error:  # ValueError: the channel has been closed
            log.debug("could not look at where others stand: %s", error)
        wait.look_at = time.monotonic() + wait.pause_seconds

    def _gives_way(self, wait: _Wait, model: Model) -> bool:
        consistency, last = self._consistency(), wait.empty.get(model)
        if consistency.mode is Mode.ASYNC or model is wait.model or model.is_busy or (last and not last.done()):
            return False
        # In this order: who is behind at the second look was behind at the first.
        asked = is_asked(self._rank, self._stands(model), consistency)
        return asked and is_held_back(self._rank, self._stands(wait.model), consistency)

    def _begin(self, wait: _Wait, model: Model) -> None:
        with self._lock:
            if self._wait is wait and not self._stop.is_set():
                wait.empty[model] = self._steps.submit(model.stand_in)
