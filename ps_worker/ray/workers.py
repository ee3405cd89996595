"""The worker actors of one run: a function on each, started again where one is lost, and its results."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from ps_protocol import times
from ps_protocol.client.worker_requests import Wanted
from ps_protocol.cluster.scaling import ScaleOrder
from ps_protocol.errors import Fenced, PsError, Retryable, Unavailable
from ps_protocol.logs import EventLogger
from ps_worker.ray.actors import WorkerActor
from ps_worker.ray.placement import Reservation, options_of
from ps_worker.ray.plan import RayPlan
from ps_worker.ray.servers import RayActors, end_actor

log = EventLogger("ps_worker")


class RayWorkers(RayActors):
    """Called by the user's thread; ``actor`` by any. ``close`` ends all workers, also those that still run."""

    def __init__(
        self,
        plan: RayPlan,
        reservation: Reservation | None,
        environment_of: Callable[[int], Mapping[str, str]],
        train_fn: Callable[..., Any],
        arguments: Sequence[Any],
    ) -> None:
        """``environment_of``: the variables of the worker of a rank. Nothing is started yet."""
        super().__init__(plan.worker_restarts)
        self._plan = plan
        self._reservation = reservation
        self._environment_of = environment_of
        self._train_fn = train_fn
        self._arguments = tuple(arguments)
        #: The call of each worker that runs.
        self._running: dict[Any, int] = {}
        #: Ranks whose actors were killed because the job is to have fewer, until these have ended.
        self._leaving: set[int] = set()
        #: Ranks whose function has returned since the job was scaled last.
        self._done: set[int] = set()
        #: The newest order of the coordinator, and whether a worker has ended since.
        self._order = ScaleOrder()
        self._order_is_old = True

    def run(
        self,
        check: Callable[[], None],
        requested: Callable[[bool], Wanted] = lambda soon: Wanted(),
    ) -> list[Any]:
        """Start all workers; their results, by rank, of those that were not ended because the job was to have fewer.

        ``check`` raises where the job cannot go on. ``requested``: what the coordinator has requested since the last
        call; with True it is needed soon.

        Raises what the function of a worker raises, and Unavailable when a worker is lost and no restart is left. A
        function that ends with an error of the job that another start may mend (Unavailable, NotReady, StorageFull,
        Fenced) counts as a lost worker as long as a restart is left.
        """
        results: dict[int, Any] = {}
        for rank in range(self._plan.workers):
            self._launch(rank)
        while not self._over(results):
            check()
            wanted = requested(self._order_is_old)
            self._end_hanging(wanted.ranks)
            if wanted.order is not None:
                self._scale(wanted.order)
            if self._running:
                ended, _ = ray.wait(list(self._running), num_returns=1, timeout=0.2)
            else:
                ended = []
                time.sleep(0.2)
            for call in ended:
                self._on_end(call, results)
            self._launch_due()
        return [results[rank] for rank in sorted(results)]

    def close(self) -> None:
        """End all actors."""
        if ray.is_initialized():
            for actor in self._actors.values():
                end_actor(actor)
        self._actors.clear()

    def _over(self, results: Mapping[int, Any]) -> bool:
        """Whether all workers have ended; those that came by hand, too, where workers come and go."""
        if self._plan.worker_range is None:
            return len(results) == self._plan.workers
        if self._running or self._due or self._order_is_old:
            return False
        return self._order.finished or (bool(self._done) and not self._order.live_ranks)

    def _scale(self, order: ScaleOrder) -> None:
        """Start and end workers as ``order`` requests; it comes again and again."""
        if order.number != self._order.number:
            self._done.clear()
        self._order, self._order_is_old = order, False
        if order.ranks is None:
            return
        stays = order.ranks | order.done_ranks
        for rank in self._due.keys() - stays:
            del self._due[rank]
        running = set(self._running.values())
        for rank in sorted(running - stays - self._leaving):
            log.warning("ray.scaled", "RayCluster: worker %d is ended: the job is to have fewer", rank)
            self._leaving.add(rank)
            end_actor(self._actors[rank])
        for rank in sorted(order.ranks - running - self._due.keys() - self._done - order.live_ranks):
            log.warning("ray.scaled", "RayCluster: worker %d is started: the job is to have more", rank)
            self._launch(rank)

    def _launch(self, rank: int) -> None:
        # Ray does not repeat a task of an actor that is lost: the new actor first needs the variables of the job.
        options = options_of(self._plan.worker_resources)
        if self._reservation is not None and rank < self._plan.workers:
            options = self._reservation.options(rank)
        actor = ray.remote(WorkerActor).options(**options).remote(rank)
        self._launched(rank, actor)
        self._running[actor.run.remote(self._train_fn, self._arguments, self._environment_of(rank))] = rank

    def _end_hanging(self, ranks: Iterable[int]) -> None:
        """End the actors of workers that the coordinator has lost, as far as they would be started again."""
        for rank in ranks:
            if rank not in self._running.values() or rank in self._ending:
                continue
            if self._restarts.age(rank, time.monotonic()) < times.JOINING_SECONDS:
                continue
            if self._restarts.used + len(self._ending) >= self._restarts.total:
                total = self._restarts.total
                log.warning(
                    "ray.hanging",
                    "RayCluster: worker %d is lost to the coordinator; all %d restarts are used",
                    rank,
                    total,
                )
                continue
            self._ending.add(rank)
            log.warning(
                "ray.hanging",
                "RayCluster: the actor of worker %d lives and is lost to the coordinator; it is killed",
                rank,
            )
            end_actor(self._actors[rank])

    def _on_end(self, call: Any, results: dict[int, Any]) -> None:
        rank = self._running.pop(call)
        self._ending.discard(rank)
        self._order_is_old = True
        if rank in self._leaving:
            self._leaving.discard(rank)
            end_actor(self._actors.pop(rank))
            return
        try:
            results[rank] = ray.get(call)
            self._done.add(rank)
        except RayTaskError as error:
            raised = _of_the_function(error, rank)
            # Servers that are away longer than the worker waits come back, and the worker joins them again.
            if not isinstance(raised, Retryable | Fenced):
                raise raised from error
            if not self._starts_again(rank, f"worker {rank} ended with {type(raised).__name__}: {raised}"):
                raised.add_note(f"all {self._restarts.total} restarts of workers are used")
                raise raised from error
        except RayActorError as error:
            if not self._starts_again(rank, f"worker {rank} was lost ({type(error).__name__})"):
                raise Unavailable(
                    f"worker {rank} was lost, and all {self._restarts.total} restarts of workers are used",
                    actual=str(error),
                    remedy="RayCluster(worker_restarts=…) allows more",
                ) from error


def _of_the_function(error: RayTaskError, rank: int) -> Exception:
    """The exception of the function, with the rank; Ray's own where it could not be sent."""
    cause = error.cause
    found: Exception = cause if isinstance(cause, PsError) else error.as_instanceof_cause()
    found.add_note(f"worker {rank} raised it")
    return found
