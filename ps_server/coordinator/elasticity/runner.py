"""Observes the job once a heartbeat, and logs and executes the policy's decisions."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from contextlib import aclosing
from typing import Any

from ps_protocol.cluster.job_state import current_members, state_of
from ps_protocol.cluster.scaling import ENDED
from ps_protocol.cluster.view import ClusterStatus, Role
from ps_protocol.errors import PsError
from ps_protocol.logs import EventLogger
from ps_server.coordinator.driver import Driver
from ps_server.coordinator.elasticity.decisions import AskForWorkers, Decision, JobLook, Relieve
from ps_server.coordinator.elasticity.engines.base import WorkerEngine
from ps_server.coordinator.elasticity.policy import ElasticPolicy, ElasticSettings
from ps_server.coordinator.jobs.move_runner import MoveRunner
from ps_server.coordinator.placement.move_plan import MoveRequest

logger = EventLogger(__name__)


def look_of(status: ClusterStatus) -> JobLook:
    """The current state of the job, without workers and shards that are busy with something other than steps."""
    view = status.view
    workers = [(entry, state_of(entry)) for entry in current_members(status, Role.WORKER)]
    shards = [entry for entry in current_members(status, Role.SHARD) if entry.member.index in view.used_shards]
    working = all(state_of(entry) == "live" for entry in shards) and len(shards) == len(view.used_shards)
    lost = frozenset(
        entry.member.index
        for entry, state in workers
        if state in ("lost", "failed", "stopped") and not entry.gone.endswith(ENDED)
    )
    return JobLook(
        training=view.started and not view.finished and working,
        waiting=not view.started and not view.finished and working and bool(lost),
        speeds={
            entry.member.index: entry.stats.steps_per_second for entry, state in workers if state in ("live", "busy")
        },
        traffic={entry.member.index: entry.stats.bytes_per_second for entry in shards},
        queued_pushes={entry.member.index: entry.stats.queued_pushes for entry in shards},
        queued_bytes={entry.member.index: entry.stats.queued_bytes for entry in shards},
        moving=bool(view.moving),
        lost=lost,
        left=sum(state == "left" for _, state in workers),
        wanted=view.wanted_workers,
    )


class ElasticityRunner:
    """Runs on the coordinator's event loop. Each decision is logged and becomes an event of the job."""

    def __init__(
        self,
        driver: Driver,
        moves: MoveRunner,
        settings: ElasticSettings,
        engine: WorkerEngine | None,
        clock: Callable[[], float],
    ) -> None:
        """``clock``: seconds of a steady clock. ``engine``: is asked for ``settings.workers``."""
        self._driver, self._moves, self._engine = driver, moves, engine
        self._policy = ElasticPolicy(settings)
        self._clock = clock
        #: One move and one request at a time.
        self._work: dict[type[Decision], asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Observe the job until cancelled; this also cancels the current move or request."""
        try:
            while True:
                self.look()
                await asyncio.sleep(self._driver.settings.heartbeat_seconds)
        finally:
            for task in self._work.values():
                task.cancel()

    def look(self) -> None:
        """Observe the job once."""
        for decision in self._policy.decide(look_of(self._driver.status()), self._clock()):
            self._tell(decision.reason, warning=decision.warning)
            match decision:
                case Relieve():
                    self._begin(decision, self._relieve(decision))
                case AskForWorkers():
                    self._begin(decision, self._ask(decision))

    async def settled(self) -> None:
        """Wait for the current move and request."""
        await asyncio.gather(*self._work.values())

    def _begin(self, decision: Decision, work: Coroutine[Any, Any, None]) -> None:
        before = self._work.get(type(decision))
        if before is not None and not before.done():
            work.close()
            self._tell(f"not done, since the one before is under way: {decision.reason}", warning=True)
            return
        self._work[type(decision)] = asyncio.create_task(work, name=type(decision).__name__)

    async def _relieve(self, decision: Relieve) -> None:
        wish = MoveRequest(relieve=decision.shard, to=(decision.to,), part=decision.part)
        moved = 0
        try:
            async with aclosing(self._moves.reshard(wish)) as progress:
                async for each in progress:
                    moved = each.moved_bytes
        except PsError as error:
            self._tell(f"moving from shard {decision.shard} has failed: {error.message}", warning=True)
            return
        if not moved:
            # The part to move can be smaller than every slice of the shard.
            self._tell(f"nothing has moved from shard {decision.shard}: no whole slice or bucket fits", warning=True)
            return
        self._tell(f"{moved / 1e6:.1f} MB have moved from shard {decision.shard} to shard {decision.to}")

    async def _ask(self, decision: AskForWorkers) -> None:
        if self._engine is None:
            return
        try:
            done = await asyncio.to_thread(self._engine.request, decision.wanted, decision.ranks)
        except PsError as error:
            self._tell(f"workers were not asked for: {error}", warning=True)
        except Exception as error:  # from a user's class
            logger.exception("elasticity", "the engine has failed")
            self._tell(f"workers were not asked for: {type(error).__name__}: {error}", warning=True)
        else:
            self._tell(f"workers were asked for: {done}")

    def _tell(self, text: str, *, warning: bool = False) -> None:
        logger.log(logging.WARNING if warning else logging.INFO, "elasticity", "%s", text)
        self._driver.events.add(text, warning=warning, decision=True)
