"""Decides when the whole job is written to disk, and has it done: a cut through all shards, the manifest last."""

from __future__ import annotations

import asyncio
import json
import logging
import time
import uuid
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from ps_protocol.channel import CLIENT_OPTIONS
from ps_protocol.client.errors import translate
from ps_protocol.errors import ConfigError, NotReady, PsError, Unavailable
from ps_protocol.model import ShardMap
from ps_protocol.v1 import shard_pb2 as pb
from ps_protocol.v1 import shard_pb2_grpc
from ps_protocol.view import Role
from ps_server.checkpoint import Part, begin, commit, discard, latest, prune
from ps_server.checkpoint_options import CheckpointConfig
from ps_server.coordinator.driver import Driver

logger = logging.getLogger(__name__)

_FREEZE_SECONDS = 10.0
"""How long a shard holds still without hearing more of a cut, and how long it may take to answer."""

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
    """Used on the coordinator's event loop; one at a time, later callers wait."""

    def __init__(self, driver: Driver, config: CheckpointConfig) -> None:
        self._driver = driver
        self._config = config
        self._busy = asyncio.Lock()
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
        async with self._busy:
            self._taken_at = began = time.monotonic()
            for left in reversed(range(_TRIES)):
                folder = await asyncio.to_thread(begin, directory)
                try:
                    size = await self._write(folder)
                except BaseException as error:
                    with suppress(ConfigError):  # it is complete: only its maker was told to stop
                        await asyncio.to_thread(discard, folder)
                    if left and isinstance(error, _Torn):
                        continue
                    raise
                await asyncio.to_thread(prune, directory, self._config.keep)
                made = Made(folder, size, time.monotonic() - began)
                logger.info("checkpoint %s: %.1f MB in %.1f s", made.folder, made.size_bytes / 1e6, made.seconds)
                return made
        raise AssertionError("the last try returns or raises")

    async def restore(self, folder: Path | None) -> tuple[Path, list[str]]:
        """Put ``folder``, else the newest checkpoint, into the running job. Returns it and the models it held.

        Raises ConfigError, ModelMismatch, DamagedData, NotReady, Unavailable. A shard that refuses leaves the others as
        they are only when it is the first: repeat it until it succeeds.
        """
        chosen = folder or await asyncio.to_thread(latest, self._directory())
        if chosen is None:
            raise ConfigError("there is no checkpoint yet", actual=str(self._config.directory), remedy="make one first")
        async with self._busy, self._frozen() as (shards, cut, _):
            restored = [await shard.call("Restore", pb.RestoreRequest(folder=str(chosen))) for shard in shards]
            await _all(shard.call("Thaw", pb.ThawRequest(cut=cut)) for shard in shards)
        logger.info("restored %s into the running job", chosen)
        return chosen, sorted({name for reply in restored for name in reply.models})

    def _directory(self) -> Path:
        if self._config.directory is None:
            raise ConfigError(
                "this job has no place for checkpoints", remedy="start ps-coordinator with --checkpoint-dir DIR"
            )
        return self._config.directory

    async def _write(self, folder: Path) -> int:
        async with self._frozen() as (shards, cut, frozen):
            maps = self._complete_models(frozen)
            request = pb.CutRequest(cut=cut, folder=str(folder), models=_furthest(frozen, maps))
            facts = self._driver.facts()
            cuts = await _all(shard.call("Cut", request, _WRITE_SECONDS) for shard in shards)
        _check_one_cut([reply.models for reply in cuts])
        parts = [Part.from_json(json.loads(text)) for reply in cuts for text in reply.parts]
        manifest = await asyncio.to_thread(commit, folder, list(maps.values()), parts, facts, time.time())
        return sum(file.size_bytes for model in manifest.models.values() for file in model.files)

    def _complete_models(self, frozen: Sequence[pb.FreezeReply]) -> Mapping[str, ShardMap]:
        """The models that have values on every shard. Raises NotReady when there is none."""
        everywhere = set.intersection(*({model.model for model in reply.models} for reply in frozen))
        if not everywhere:
            raise NotReady("no model has values yet", remedy="wait for the first worker to declare one")
        return {name: self._driver.shard_map(name) for name in sorted(everywhere)}

    @asynccontextmanager
    async def _frozen(self) -> AsyncIterator[tuple[list[_Shard], str, list[pb.FreezeReply]]]:
        """All shards, holding still; they go on at the latest when the block ends."""
        view = self._driver.view
        members = view.live(Role.SHARD)
        if missing := [number for number in range(view.expected_shards) if number not in members]:
            raise NotReady("a shard is away", shard=", ".join(map(str, missing)), remedy="start it, then try again")
        cut = uuid.uuid4().hex
        shards = [_Shard(number, member.address) for number, member in sorted(members.items())]
        try:
            request = pb.FreezeRequest(cut=cut, seconds=_FREEZE_SECONDS)
            yield shards, cut, await _all(shard.call("Freeze", request) for shard in shards)
        except BaseException:
            thaws = (shard.call("Thaw", pb.ThawRequest(cut=cut), 1.0) for shard in shards)
            await asyncio.gather(*thaws, return_exceptions=True)
            raise
        finally:
            for shard in shards:
                await shard.close()


