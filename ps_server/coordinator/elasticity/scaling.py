"""Scales a job: calls the engine, moves slices onto shards that have started and off shards before they end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress

from ps_protocol.cluster.scaling import ScaleAsk, ScaleOrder, ScaleProgress, named
from ps_protocol.cluster.view import MoveProgress, Role
from ps_protocol.errors import DamagedData, InvalidRequest, NotReady, PsError, Unavailable
from ps_protocol.logs import EventLogger
from ps_protocol.retry import SCALING
from ps_server.coordinator.driver import Driver
from ps_server.coordinator.elasticity.engines.base import SHARDS, WORKERS, ScalingEngine, WorkerEngine
from ps_server.coordinator.jobs.move_runner import MoveRunner
from ps_server.coordinator.membership.scaling import WantedSize, awaited
from ps_server.coordinator.placement.move_plan import MoveRequest, target_of

logger = EventLogger(__name__)


class JobScaling:
    """Runs on the coordinator's event loop. It reads the wanted size from the driver and acts, also after a restart of
    the coordinator. Its reports are logged and become events of the job.
    """

    def __init__(
        self, driver: Driver, moves: MoveRunner, engine: WorkerEngine | None, clock: Callable[[], float]
    ) -> None:
        """``clock``: seconds of a steady clock. ``engine``: starts and ends processes."""
        self._driver, self._moves, self._clock = driver, moves, clock
        self._engine: ScalingEngine | None = engine if isinstance(getattr(engine, "scales", None), frozenset) else None  # type: ignore[assignment]
        self._asking = asyncio.Lock()
        #: The last order that the engine received.
        self._told: ScaleOrder | None = None
        #: The progress of a move for scaling.
        self._progress: MoveProgress | None = None
        #: Whether an added shard may lack its share.
        self._uneven = False
        #: The last failure, and when to retry.
        self._failure = ""
        self._pause_seconds = 0.0
        self._again_at = float("-inf")

    @property
    def order(self) -> ScaleOrder:
        """The processes that should run now."""
        view, wanted = self._driver.view, self._driver.wanted
        shards = None
        if wanted.shards is not None:
            # A shard ends once it is empty.
            shards = wanted.shards | frozenset(view.used_shards)
        return ScaleOrder(
            number=wanted.number,
            ranks=wanted.ranks,
            shards=shards,
            added_shards=wanted.added & (shards or frozenset()),
            live_ranks=frozenset(view.live(Role.WORKER)),
            live_shards=frozenset(view.live(Role.SHARD)),
            finished=view.finished,
            done_ranks=wanted.done - wanted.ending,
        )

    async def scale(self, ask: ScaleAsk) -> AsyncGenerator[ScaleProgress, None]:
        """Set the wanted size; yields what the job waits for, whenever that changes, until it has that size.

        Scaling continues if the caller stops early. Raises InvalidRequest for a number that the job cannot have, or if
        the engine cannot start such processes; NotReady without an engine, or when another call changes the wanted
        size; and the engine's errors.
        """
        async with self._asking:
            engine = self._engine_for(ask)
            by_count = getattr(engine, "by_count", False)
            planned = self._driver.check_scale(ask, by_count=by_count)
            if planned != self._driver.wanted:
                done = await self._send_order(engine, self._order_of(planned))
                self._driver.scale(ask, by_count=by_count)
                self._report(f"the job is scaled: {_asked(ask)}; {done}")
            self._failure, self._again_at = "", float("-inf")
            wanted = self._driver.wanted
        before = ""
        while text := self._awaited():
            if text != before:
                before = text
                yield ScaleProgress(text)
            await self._driver.wait_for_change(1.0)
            self._check_goes_on(ask, wanted)
        yield ScaleProgress(self._reached(), done=True)

    def moved_by_hand(self, request: MoveRequest) -> None:
        """Called before a caller's ``request``. If the job's shards were scaled, the request's shards become the wanted
        ones.

        Otherwise scaling would move the slices back. Raises the errors of ``target_of``.
        """
        if (request.to or request.drain) and self._driver.wanted.shards is not None:
            self._driver.choose_shards(target_of(request, self._driver.view, self._driver.shard_maps).shards)

    async def run(self) -> None:
        """Scale the job until cancelled, or until the coordinator ends."""
        with suppress(Unavailable, DamagedData):
            while True:
                await self.look()
                await self._driver.wait_for_change(1.0)

    async def look(self) -> None:
        """Do what is due now, and return when it is done."""
        wanted, view = self._driver.wanted, self._driver.view
        if not wanted.number or view.finished or self._clock() < self._again_at:
            return
        try:
            await self._send_changes()
            await self._move(wanted)
        except PsError as error:
            self._failed(error)
        except Exception as error:  # from a user's class
            logger.exception("elasticity", "scaling has failed")
            self._failed(error)
        else:
            self._failure, self._pause_seconds = "", 0.0

    async def _send_changes(self) -> None:
        """Send the engine a new order when a shard may end, and after a restart of the coordinator.

        Not when a worker has left after training: its pod has ended, and the engine would end another one.
        """
        engine, order = self._engine, self.order
        if (
            engine is None
            or engine.by_count
            or self._asking.locked()
            or _run(order) == (self._told and _run(self._told))
        ):
            return
        async with self._asking:
            if (order := self.order).number:
                await self._send_order(engine, order)

    async def _send_order(self, engine: ScalingEngine, order: ScaleOrder) -> str:
        done = await asyncio.to_thread(engine.scale, order)
        self._told = order
        return str(done)

    def _order_of(self, planned: WantedSize) -> ScaleOrder:
        """The processes that should run once ``planned`` is wanted."""
        shards = None if planned.shards is None else planned.shards | frozenset(self._driver.view.used_shards)
        return ScaleOrder(
            number=planned.number,
            ranks=planned.ranks,
            shards=shards,
            added_shards=planned.added & (shards or frozenset()),
            done_ranks=planned.done - planned.ending,
        )

    async def _move(self, wanted: WantedSize) -> None:
        """Move slices to wanted shards, once these are live, and off unwanted ones."""
        view = self._driver.view
        if wanted.shards is None or not view.started:
            return
        live, used = frozenset(view.live(Role.SHARD)), frozenset(view.used_shards)
        adding, draining = wanted.shards - used, used - wanted.shards
        if adding - live or not (adding or draining or self._uneven):
            return
        self._uneven = self._uneven or bool(adding)
        parts = [f"slices move to {named('shard', adding)}"] if adding else []
        parts += [f"slices leave {named('shard', draining)}"] if draining else []
        self._report("; ".join(parts) or "slices move until each shard has its share")
        try:
            self._progress = MoveProgress()
            # After a move that failed halfway, every shard with slices gets its share again.
            to = adding or (wanted.shards if self._uneven and not draining else adding)
            request = MoveRequest(to=tuple(sorted(to)), drain=tuple(sorted(draining)))
            async with aclosing(self._moves.reshard(request)) as progress:
                async for self._progress in progress:
                    pass
            moved, self._uneven = self._progress, self._uneven and bool(draining)
        finally:
            self._progress = None
        if moved is not None:
            self._report(f"{moved.moved_bytes / 1e6:.1f} MB have moved in {moved.batches} batches")

    def _engine_for(self, ask: ScaleAsk) -> ScalingEngine:
        """Raises NotReady without an engine, InvalidRequest for one that cannot do it."""
        engine = self._engine
        if engine is None:
            raise NotReady(
                "nobody starts and ends processes of this job",
                expected="a job of ps-run or RayCluster, or a coordinator with --engine that can",
                actual="no such --engine",
                remedy="start or end the processes by hand: a worker with PS_COORDINATOR, a shard with ps-server --add "
                "and psctl move --to, or psctl drain before its end",
            )
        asked = {WORKERS: ask.workers, SHARDS: ask.shards}
        for what, number in asked.items():
            if number is not None and what not in engine.scales:
                raise InvalidRequest(
                    f"{engine.describe()} cannot start and end {what}",
                    expected=" or ".join(sorted(engine.scales)) or "nobody is asked for more or fewer processes",
                    actual=what,
                    remedy="start a shard with ps-server --add, then psctl move --to; psctl drain before one ends"
                    if what == SHARDS
                    else "start and end workers by hand",
                )
        return engine

    def _awaited(self) -> str:
        """Describes what the job waits for; empty once it has the wanted size."""
        text = awaited(self._driver.wanted, self._driver.view)
        if not text and self._progress is None and not self._uneven:
            return ""
        text = text or "slices have to move until each shard has its share"
        if (progress := self._progress) is not None:
            text += f"; {progress.moved_bytes / 1e6:.1f} of {progress.total_bytes / 1e6:.1f} MB have moved"
        return f"{text}; {self._failure}" if self._failure else text

    def _check_goes_on(self, ask: ScaleAsk, before: WantedSize) -> None:
        """Raises NotReady if the job is finished, or another call has replaced the size that ``ask`` set from
        ``before``.
        """
        if self._driver.view.finished:
            raise NotReady("the job finished before it was scaled", remedy="start it again")
        now = self._driver.wanted
        # Fewer ranks are no difference: a worker that leaves after training is no longer wanted.
        begun = (now.ranks or frozenset()) - (before.ranks or frozenset())
        workers = ask.workers is not None and bool(begun or now.ending - before.ending)
        if workers or (ask.shards is not None and now.shards != before.shards):
            view = self._driver.view
            raise NotReady(
                "the job was scaled again meanwhile",
                actual=f"{view.wanted_workers} workers, {view.wanted_shards} shards are wanted now",
                remedy="look at psctl status, then scale again if that is not what you want",
            )

    def _reached(self) -> str:
        view = self._driver.view
        workers, shards = len(view.live(Role.WORKER)), len(view.used_shards)
        return f"the job has {workers} worker{'s' * (workers != 1)} and {shards} shard{'s' * (shards != 1)}"

    def _failed(self, error: Exception) -> None:
        text = error.message if isinstance(error, PsError) else f"{type(error).__name__}: {error}"
        if text != self._failure:
            self._report(f"scaling has failed and is tried again: {text}", warning=True)
        self._failure = text
        self._pause_seconds = SCALING.after(self._pause_seconds)
        self._again_at = self._clock() + self._pause_seconds

    def _report(self, text: str, *, warning: bool = False) -> None:
        logger.log(logging.WARNING if warning else logging.INFO, "elasticity", "%s", text)
        self._driver.events.add(text, warning=warning, decision=True)


def _run(order: ScaleOrder) -> tuple[object, object]:
    """The part of an order whose change is sent to the engine."""
    return order.number, order.shards


def _asked(ask: ScaleAsk) -> str:
    parts = [] if ask.workers is None else [f"{ask.workers} workers"]
    parts += [] if ask.shards is None else [f"{ask.shards} shards"]
    return " and ".join(parts)
