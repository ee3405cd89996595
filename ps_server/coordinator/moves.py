"""Has slices and buckets moved while the job trains: one batch after another, each at one point of all shards."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Mapping
from contextlib import suppress

from ps_protocol.convert import shard_map_to_pb
from ps_protocol.errors import NotReady, PsError, Unavailable
from ps_protocol.model import ShardMap
from ps_protocol.v1 import shard_pb2 as pb
from ps_protocol.view import MoveProgress, Role
from ps_server.coordinator.bucket_bytes import bucket_bytes
from ps_server.coordinator.driver import Driver
from ps_server.coordinator.move_plan import BATCH_BYTES, Batch, BucketBytes, Goal, Wish, batches, goal_of, plan
from ps_server.coordinator.still import ShardCalls, Stillness, all_of, check_one_cut, held_still

logger = logging.getLogger(__name__)

_HOLD_SECONDS = 60.0
"""How long shards hold still for a batch without hearing more of it, and how long each part of it may take."""

_SWITCH_SECONDS = 10.0
_LOOK_SECONDS = 0.01

BREATH_SECONDS = 0.3
"""How long training gets between two batches, at least; twice as long as it held still, where that was more."""

PATIENCE_SECONDS = 30.0
"""How long one batch is tried again when a shard or a worker was lost meanwhile: about what a restart takes."""

FIRST_PAUSE_SECONDS = 0.2
_LONGEST_PAUSE_SECONDS = 2.0


class Moves:
    """Used on the coordinator's event loop; one at a time, another is refused.

    A batch is a commit in two phases (Gray, "Notes on Data Base Operating Systems", 1978): shards that have answered
    Prepare hold still until a view says how it was decided, and the driver decides by one entry in its journal. So a
    slice or bucket is on the shard that the shard map says, whoever dies when. A batch that was begun is made or
    undone, whoever asked for it has gone; what comes behind it is not begun.
    """

    def __init__(self, driver: Driver, busy: asyncio.Lock) -> None:
        """``busy`` is held for each batch: a checkpoint may come between two, and never into one."""
        self._driver = driver
        self._busy = busy
        self._running = False
        self._stopping = False
        #: The last batch, which may outlive the one who asked for it.
        self._batch: asyncio.Task[float] | None = None

    async def reshard(self, wish: Wish, batch_bytes: int = 0) -> AsyncGenerator[MoveProgress, None]:
        """Fulfil ``wish``; yields progress at the start and after each batch. To be closed where it is left early.

        Raises NotReady while another runs, when a shard is away, or a model has no values yet; what ``goal_of`` raises,
        and Unavailable, StorageFull and what else shards say when a batch cannot be had. What was moved before stays.
        """
        if self._running or (self._batch and not self._batch.done()):
            raise NotReady("slices are being moved already", remedy="wait until that has ended, then move again")
        goal = goal_of(wish, self._driver.view, self._driver.shard_maps)
        self._running = True
        progress = MoveProgress()
        try:
            sizes = await bucket_bytes(self._driver.view, self._driver.shard_maps)
            # Planned again at the end, for models that were declared meanwhile.
            while found := self._plan(goal, sizes, batch_bytes or BATCH_BYTES):
                total = progress.moved_bytes + sum(batch.nbytes for batch in found)
                if not progress.batches:
                    yield MoveProgress(total_bytes=total)
                for batch in found:
                    if progress.batches:
                        await asyncio.sleep(max(BREATH_SECONDS, 2 * progress.pause_seconds))
                    pause = await self._shielded(batch)
                    moved = progress.moved_bytes + batch.nbytes
                    progress = MoveProgress(moved, total, progress.batches + 1, pause)
                    yield progress
            if not goal.model:
                self._driver.use_shards(goal.shards)
            if not progress.batches:
                yield progress
        finally:
            self._running = False

    async def stop(self) -> None:
        """Begin no other batch; returns when the last one has ended."""
        self._stopping = True
        if self._batch:
            await asyncio.wait([self._batch])

    def _plan(self, goal: Goal, sizes: BucketBytes, batch_bytes: int) -> list[Batch]:
        maps = self._driver.shard_maps
        return list(batches(maps, plan(maps, goal, sizes), batch_bytes))

    async def _shielded(self, batch: Batch) -> float:
        """Make ``batch``; when whoever waits for it is cancelled, it goes on."""
        if self._stopping:
            raise Unavailable("the coordinator is stopping", remedy="move again when it is back: it goes on")
        self._batch = asyncio.create_task(self._make(batch), name="move")
        self._batch.add_done_callback(_say_how_it_ended)
        return await asyncio.shield(self._batch)

    async def _make(self, batch: Batch) -> float:
        """Try ``batch`` until it is made; returns how many seconds training held still for it."""
        patient_until = time.monotonic() + PATIENCE_SECONDS
        pause = FIRST_PAUSE_SECONDS
        while True:
            try:
                async with self._busy:
                    return await self._try(batch)
            except (Unavailable, NotReady) as error:
                if time.monotonic() + pause > patient_until or self._stopping:
                    raise
                logger.warning("slices could not be moved yet: %s", error)
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)

    async def _try(self, batch: Batch) -> float:
        driver, cut = self._driver, uuid.uuid4().hex
        names = [shard_map.spec.name for shard_map in batch.maps]
        try:
            revision = driver.begin_move(cut)
            view = driver.view
            # Also those that nothing goes to or comes from: every shard has to know the maps in force.
            numbers = {*view.live(Role.SHARD), *view.used_shards, *batch.receivers}
            began = time.monotonic()
            async with held_still(driver, numbers, cut) as still:
                await self._prepare(still, batch, {name: driver.shard_maps[name] for name in names}, revision)
                prepared = {number: shard.member.incarnation for number, shard in still.shards.items()}
                driver.commit_move(cut, batch.maps, prepared)
                still.decided = True
                await _switched(still, batch)
                return time.monotonic() - began
        except BaseException:
            driver.abort_move(cut)
            raise

    async def _prepare(self, still: Stillness, batch: Batch, maps: Mapping[str, ShardMap], revision: int) -> None:
        """Bring all shards to one point, and have each get what it needs for the next maps."""
        if missing := maps.keys() - still.complete(maps).keys():
            raise NotReady(
                f"model '{min(missing)}' has no values yet", remedy="move when its first worker has given it some"
            )
        targets = still.targets(maps)
        reached = await all_of(
            shard.call(
                "Reach", pb.ReachRequest(cut=still.cut, models=targets[number], seconds=_HOLD_SECONDS), _HOLD_SECONDS
            )
            for number, shard in still.shards.items()
        )
        check_one_cut(_held_of(reply, targets[number]) for number, reply in zip(still.shards, reached, strict=True))
        request = pb.PrepareRequest(
            cut=still.cut,
            membership_revision=revision,
            models=map(shard_map_to_pb, batch.maps),
        )
        await all_of(shard.call("Prepare", request, _HOLD_SECONDS) for shard in still.shards.values())


def _held_of(reply: pb.ReachReply, targets: list[pb.ModelCut]) -> list[pb.ModelCut]:
    """The models of ``reply`` of which that shard holds anything."""
    names = {model.model for model in targets}
    return [model for model in reply.models if model.model in names]


async def _switched(still: Stillness, batch: Batch) -> None:
    """Returns when every shard serves by the maps of ``batch``; one that was lost does so when it is back."""
    with suppress(TimeoutError):
        async with asyncio.timeout(_SWITCH_SECONDS):
            await all_of(_serves(shard, shard_map) for shard in still.shards.values() for shard_map in batch.maps)
            return
    logger.warning("not every shard has shown yet that it serves by the new shard map")


async def _serves(shard: ShardCalls, shard_map: ShardMap) -> None:
    request = pb.GetModelRequest(model=shard_map.spec.name)
    while True:
        with suppress(PsError):
            if (await shard.call("GetModel", request)).shard_map.epoch >= shard_map.epoch:
                return
        await asyncio.sleep(_LOOK_SECONDS)


def _say_how_it_ended(batch: asyncio.Task[float]) -> None:
    """Also where nobody waits for it any more."""
    if batch.cancelled():
        logger.warning("a move of slices was cut short")
    elif error := batch.exception():
        logger.warning("a move of slices was given up: %s", error)