class _Torn(Unavailable):
    """The shards were not at one point: a worker or a shard was lost meanwhile."""


class _Shard:
    """Calls to one shard."""

    def __init__(self, number: int, address: str) -> None:
        self._peer = f"shard {number} at {address}"
        self._channel = grpc.aio.insecure_channel(address, CLIENT_OPTIONS)
        self._stub = shard_pb2_grpc.ShardStub(self._channel)  # type: ignore[no-untyped-call]

    async def call(self, method: str, request: Any, seconds: float = _FREEZE_SECONDS) -> Any:
        """Raises the typed error of the shard, Unavailable when it does not answer."""
        try:
            return await getattr(self._stub, method)(request, timeout=seconds)
        except grpc.RpcError as error:
            raise translate(error, self._peer) from error

    async def close(self) -> None:
        await self._channel.close()


async def _all(calls: Iterable[Any]) -> list[Any]:
    """The results of all; the first error once all have ended."""
    results = await asyncio.gather(*calls, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return list(results)


def _furthest(frozen: Sequence[pb.FreezeReply], maps: Mapping[str, ShardMap]) -> list[pb.ModelCut]:
    """What any shard has accepted: to there all are to go."""
    furthest: dict[str, dict[tuple[int, int], int]] = {name: {} for name in maps}
    for model in (model for reply in frozen for model in reply.models if model.model in maps):
        of_model = furthest[model.model]
        for accepted in model.accepted:
            worker = accepted.worker.rank, accepted.worker.incarnation
            of_model[worker] = max(of_model.get(worker, 0), accepted.sequence)
    return [
        pb.ModelCut(
            model=name,
            accepted=[
                pb.WorkerSequence(worker=pb.WorkerId(rank=rank, incarnation=incarnation), sequence=sequence)
                for (rank, incarnation), sequence in of_model.items()
            ],
        )
        for name, of_model in furthest.items()
    ]


def _check_one_cut(cuts: Sequence[Sequence[pb.ModelCut]]) -> None:
    """Raises _Torn when two shards were copied at different points."""
    for models in zip(*(sorted(cut, key=lambda model: model.model) for cut in cuts), strict=True):
        points = {
            (
                model.phase,
                model.clock,
                tuple((a.worker.rank, a.worker.incarnation, a.sequence) for a in model.accepted if a.sequence),
            )
            for model in models
        }
        if len(points) > 1:
            raise _Torn(
                f"the shards were not at one point of model '{models[0].model}'",
                remedy="try again: a worker came, went or was lost meanwhile",
            )
