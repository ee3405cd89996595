"""Decides when the whole job is written to disk, and has it done: a cut through all shards, the manifest last."""

from __future__ import annotations

import asyncio
import json
import logging
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ps_protocol.errors import ConfigError, NotReady, PsError
from ps_protocol.v1 import shard_pb2 as pb
from ps_server.checkpoint import Part, begin, commit, discard, latest, prune
from ps_server.checkpoint_options import CheckpointConfig
from ps_server.coordinator.driver import Driver
from ps_server.coordinator.still import Torn, all_of, check_one_cut, held_still

logger = logging.getLogger(__name__)

_WRITE_SECONDS = 3600.0
_TRIES = 3
_LOOK_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class Made:
    """A checkpoint just written."""

    folder: Path
    size_bytes: int
    seconds: float


class Checkpoints:
    """Used on the coordinator's event loop; one at a time, later callers wait, and so do moves of slices."""

    def __init__(self, driver: Driver, config: CheckpointConfig) -> None:
        self._driver = driver
        self._config = config
        #: Held by whoever has the shards hold still, from before they do until nothing of it is left to do.
        self.busy = asyncio.Lock()
        self._taken_at = time.monotonic()
        self._stopping = asyncio.Event()
        #: One was made after the last worker had left.
        self._final = False

    async def run(self) -> None:
        """Make checkpoints at the interval and when the job is finished, until ``stop``; then a last one.

        What stands in the way of one is said.
        """
        while self._config.directory is not None and not self._stopping.is_set():
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), _LOOK_SECONDS)
            view, interval = self._driver.view, self._config.seconds
            self._final = self._final and view.finished
            due = interval is not None and time.monotonic() - self._taken_at >= interval and not view.finished
            ends = view.finished or self._stopping.is_set()
            if view.models and (due or (ends and not self._final)):
                self._final = view.finished
                await self._try_to_make()

    @property
    def settled(self) -> bool:
        """Whether a job that is finished has its last checkpoint, or is to have none."""
        if self._config.directory is None or not self._driver.view.models:
            return True
        return self._final and not self.busy.locked()

    def stop(self) -> None:
        """``run`` ends soon."""
        self._stopping.set()

    async def _try_to_make(self) -> None:
        try:
            await self.make()
        except NotReady as error:
            logger.info("no checkpoint: %s", error)
        except PsError as error:
            logger.error("no checkpoint: %s", error)

    async def make(self) -> Made:
        """Make one now.

        Raises ConfigError without a directory, NotReady while no model has values or a shard is away, Unavailable when
        a shard was lost on the way, StorageFull; then there is no trace of it, and training goes on.
        """
        directory = self._directory()
        async with self.busy:
            self._taken_at = began = time.monotonic()
            for left in reversed(range(_TRIES)):
                folder = await asyncio.to_thread(begin, directory)
                try:
                    size = await self._write(folder)
                except BaseException as error:
                    with suppress(ConfigError):  # it is complete: only its maker was told to stop
                        await asyncio.to_thread(discard, folder)
                    if left and isinstance(error, Torn):
                        continue
                    raise
                await asyncio.to_thread(prune, directory, self._config.keep)
                made = Made(folder, size, time.monotonic() - began)
                logger.info("checkpoint %s: %.1f MB in %.1f s", made.folder, made.size_bytes / 1e6, made.seconds)
                return made
        raise AssertionError("the last try returns or raises")

    async def restore(self, folder: Path | None) -> tuple[Path, list[str]]:
        """Put ``folder``, else the newest checkpoint, into the running job. Returns it and the models it held.

        Raises ConfigError and ModelMismatch, and then nothing was changed; DamagedData, NotReady, Unavailable and
        StorageFull: then some shards may be restored, so repeat it until it succeeds.
        """
        chosen = folder or await asyncio.to_thread(latest, self._directory())
        if chosen is None:
            raise ConfigError("there is no checkpoint yet", actual=str(self._config.directory), remedy="make one first")
        async with self.busy:
            view = self._driver.view
            async with held_still(self._driver, view.used_shards, uuid.uuid4().hex) as still:
                request = pb.RestoreRequest(folder=str(chosen))
                restored = await all_of(
                    shard.call("Restore", request, _WRITE_SECONDS) for shard in still.shards.values()
                )
                await all_of(shard.call("Thaw", pb.ThawRequest(cut=still.cut)) for shard in still.shards.values())
        logger.info("restored %s into the running job", chosen)
        return chosen, sorted({name for reply in restored for name in reply.models})

    def _directory(self) -> Path:
        if self._config.directory is None:
            raise ConfigError(
                "this job has no place for checkpoints", remedy="start ps-coordinator with --checkpoint-dir DIR"
            )
        return self._config.directory

    async def _write(self, folder: Path) -> int:
        view = self._driver.view
        async with held_still(self._driver, view.used_shards, uuid.uuid4().hex) as still:
            maps = still.complete(self._driver.shard_maps)
            if not maps:
                raise NotReady("no model has values yet", remedy="wait for the first worker to declare one")
            facts, targets = self._driver.facts(), still.targets(maps)
            requests = {
                number: pb.CutRequest(
                    cut=still.cut, folder=str(folder), models=targets[number], full_every=self._config.full_every
                )
                for number in still.shards
            }
            cuts = await all_of(
                shard.call("Cut", requests[number], _WRITE_SECONDS) for number, shard in still.shards.items()
            )
        check_one_cut(reply.models for reply in cuts)
        parts = [Part.from_json(json.loads(text)) for reply in cuts for text in reply.parts]
        manifest = await asyncio.to_thread(commit, folder, list(maps.values()), parts, facts, time.time())
        return sum(file.size_bytes for model in manifest.models.values() for file in model.files)
