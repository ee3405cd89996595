"""Moves slices and buckets while the job trains: one batch after another, each at one point of all shards."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import Counter
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import suppress

from ps_protocol import retry
from ps_protocol import times as shared
from ps_protocol.cluster.model_status import ModelPosition
from ps_protocol.cluster.view import ClusterView, Member, MoveProgress, Role
from ps_protocol.errors import ModelMoved, ModelReleased, NotReady, PsError, Retryable, StorageFull, Unavailable
from ps_protocol.logs import EventLogger
from ps_protocol.metrics.histogram import Histogram
from ps_protocol.model.spec import ShardMap
from ps_protocol.rpc.channel import OpenChannel, open_async_channel
from ps_server.coordinator import times
from ps_server.coordinator.driver import Driver
from ps_server.coordinator.jobs.quiesce import (
    Busy,
    Quiesce,
    ShardControl,
    all_of,
    check_same_position,
    connected,
    quiesced,
)
from ps_server.coordinator.placement.move_plan import (
    BucketBytes,
    MoveBatch,
    MoveRequest,
    MoveTarget,
    batches,
    plan,
    target_of,
)

logger = EventLogger(__name__)

FIRST_BYTES = 8 << 20
LEAST_BYTES = 2 << 20
MOST_BYTES = 64 << 20


BREATH_PAUSES = 5
"""Training goes on so many pauses of the last batch more. Together a worker keeps about four fifths of its steps."""


_SAME = 0.8
"""A pause that is above this part of that of a batch four times as large does not depend on the size."""


class MovePace:
    """Chooses the batch sizes of one move from the pause of each batch. A given size does not change."""

    def __init__(self, batch_bytes: int = 0) -> None:
        """``batch_bytes``: the size of every batch; 0: as large as the pauses allow."""
        self._given = bool(batch_bytes)
        self.batch_bytes = batch_bytes or FIRST_BYTES
        #: Pause and size of the first batch in the current run of batches that were too long.
        self._too_long: tuple[float, int] | None = None
        self._pause = 0.0

    def paused(self, seconds: float) -> None:
        """Note that a batch of ``batch_bytes`` has paused training for ``seconds``."""
        self._pause = seconds
        if self._given:
            return
        if seconds <= times.PAUSE_SECONDS:
            self._too_long = None
            if seconds < times.PAUSE_SECONDS / 2:
                self.batch_bytes = min(2 * self.batch_bytes, MOST_BYTES)
            return
        first, size_bytes = self._too_long = self._too_long or (seconds, self.batch_bytes)
        if 4 * self.batch_bytes <= size_bytes and seconds > _SAME * first:
            # Much smaller batches do not pause for less. If each takes a whole snapshot, few large ones are best. A
            # pause of a second is noticeable, whatever the batch: the fewer, the better.
            self._given, self.batch_bytes = True, size_bytes if seconds < 1.0 else MOST_BYTES
        else:
            self.batch_bytes = max(self.batch_bytes // 2, LEAST_BYTES)

    @property
    def breath_seconds(self) -> float:
        """How long to wait before the next batch."""
        return times.BREATH_SECONDS + min(BREATH_PAUSES * self._pause, max(5.0, 2 * self._pause))


#: By names of model and table.
TableKey = tuple[str, str]


async def bucket_bytes(
    view: ClusterView, maps: Mapping[str, ShardMap], open_channel: OpenChannel = open_async_channel
) -> dict[TableKey, int]:
    """About how many bytes one bucket of each table takes; ids are distributed evenly over a table's buckets.

    Runs on the coordinator's loop. Omits shards that do not answer in time, and tables whose size no shard reports.
    """
    with_tables = {name: shard_map for name, shard_map in maps.items() if shard_map.tables}
    members = view.live(Role.SHARD)
    holders = {number for shard_map in with_tables.values() for number in shard_map.holders}
    numbers = sorted(holders & members.keys())
    told = await asyncio.gather(*(_table_bytes(members[number], with_tables, open_channel) for number in numbers))
    nbytes: Counter[TableKey] = Counter()
    buckets: Counter[TableKey] = Counter()
    for number, sizes in zip(numbers, told, strict=True):
        for model, shard_map in with_tables.items():
            for table, owners in zip(shard_map.spec.tables, shard_map.tables, strict=True):
                if (key := (model, table.name)) in sizes:
                    nbytes[key] += sizes[key]
                    buckets[key] += owners.count(number)
    return {key: nbytes[key] // count for key, count in buckets.items() if count}


async def _table_bytes(member: Member, maps: Mapping[str, ShardMap], open_channel: OpenChannel) -> dict[TableKey, int]:
    """The sizes that one shard reports for its tables."""
    sizes: dict[TableKey, int] = {}
    shard = ShardControl(member, open_channel=open_channel)
    try:
        with suppress(PsError):
            for model in [name for name, shard_map in maps.items() if member.index in shard_map.holders]:
                status = await shard.model_status(model, shared.BRIEF_CALL_SECONDS)
                sizes |= {(model, table.name): table.size_bytes for table in status.tables}
    finally:
        await shard.close()
    return sizes


class MoveRunner:
    """Used on the coordinator's event loop. One move at a time: others are refused.

    A batch is a two-phase commit (Gray, "Notes on Data Base Operating Systems", 1978): shards that have answered
    Prepare stay paused until a view contains the decision, which the driver makes by one entry in its journal. A slice
    or bucket is therefore always on the shard that the shard map names, also after a failure. A batch that has begun is
    committed or aborted even if its caller is gone; later batches do not begin.
    """

    def __init__(self, driver: Driver, busy: Busy) -> None:
        """``busy`` is locked for each batch: a checkpoint may run between two batches, never during one."""
        self._driver = driver
        self._busy = busy
        self._running = False
        self._stopping = False
        #: The last batch, which may outlive the call that began it.
        self._batch: asyncio.Task[float] | None = None
        #: The number of batches moved and aborted, and the pause of training for each.
        self.done = self.failed = 0
        self.pauses = Histogram()

    async def reshard(self, request: MoveRequest, batch_bytes: int = 0) -> AsyncGenerator[MoveProgress, None]:
        """Fulfil ``request``; yields progress at the start and after each batch. Close the generator when leaving it
        early.

        Skips models that are released meanwhile. Raises NotReady while another move runs, if a shard is missing or a
        model has no values yet; the errors of ``target_of``; and Unavailable, StorageFull and other errors of the
        shards if a batch fails. Earlier batches remain in force.
        """
        if self._running or (self._batch and not self._batch.done()):
            raise NotReady("slices are being moved already", remedy="wait until that has ended, then move again")
        target = target_of(request, self._driver.view, self._driver.shard_maps)
        epoch = self._driver.shard_maps[target.model].epoch if target.model else 0
        self._running = True
        progress, pace = MoveProgress(), MovePace(batch_bytes)
        try:
            sizes = await bucket_bytes(self._driver.view, self._driver.shard_maps, self._driver.open_shard)
            # Planned again when the size of batches changes, and at the end, for models that were declared meanwhile.
            while found := self._plan(target, epoch, sizes, planned_bytes := pace.batch_bytes):
                total = progress.moved_bytes + sum(batch.nbytes for batch in found)
                if not progress.batches:
                    yield MoveProgress(total_bytes=total)
                for batch in found:
                    if progress.batches:
                        await asyncio.sleep(pace.breath_seconds)
                    try:
                        pause = await self._shielded(batch)
                    except ModelReleased:
                        if target.model:
                            raise
                        break  # planned again without it
                    pace.paused(pause)
                    moved = progress.moved_bytes + batch.nbytes
                    progress = MoveProgress(moved, total, progress.batches + 1, pause)
                    yield progress
                    if pace.batch_bytes != planned_bytes:
                        break
            if not target.model:
                self._driver.use_shards(target.shards)
            if not progress.batches:
                yield progress
        finally:
            self._running = False

    async def stop(self) -> None:
        """Begin no other batch; returns when the last one has ended."""
        self._stopping = True
        if self._batch:
            await asyncio.wait([self._batch])

    def _plan(self, target: MoveTarget, epoch: int, sizes: BucketBytes, batch_bytes: int) -> list[MoveBatch]:
        """The remaining batches. ``epoch``: that of the model which ``target`` names, at the time of the request."""
        maps = self._driver.shard_maps
        if target.model and self._driver.view.was_released(target.model, epoch):
            raise _released(target.model)
        return list(batches(maps, plan(maps, target, sizes), batch_bytes))

    async def _shielded(self, batch: MoveBatch) -> float:
        """Make ``batch``, even if the caller is cancelled."""
        if self._stopping:
            raise Unavailable("the coordinator is stopping", remedy="move again when it is back")
        self._batch = asyncio.create_task(self._make(batch), name="move")
        self._batch.add_done_callback(_log_end)
        self._batch.add_done_callback(self._count)
        return await asyncio.shield(self._batch)

    def _count(self, batch: asyncio.Task[float]) -> None:
        if batch.cancelled() or batch.exception():
            self.failed += 1
        else:
            self.done += 1
            self.pauses.observe(batch.result())

    async def _make(self, batch: MoveBatch) -> float:
        """Try ``batch`` until it is committed; returns the seconds for which training was paused."""
        attempts = retry.Attempts(retry.MOVE)
        while True:
            try:
                async with self._busy:
                    return await self._try(batch)
            except Retryable as error:
                pause = attempts.pause_after(error)
                if isinstance(error, StorageFull) or pause is None or self._stopping:
                    raise
                logger.warning("move.failed", "slices could not be moved yet: %s", error)
            await asyncio.sleep(pause)

    async def _try(self, batch: MoveBatch) -> float:
        # Include shards that neither send nor receive: every shard needs the maps in force.
        numbers = {*self._driver.view.live(Role.SHARD), *self._driver.view.used_shards, *batch.receivers}
        async with connected(self._driver, numbers) as shards:
            await self._make_room(shards, batch)
            return await self._commit(shards, batch)

    async def _make_room(self, shards: Mapping[int, ShardControl], batch: MoveBatch) -> None:
        """Have ``shards`` prepare memory and connections for incoming slices while training continues.

        Failures are only logged: if they persist, the batch itself raises them.
        """
        calls = (shard.make_room(batch.maps, shared.MOVE_SECONDS) for shard in shards.values())
        for failure in await asyncio.gather(*calls, return_exceptions=True):
            if isinstance(failure, BaseException) and not isinstance(failure, PsError):
                raise failure
            if failure is not None:
                logger.info("move.failed", "room for slices could not be made ahead of a move: %s", failure)

    async def _commit(self, shards: Mapping[int, ShardControl], batch: MoveBatch) -> float:
        """Commit ``batch``; returns the seconds for which training was paused."""
        driver, move = self._driver, uuid.uuid4().hex
        names = [shard_map.spec.name for shard_map in batch.maps]
        for following in batch.maps:
            name, known = following.spec.name, driver.shard_maps.get(following.spec.name)
            if name in driver.view.released_models and (known is None or known.epoch + 1 != following.epoch):
                raise _released(name)
        if driver.view.live(Role.SHARD).keys() - shards.keys():
            raise Unavailable("a shard came while a move began", remedy="try again")
        try:
            revision = driver.begin_move(move)
            began = time.monotonic()
            async with quiesced(shards, move) as quiesce:
                await self._prepare(quiesce, batch, {name: driver.shard_maps[name] for name in names}, revision)
                prepared = {number: shard.member.incarnation for number, shard in quiesce.shards.items()}
                driver.commit_move(move, batch.maps, prepared)
                quiesce.decided = True
                await _switched(quiesce, batch)
                return time.monotonic() - began
        except BaseException:
            driver.abort_move(move)
            raise

    async def _prepare(self, quiesce: Quiesce, batch: MoveBatch, maps: Mapping[str, ShardMap], revision: int) -> None:
        """Bring all shards to one position; each then fetches what it needs for the next maps."""
        if missing := maps.keys() - quiesce.complete(maps).keys():
            raise NotReady(
                f"model '{min(missing)}' has no values yet", remedy="move after its first worker has set its values"
            )
        targets = quiesce.targets(maps)
        reached = await all_of(
            shard.catch_up(quiesce.name, targets[number], shared.MOVE_SECONDS)
            for number, shard in quiesce.shards.items()
        )
        replies = zip(quiesce.shards, reached, strict=True)
        check_same_position(_reached_of(reply, targets[number]) for number, reply in replies)
        await all_of(
            shard.prepare(quiesce.name, revision, batch.maps, shared.MOVE_SECONDS) for shard in quiesce.shards.values()
        )


def _released(name: str) -> ModelReleased:
    return ModelReleased(f"model '{name}' was released meanwhile", remedy="move again")


def _reached_of(reached: Sequence[ModelPosition], targets: Sequence[ModelPosition]) -> list[ModelPosition]:
    """The entries of ``reached`` that are among the ``targets`` of their shard."""
    names = {model.model for model in targets}
    return [model for model in reached if model.model in names]


async def _switched(quiesce: Quiesce, batch: MoveBatch) -> None:
    """Wait until every shard uses the maps of ``batch``; a lost shard uses them when it returns."""
    with suppress(TimeoutError):
        async with asyncio.timeout(shared.QUIESCE_SECONDS):
            await all_of(_serves(shard, shard_map) for shard in quiesce.shards.values() for shard_map in batch.maps)
            return
    logger.warning("move.failed", "not every shard has confirmed the new shard map yet")


async def _serves(shard: ShardControl, shard_map: ShardMap) -> None:
    while True:
        try:
            if (await shard.model_status(shard_map.spec.name, epoch=shard_map.epoch)).epoch >= shard_map.epoch:
                return
        except ModelMoved:
            return
        except PsError as error:
            logger.debug("%s has not confirmed the new shard map yet: %s", shard.member, error)
        await asyncio.sleep(0.01)


def _log_end(batch: asyncio.Task[float]) -> None:
    """Log the end of a batch that no caller waits for."""
    if batch.cancelled():
        logger.warning("move.failed", "a move of slices was cancelled")
    elif error := batch.exception():
        logger.warning("move.failed", "a move of slices was given up: %s", error)
