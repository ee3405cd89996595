"""Decides when a checkpoint of the whole job is made, and makes it: all shards paused, the manifest written last."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ps_protocol.errors import ConfigError, NotReady, PsError, Unavailable
from ps_protocol.logs import EventLogger
from ps_protocol.metrics.histogram import Histogram
from ps_protocol.model.spec import ShardMap
from ps_protocol.times import CALL_SECONDS
from ps_server.checkpoint.commit import commit
from ps_server.checkpoint.directory import KeptMark, begin, committed, discard, latest, of_step, protect, prune
from ps_server.checkpoint.manifest import read_manifest
from ps_server.cli.options.checkpoint import CheckpointConfig
from ps_server.coordinator import times
from ps_server.coordinator.divergence import Protection
from ps_server.coordinator.driver import Driver
from ps_server.coordinator.jobs.quiesce import Busy, all_of, at_one_point, check_same_position, connected, quiesced
from ps_server.tasks import first_of

logger = EventLogger(__name__)


@dataclass(frozen=True, slots=True)
class CheckpointMade:
    """A checkpoint just written."""

    folder: Path
    size_bytes: int
    seconds: float
    #: The highest version of its models.
    step: int = 0
    #: All checkpoints now in its directory, itself included: older ones were removed.
    there: tuple[Path, ...] = ()


class Checkpoints:
    """Used on the coordinator's event loop. One checkpoint at a time: later callers and moves of slices wait."""

    def __init__(
        self,
        driver: Driver,
        config: CheckpointConfig,
        on_made: Callable[[CheckpointMade], None] | None = None,
        on_kept: Callable[[str, str], None] | None = None,
    ) -> None:
        """``on_made`` is called with each checkpoint that was written, ``on_kept`` with the folder of one that is kept
        beside the newest ones, and why.
        """
        self._driver = driver
        self._config = config
        self._on_made = on_made
        self._on_kept = on_kept
        #: Held while shards are paused, for a checkpoint, a restore or a batch of a move.
        self.busy = Busy()
        self._taken_at = time.monotonic()
        self._stopping = asyncio.Event()
        #: Whether one was made after the last worker had left, or was given up.
        self._final = False
        #: The deadline for retrying that one; None before its first attempt.
        self._last_until: float | None = None
        #: Why the checkpoint at the end of the job, or of this process, was not written; None: it was, or is not due.
        self.unsaved: PsError | None = None
        #: Whether the last attempt found no values to write.
        self._nothing = False
        #: The number of checkpoints made and failed, and the duration of each.
        self.done = self.failed = 0
        self.times = Histogram()
        self._complete_at: float | None = None
        #: The growths for which no checkpoint could be kept, so that each is logged once.
        self._not_kept: set[Protection] = set()

    async def run(self) -> None:
        """Make checkpoints at the interval and when the job is finished, until ``stop``; then a last one.

        Failures are logged. The one at the end of the job is retried for 30 s while a shard is missing, and at
        ``stop``.
        """
        stopping = self._config.directory is None
        while not stopping:
            await first_of(self._stopping.wait(), seconds=times.LOOK_SECONDS)
            # If stopped during a regular attempt, make a last one afterwards.
            stopping = self._stopping.is_set()
            if self._driver.divergence.unprotected:
                async with self.busy:
                    await self._protect()
            view, interval = self._driver.view, self._config.seconds
            self._final = self._final and view.finished
            self._last_until = self._last_until if view.finished else None
            due = interval is not None and time.monotonic() - self._taken_at >= interval and not view.finished
            last = (view.finished and not self._final) or (stopping and (not self._final or self.unsaved is not None))
            if view.models and (due or last):
                error = await self._try_to_make()
                self.unsaved = error if last else None
                self._final = view.finished and not self._comes_back(error)

    async def _protect(self) -> None:
        """Keep the newest checkpoint from before each growth that has begun. A failure is logged, and tried again."""
        directory, divergence = self._directory(), self._driver.divergence
        for growth in divergence.unprotected:
            mark = KeptMark(f"{growth.text} grew far above its history", growth.role.value)
            try:
                kept = await asyncio.to_thread(protect, directory, growth.since_seconds, mark)
                step = (await asyncio.to_thread(read_manifest, kept)).step if kept is not None else 0
            except PsError as error:
                if growth not in self._not_kept:
                    logger.warning("checkpoint.failed", "no checkpoint from before the growth is kept: %s", error)
                self._not_kept.add(growth)
                continue
            divergence.protected(growth, str(kept or ""), step)
            if kept is None:
                logger.warning("checkpoint", "there is no checkpoint to keep from before %s grew", growth.text)
                continue
            logger.warning(
                "checkpoint", "checkpoint %s is kept: %s; psctl restore step=%d goes back to it", kept, mark.why, step
            )
            self._driver.events.add(f"{kept.name} of step {step} is kept: {mark.why}")
            if self._on_kept:
                self._on_kept(str(kept), mark.why)
        self._not_kept.intersection_update(divergence.unprotected)

    def _comes_back(self, error: PsError | None) -> bool:
        """Whether ``error``, of a job's last checkpoint, is about a shard that may return in time."""
        if self._last_until is None:
            self._last_until = time.monotonic() + times.LAST_CHECKPOINT_SECONDS
        return isinstance(error, Unavailable | NotReady) and time.monotonic() < self._last_until

    @property
    def settled(self) -> bool:
        """Whether a finished job has its last checkpoint, or will have none."""
        if self._config.directory is None or not self._driver.view.models:
            return True
        return self._final and not self.busy.locked()

    @property
    def age_seconds(self) -> float | None:
        """The time since the last complete checkpoint began; None before the first of this process."""
        return None if self._complete_at is None else time.monotonic() - self._complete_at

    def stop(self) -> None:
        """Make ``run`` end soon."""
        self._stopping.set()

    async def _try_to_make(self) -> PsError | None:
        """Make a checkpoint; returns why it failed, if there were values to write."""
        try:
            await self.make()
        except NotReady as error:
            logger.info("checkpoint.failed", "no checkpoint: %s", error)
            return None if self._nothing else error
        except PsError as error:
            logger.error("checkpoint.failed", "no checkpoint: %s", error)
            self._driver.events.add(f"no checkpoint: {error}", warning=True)
            return error
        return None

    async def make(self) -> CheckpointMade:
        """Make one now.

        Raises ConfigError without a directory, NotReady while no model has values or a shard is missing, Unavailable if
        a shard was lost meanwhile, StorageFull. After an error no part of it is left on disk, and training continues.
        """
        directory = self._directory()
        async with self.busy.job:
            self._taken_at = began = time.monotonic()
            try:
                folder, size, step = await at_one_point(partial(self._tried, directory))
            except BaseException:
                self.failed += 1
                raise
            self._complete_at, self.unsaved = began, None
            self.done += 1
            # The checkpoint is complete, even if removing older ones fails.
            await self._protect()
            await asyncio.to_thread(prune, directory, self._config.keep, self._config.restored)
            there = await asyncio.to_thread(committed, directory)
            made = CheckpointMade(folder, size, time.monotonic() - began, step, tuple(there))
            self.times.observe(made.seconds)
            logger.info(
                "checkpoint", "checkpoint %s: %.1f MB in %.1f s", made.folder, made.size_bytes / 1e6, made.seconds
            )
            self._driver.events.add(f"checkpoint: {made.size_bytes / 1e6:.1f} MB in {made.seconds:.1f} s")
            if self._on_made:
                self._on_made(made)
            return made

    async def _tried(self, directory: Path) -> tuple[Path, int, int]:
        """Write a checkpoint; returns its folder, bytes and step."""
        folder = await asyncio.to_thread(begin, directory)
        try:
            return folder, *await self._write(folder)
        except BaseException:
            with suppress(ConfigError):  # the checkpoint is complete: only its caller was cancelled
                await asyncio.to_thread(discard, folder)
            raise

    async def restore(self, folder: Path | None, step: int | None = None) -> tuple[Path, list[str]]:
        """Restore ``folder``, else the checkpoint of ``step``, else the newest one, into the running job. Returns the
        folder and its models.

        Raises ConfigError or ModelMismatch if nothing was changed. After DamagedData, NotReady, Unavailable or
        StorageFull some shards may be restored: repeat the call until it succeeds.
        """
        if folder is None and step is not None:
            folder = await asyncio.to_thread(of_step, self._directory(), step)
        chosen = folder or await asyncio.to_thread(latest, self._directory())
        if chosen is None:
            raise ConfigError("there is no checkpoint yet", actual=str(self._config.directory), remedy="make one first")
        async with self.busy:
            view = self._driver.view
            async with (
                connected(self._driver, view.used_shards) as shards,
                quiesced(shards, uuid.uuid4().hex) as quiesce,
            ):
                restored = await all_of(shard.restore(quiesce.name, chosen) for shard in quiesce.shards.values())
                _check_whole(dict(zip(quiesce.shards, restored, strict=True)), self._driver.shard_maps)
                await all_of(shard.resume(quiesce.name, CALL_SECONDS) for shard in quiesce.shards.values())
        self._driver.divergence.restart(self._driver.view.consistency.mode)
        logger.info("checkpoint", "restored %s into the running job", chosen)
        self._driver.events.add(f"restored {chosen} into the running job")
        return chosen, sorted({name for names in restored for name in names})

    def _directory(self) -> Path:
        if self._config.directory is None:
            raise ConfigError(
                "this job has no place for checkpoints", remedy="start ps-coordinator with --checkpoint-dir DIR"
            )
        return self._config.directory

    async def _write(self, folder: Path) -> tuple[int, int]:
        """Write a checkpoint; returns its bytes and its step."""
        view, self._nothing = self._driver.view, False
        async with connected(self._driver, view.used_shards) as shards:
            await self.busy.pause.acquire()
            with ExitStack() as paused:
                paused.callback(self.busy.pause.release)
                waiting = set(shards)

                def resumed(number: int) -> None:
                    waiting.discard(number)
                    if not waiting:
                        paused.close()

                async with quiesced(shards, uuid.uuid4().hex) as quiesce:
                    maps = quiesce.complete(self._driver.shard_maps)
                    if not maps:
                        self._nothing = True
                        raise NotReady("no model has values yet", remedy="wait for the first worker to declare one")
                    facts, targets = self._driver.facts(), quiesce.targets(maps)
                    written = await all_of(
                        shard.write(
                            quiesce.name, targets[number], folder, self._config.full_every, partial(resumed, number)
                        )
                        for number, shard in quiesce.shards.items()
                    )
        check_same_position(positions for positions, _ in written)
        parts = [part for _, parts in written for part in parts]
        manifest = await asyncio.to_thread(commit, folder, list(maps.values()), parts, facts, time.time())
        return manifest.size_bytes, manifest.step


def _check_whole(taken: Mapping[int, Collection[str]], shard_maps: Mapping[str, ShardMap]) -> None:
    """Raises NotReady if only some shards of a model have restored it. ``taken``: by shard, the restored models."""
    for name in sorted({name for names in taken.values() for name in names} & shard_maps.keys()):
        if lacking := [number for number in shard_maps[name].holders if name not in taken.get(number, ())]:
            raise NotReady(
                f"model '{name}' does not have its first values on every shard yet",
                shard=", ".join(map(str, lacking)),
                remedy="repeat it: the other shards have taken the checkpoint",
            )
