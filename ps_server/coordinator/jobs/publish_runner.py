"""Publishes versions of weights: the shards of a model take their pieces at one point, then a version is committed."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Collection
from functools import partial
from typing import Any

from ps_protocol.cluster.view import Role
from ps_protocol.cluster.weights import PublishAsk, WeightsVersion
from ps_protocol.errors import NotReady, PsError
from ps_protocol.logs import EventLogger
from ps_protocol.metrics.histogram import Histogram
from ps_server.coordinator.driver import Driver
from ps_server.coordinator.jobs.quiesce import (
    Busy,
    QuiesceLost,
    all_of,
    at_one_point,
    check_same_position,
    connected,
    quiesced,
)
from ps_server.coordinator.publications import PublishPlan
from ps_server.tasks import first_of

logger = EventLogger(__name__)


class PublishRunner:
    """Used on the coordinator's event loop. One version at a time; shards are not paused for longer than a cut takes.

    A version begins as a checkpoint does, with a cut (decision 16). Training goes on as soon as each shard holds its
    part of the published copy-on-write version; what the shards write after that, they write beside it.
    """

    def __init__(self, driver: Driver, busy: Busy) -> None:
        """Of ``busy`` that part is taken in which shards are paused."""
        self._driver = driver
        self._pause = busy.pause
        self._turn = asyncio.Lock()
        #: Kept until they end.
        self._tasks: set[asyncio.Task[Any]] = set()
        #: By name, the incarnations of shards that hold no piece of any version, and nothing of the model.
        self._without: dict[str, set[int]] = {}
        #: Versions that were committed and that were given up, and how long each took, from the ask on.
        self.done = self.failed = 0
        self.times = Histogram()

    async def publish(self, rank: int, incarnation: int, ask: PublishAsk) -> AsyncGenerator[tuple[int, bool], None]:
        """Yield the number of the version, and False, when the shards have taken it and train on; and True when it is
        committed. It is committed also where the caller goes away.

        Raises InvalidRequest, UnknownModel, NotReady while the model has no values or a shard is missing, Unavailable
        if one was lost meanwhile, StorageFull, Fenced. Then there is no such version, and its number goes to the next.
        """
        plan = self._driver.plan_publication(rank, incarnation, ask)
        taken: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        task = asyncio.create_task(self._publish(rank, incarnation, ask, taken), name="publish")
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        await first_of(taken, task)
        if taken.done() and plan.made is None:
            yield taken.result(), False
        yield (await asyncio.shield(task)).number, True

    async def stop(self) -> None:
        """Give up what is under way."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # its caller has it, or has gone

    async def _publish(
        self, rank: int, incarnation: int, ask: PublishAsk, taken: asyncio.Future[int]
    ) -> WeightsVersion:
        began = time.monotonic()
        async with self._turn:
            try:
                version = await at_one_point(partial(self._tried, rank, incarnation, ask, taken))
            except PsError as error:
                self.failed += 1
                logger.warning("weights.failed", "no version of '%s' is published: %s", ask.name, error)
                self._driver.events.add(f"no version of '{ask.name}' is published: {error}", warning=True)
                raise
        self.done += 1
        self.times.observe(time.monotonic() - began)
        logger.info(
            "weights",
            "version %d of '%s': step %d, %.1f MB in %.2f s",
            version.number,
            ask.name,
            version.step,
            version.size_bytes / 1e6,
            time.monotonic() - began,
        )
        return version

    async def _tried(self, rank: int, incarnation: int, ask: PublishAsk, taken: asyncio.Future[int]) -> WeightsVersion:
        driver = self._driver
        # Again: the turn of others is over.
        plan = driver.plan_publication(rank, incarnation, ask)
        if plan.made is not None:
            return plan.made
        async with connected(driver, driver.shard_map(ask.model).holders) as shards:
            async with self._pause, quiesced(shards, uuid.uuid4().hex) as quiesce:
                maps = {ask.model: driver.shard_map(ask.model)}
                _check_shards(ask.model, maps[ask.model].holders, shards)
                if not quiesce.complete(maps):
                    raise NotReady(
                        f"model '{ask.model}' has no values on every shard yet",
                        remedy="publish after its first worker has set its values",
                    )
                targets = quiesce.targets(maps)
                reached = await all_of(
                    shard.take_piece(quiesce.name, targets[number], ask, plan) for number, shard in shards.items()
                )
                check_same_position(reached)
            if not taken.done():
                taken.set_result(plan.number)
            task = asyncio.create_task(self._tell_others(ask, plan, set(shards)), name="keep pieces")
            self._tasks.add(task)
            task.add_done_callback(self._ended)
            pieces = await all_of(shard.finish_piece(ask, plan.number) for shard in shards.values())
            return driver.commit_publication(ask, plan.number, pieces)

    async def _tell_others(self, ask: PublishAsk, plan: PublishPlan, holders: Collection[int]) -> None:
        """Shards that held a part of earlier versions, and hold nothing of the model any more, remove what is not kept.

        One that does not answer is told with the next version.
        """
        live = self._driver.view.live(Role.SHARD)
        without = self._without.setdefault(ask.name, set())
        without.intersection_update(member.incarnation for number, member in live.items() if number not in holders)
        others = [number for number in live if number not in holders and live[number].incarnation not in without]
        async with connected(self._driver, others) as shards:
            told = await asyncio.gather(
                *(shard.keep_pieces(ask, plan) for shard in shards.values()), return_exceptions=True
            )
        for number, result in zip(shards, told, strict=True):
            if result is None and number not in plan.holders:
                without.add(live[number].incarnation)


def _check_shards(model: str, holders: Collection[int], asked: Collection[int]) -> None:
    """Raises QuiesceLost when slices moved before the shards were paused."""
    if sorted(holders) != sorted(asked):
        raise QuiesceLost(f"slices of model '{model}' have moved meanwhile", remedy="try again")
