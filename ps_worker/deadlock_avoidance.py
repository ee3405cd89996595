"""No-op steps of a worker that waits, and deadlocks between workers that step several models, avoided by such steps."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field

from ps_protocol.errors import PsError, Retryable
from ps_protocol.model.spec import Consistency
from ps_protocol.retry import Retry
from ps_worker import times
from ps_worker.session.reporting import log
from ps_worker.session.session import Session
from ps_worker.step.remote_model import RemoteModel
from ps_worker.step.shard_calls import ShardClient
from ps_worker.transport.base import Peer


@contextmanager
def no_op_steps(models: Sequence[RemoteModel], others_wait: Callable[[], bool]) -> Iterator[None]:
    """Make no-op steps of every model during the block, one thread each, while ``others_wait()``; then catch up.

    As the join context of torch's DDP does for uneven inputs: a no-op step moves the clock, so that workers that still
    train are not blocked, and changes no parameter. Models step at their own pace. A no-op step that waits for others
    when the block ends is interrupted. Raises what such a step raised.
    """
    for model in models:
        model.begin_waiting()
    stop = threading.Event()

    def steps(model: RemoteModel) -> None:
        while not stop.wait(times.NO_OP_PAUSE_SECONDS):
            if others_wait():
                model.no_op_step()

    with ThreadPoolExecutor(max(1, len(models)), "ps-no-op") as threads:
        running = {threads.submit(steps, model): model for model in models}
        try:
            yield
        finally:
            stop.set()
            error = end_no_op_steps(running)
    if error is not None:
        raise error
    for model in models:
        model.catch_up()


def end_no_op_steps(running: Mapping[Future[None], RemoteModel]) -> BaseException | None:
    """Wait for the no-op steps under way, interrupt late ones, and return the first error of those not interrupted.

    An interrupted push may have arrived or not: its model has to be pulled.
    """
    late = wait(running, 0.2).not_done
    waiting = late
    while waiting:
        for future in waiting:
            running[future].interrupt()
        waiting = wait(waiting, 0.1).not_done
    for future in late:
        running[future].resume()
    errors = (future.exception() for future in running if not _was_interrupted(future, late))
    return next((error for error in errors if error is not None), None)


def _was_interrupted(future: Future[None], late: set[Future[None]]) -> bool:
    return future in late and isinstance(future.exception(), Retryable)


LOOKS = Retry(0.2, 2.0)
"""A step that takes longer than the first pause is checked; then again after pauses that double."""


@dataclass(frozen=True, slots=True)
class WorkerClock:
    """The position of one worker in the steps of one model, as one shard reports it."""

    incarnation: int
    phase: int
    clock: int


WorkerClocks = Mapping[int, WorkerClock]
"""By rank: the clocks of one model on one shard."""


def is_blocked(rank: int, shards: Iterable[WorkerClocks], consistency: Consistency) -> bool:
    """Whether a step that worker ``rank`` has pushed waits, on any of the ``shards``, for steps of other workers."""
    for clocks in shards:
        own = clocks.get(rank)
        if own is not None:
            bound = own.phase, own.clock - _bound(consistency)
            behind = sum((other.phase, other.clock) < bound for other in clocks.values())
            if behind > consistency.backup:
                return True
    return False


def is_needed(rank: int, shards: Iterable[WorkerClocks], consistency: Consistency, *, by_older: bool = True) -> bool:
    """Whether, on any of the ``shards``, an older worker is further than it may be without a step of worker ``rank``.

    Without ``by_older``: whether any other worker is. A worker in a later phase has entered the barrier and waits for
    no step.
    """
    return any(
        (other.incarnation < own.incarnation or not by_older)
        and other.phase == own.phase
        and other.clock > own.clock + _bound(consistency)
        for clocks in shards
        if (own := clocks.get(rank)) is not None
        for other in clocks.values()
    )


def worker_clocks(session: Session, model: RemoteModel) -> list[WorkerClocks]:
    """Return the clocks of ``model`` on each of its shards. Raises PsError."""
    clocks: list[WorkerClocks] = []
    for shard in model.holders:
        peer = Peer(shard, session.shard_address(shard))
        status = ShardClient(session.shard_channel(shard), peer, model.name, epoch=0).status()
        clocks.append({each.rank: WorkerClock(each.incarnation, each.phase, each.clock) for each in status.clocks})
    return clocks


def _bound(consistency: Consistency) -> int:
    # A pull that overlaps the next step counts as one step more.
    return max(0, consistency.bound - 1)


@dataclass(eq=False, slots=True)
class _Wait:
    """A step of the training thread under way."""

    model: RemoteModel
    look_at: float
    pause_seconds: float = LOOKS.first_seconds
    #: The last no-op step of each model that made some meanwhile.
    no_op_steps: dict[RemoteModel, Future[None]] = field(default_factory=dict)


class DeadlockAvoidance:
    """For workers with several models. The training thread enters ``waiting``; a daemon thread checks slow steps.

    In bounded modes a worker waits, in a step of one model, for steps of others in that model. Workers that step their
    models in one common order never wait in a circle. A worker that joins, or that made no-op steps while it waited for
    data, may be at another position of that order: it waits in a step of A for a worker that waits for its step of B.
    Then the younger worker makes no-op steps of B, as many as the older one needs. After that both are at the same
    position.

    No worker waits for ever: of all workers that wait in a step, take the oldest one, which waits in A, and of the
    workers that it waits for, the one with the lowest clock of A. That one does not wait in A, since none is behind it
    there, so it waits in another model; it is younger; so it makes a no-op step of A. No worker at the common position
    makes no-op steps: a worker that is further in B, in the common order, has received the answer to the step that this
    worker waits in. All workers had then reached that step, so it is not blocked.
    """

    def __init__(
        self,
        rank: int,
        models: Callable[[], Iterable[RemoteModel]],
        clocks: Callable[[RemoteModel], list[WorkerClocks]],
        consistency: Callable[[], Consistency],
    ) -> None:
        """``clocks`` asks each shard, from the daemon thread; it raises PsError where one does not answer."""
        self._rank = rank
        self._models = models
        self._clocks = clocks
        self._consistency = consistency
        #: Guards ``_wait`` and its no-op steps.
        self._lock = threading.Lock()
        self._wait: _Wait | None = None
        self._stop = threading.Event()
        self._steps = ThreadPoolExecutor(thread_name_prefix="ps-no-op-step")
        self._thread = threading.Thread(target=self._watch, name="ps-deadlock-avoidance", daemon=True)
        self._thread.start()

    @contextmanager
    def waiting(self, model: RemoteModel) -> Iterator[None]:
        """Entered around calls of the training thread with ``model`` that may wait for other workers.

        Models that made no-op steps meanwhile then pull the newest parameters. Raises PsError.
        """
        with self._lock:
            wait = self._wait = _Wait(model, time.monotonic() + LOOKS.first_seconds)
        try:
            yield
        except BaseException:
            self._end(wait)
            raise
        for advanced in self._end(wait):
            advanced.catch_up()

    def close(self) -> None:
        """End the thread, before the models are closed. Safe to repeat."""
        self._stop.set()
        self._thread.join(LOOKS.first_seconds * 2)
        self._steps.shutdown(wait=False)

    def _end(self, wait: _Wait) -> list[RemoteModel]:
        """End the no-op steps with the step; return the models that made some."""
        with self._lock:
            self._wait = None
        if wait.no_op_steps and (error := end_no_op_steps({step: model for model, step in wait.no_op_steps.items()})):
            # The next step of the model raises it again.
            log.debug("a no-op step failed: %s", error)
        return list(wait.no_op_steps)

    def _watch(self) -> None:
        pause_seconds = LOOKS.first_seconds
        while not self._stop.wait(pause_seconds):
            pause_seconds = LOOKS.first_seconds
            if (wait := self._wait) is not None:
                if wait.look_at <= time.monotonic():
                    self._look(wait)
                pause_seconds = max(0.0, min(LOOKS.first_seconds, wait.look_at - time.monotonic()))

    def _look(self, wait: _Wait) -> None:
        """Begin a no-op step of each model that needs one; then set the time of the next check."""
        wait.pause_seconds = LOOKS.after(wait.pause_seconds)
        try:
            for model in self._models():
                if self._is_needed(wait, model):
                    self._begin(wait, model)
                    wait.pause_seconds = times.NO_OP_AGAIN_SECONDS
        except (PsError, ValueError) as error:  # ValueError: the channel has been closed
            log.debug("the clocks of other workers are not known: %s", error)
        wait.look_at = time.monotonic() + wait.pause_seconds

    def _is_needed(self, wait: _Wait, model: RemoteModel) -> bool:
        consistency, last = self._consistency(), wait.no_op_steps.get(model)
        if not consistency.mode.bounded or model is wait.model or model.is_busy or (last and not last.done()):
            return False
        # In this order: a worker that is behind in the second answer was behind in the first.
        needed = is_needed(self._rank, self._clocks(model), consistency)
        return needed and is_blocked(self._rank, self._clocks(wait.model), consistency)

    def _begin(self, wait: _Wait, model: RemoteModel) -> None:
        with self._lock:
            if self._wait is wait and not self._stop.is_set():
                wait.no_op_steps[model] = self._steps.submit(model.no_op_step)
