"""Owns a shard's data on disk: its data directory, log and snapshots; or none of them."""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Self

from ps_protocol.cluster.view import LogCounts
from ps_protocol.errors import PsError
from ps_protocol.logs import EventLogger
from ps_server.cli.options.storage import Durability, StorageConfig
from ps_server.log.durable import DurableLog, Saved
from ps_server.log.entries import MemoryLog, UpdateLog
from ps_server.log.folder import DataFolder, log_room, make_writable
from ps_server.log.recovery import recover
from ps_server.shard import times
from ps_server.shard.durability.snapshotter import SnapshotSource, Snapshotter
from ps_server.shard.execution.executor import ShardExecutor
from ps_server.state.model_state import ModelState
from ps_server.tables.row_memory import RowMemory
from ps_server.tasks import cancelled, seen

logger = EventLogger(__name__)


_MOST_SAMPLES = 1024

_PART = 0.02
"""Of their age: what lies between two samples at least that are kept when there are too many."""


class RecordAges:
    """Owned by ``Storage``, on the shard's event loop. Times are those of one monotonic clock, in seconds."""

    def __init__(self) -> None:
        #: The log's last record at each of ``_times``; both rise.
        self._numbers: list[int] = []
        self._times: list[float] = []

    def sample(self, number: int, now: float) -> None:
        """Record that the log ends with ``number``. A number below the last sample belongs to a new log."""
        if self._numbers and number < self._numbers[-1]:
            self._numbers.clear()
            self._times.clear()
        if self._numbers and number == self._numbers[-1]:
            return
        self._numbers.append(number)
        self._times.append(now)
        if len(self._numbers) > _MOST_SAMPLES:
            self._thin(now)

    def forget(self, through: int) -> None:
        """Drop the samples of records up to ``through``."""
        found = bisect_left(self._numbers, through)
        del self._numbers[:found], self._times[:found]

    def age_seconds(self, number: int, now: float) -> float:
        """The least age of record ``number``; 0 if it came after the last sample."""
        found = bisect_left(self._numbers, number)
        return max(0.0, now - self._times[found]) if found < len(self._times) else 0.0

    def _thin(self, now: float) -> None:
        """Keep fewer of the older samples: an age is then too low by a fraction of itself."""
        kept = [len(self._times) - 1]
        for i in range(kept[0] - 1, 0, -1):
            if self._times[kept[-1]] - self._times[i] >= _PART * (now - self._times[i]):
                kept.append(i)
        kept = [0, *reversed(kept)]
        self._numbers = [self._numbers[i] for i in kept]
        self._times = [self._times[i] for i in kept]


def row_memory(config: StorageConfig, shard: int) -> RowMemory:
    """The limit for rows of tables."""
    return RowMemory(config.table_memory_bytes, shard=shard)


class Storage:
    """Used on the shard's event loop: opened before it serves, closed when no push can come any more."""

    def __init__(self, executor: ShardExecutor, config: StorageConfig, shard: int) -> None:
        self._executor = executor
        self._config = config
        self._folder: DataFolder | None = None
        self._durable: DurableLog | None = None
        self._snapshotter: Snapshotter | None = None
        self._running: asyncio.Task[None] | None = None
        self._ages = RecordAges()
        self._sampling: asyncio.Task[None] | None = None
        #: The last snapshot requested.
        self._keeping: asyncio.Task[None] | None = None
        #: Whether the recovered or followed state must contain every push acknowledged before this process.
        self.promised = False
        #: Models the directory held.
        self.recovered: dict[str, ModelState] = {}
        #: The limit for rows of tables, above which they are on disk.
        self.row_memory = row_memory(config, shard)
        #: How long reading the directory took, at the start.
        self.recovery_seconds = 0.0

    @classmethod
    async def open(cls, shard: int, config: StorageConfig, executor: ShardExecutor) -> Self:
        """Lock the directory and recover its state. Raises ConfigError, DamagedData, StorageFull, OSError."""
        storage = cls(executor, config, shard)
        if config.data_dir is None:
            return storage
        if config.durability is Durability.MEMORY:
            # Nothing is kept, and rows that are not in memory are still to be on this disk.
            folder = storage.row_memory.folder = config.data_dir / f"shard-{shard}"
            make_writable(folder)
            return storage
        with log_room(shard, config.data_dir):
            await storage._open(shard, config.data_dir)
        return storage

    async def _open(self, shard: int, data_dir: Path) -> None:
        config, executor = self._config, self._executor
        goes_on, began = config.durability is Durability.DURABLE, time.monotonic()
        folder = self._folder = DataFolder.open(data_dir, shard)
        rows = self.row_memory
        rows.folder = folder.path
        try:
            # In the executor: replaying uses as many threads of torch as training.
            found = await executor.submit(lambda: recover(folder, log_goes_on=goes_on, row_memory=rows), 1 << 62)
            rule = config.snapshots
            log = self._durable = DurableLog(
                folder,
                found.number,
                found.end,
                sync=config.fsync,
                writing=goes_on,
                bound_bytes=rule.log_bytes if rule.strict else None,
            )
            log.last_writer = found.writer
            log.saved = Saved(found.saved_number, -found.unsaved_bytes, time.monotonic())
            self._sampling = asyncio.create_task(self._sample(log), name="record-ages")
        except BaseException:
            folder.close()
            raise
        self.recovered = found.models
        self.recovery_seconds = time.monotonic() - began
        self.promised = found.promised and goes_on

    @property
    def log(self) -> UpdateLog:
        """The log that updates are written to."""
        return self._durable or MemoryLog()

    @property
    def durable(self) -> DurableLog | None:
        """The log on disk; None without one."""
        return self._durable

    @property
    def snapshotter(self) -> Snapshotter | None:
        """The active snapshotter; None if there is none."""
        return self._snapshotter

    def age_seconds(self, after: int) -> float:
        """How old the oldest record of the log behind record ``after`` is; 0 when there is none.

        Within a quarter of a second. Records recovered at the start count from then.
        """
        log = self._durable
        if log is None or log.number <= after:
            return 0.0
        return self._ages.age_seconds(after + 1, time.monotonic())

    async def _sample(self, log: DurableLog) -> None:
        while True:
            self._ages.sample(log.number, time.monotonic())
            saved = log.saved.number
            self._ages.forget(saved if log.read_from is None else min(saved, log.read_from - 1))
            await asyncio.sleep(times.SAMPLE_SECONDS)

    @property
    def directory(self) -> str:
        """Name of the data directory, empty without one."""
        return self._folder.identity.directory if self._folder else ""

    @property
    def folder(self) -> DataFolder | None:
        """The data directory; None without one."""
        return self._folder

    @property
    def kept(self) -> tuple[DataFolder, DurableLog] | None:
        """The directory and its log, if every update is written to it; else None."""
        if self._folder is None or self._durable is None or self._config.durability is not Durability.DURABLE:
            return None
        return self._folder, self._durable

    @property
    def counts(self) -> LogCounts | None:
        """The log and its snapshots in numbers; None before ``begin`` and where nothing is kept. From any thread."""
        snapshotter = self._snapshotter
        return snapshotter.counts if snapshotter else None

    @property
    def incarnation(self) -> int:
        """The incarnation that wrote the recovered state; 0 if there was none."""
        return self._folder.identity.incarnation if self._folder and self.recovered else 0

    def begin(self, incarnation: int, models: Callable[[], Sequence[SnapshotSource]]) -> bool:
        """From now on ``incarnation`` writes here, and snapshots are taken of ``models()``; False: nothing is kept.

        Raises StorageFull, OSError.
        """
        if self._folder is None or self._durable is None:
            return False
        self._durable.writer = incarnation
        with log_room(self._folder.identity.shard, self._folder.path):
            self._folder.belongs_to(incarnation)
        self.take_snapshots(models)
        return True

    def take_snapshots(self, models: Callable[[], Sequence[SnapshotSource]]) -> None:
        """From now on snapshots are taken of ``models()``."""
        if self._folder is None or self._durable is None:
            return
        goes_on = self._config.durability is Durability.DURABLE
        self._snapshotter = Snapshotter(
            self._folder, self._durable, self._executor, models, self._config.snapshots, log_goes_on=goes_on
        )
        self._running = asyncio.create_task(self._snapshotter.run(), name="snapshots")

    async def keep(self, logs: Callable[[], Awaitable[None]]) -> None:
        """Run work that logs; its records survive the process once this returns. Raises OSError, PsError.

        With durability "snapshot" this takes a snapshot, without which the log is not recovered.
        """
        if self._snapshotter is None or self._config.durability is not Durability.SNAPSHOT:
            await logs()
            return
        # A cancelled caller does not wait for the snapshot: a thread may be writing.
        self._keeping = asyncio.create_task(self._snapshotter.take(logs), name="keep")
        await asyncio.shield(seen(self._keeping))

    async def give_up_snapshots(self) -> None:
        """Stop taking snapshots; an unfinished one leaves no files."""
        if self._snapshotter and self._running:
            self._snapshotter.abandon()
            await asyncio.wait([task for task in (self._running, self._keeping) if task])
            self._running.result()
        self._snapshotter = self._running = None

    async def close(self, *, snapshot: bool = True) -> None:
        """Close the directory, after a last ``snapshot`` if asked, so that the next start replays nothing."""
        if not snapshot:
            await self.give_up_snapshots()
        if self._snapshotter and self._running:
            self._snapshotter.stop()
            await self._running
            try:
                await self._snapshotter.take()
            except (OSError, PsError) as error:
                logger.error("snapshot.failed", "no snapshot at the end, the log has everything: %s", error)
        if self._sampling:
            await cancelled(self._sampling)
        if self._durable:
            await self._executor.submit(self._durable.close, 0)
        if self._folder:
            self._folder.close()
