"""Owns the time in which a shard decides about no push, so that all shards are captured at one point of the job.

A consistent cut in two phases, after Chandy and Lamport, "Distributed Snapshots", 1985: first every shard pauses and
reports what it has accepted; then each catches up with the furthest, and is captured. A worker's push is in the copy of
every shard or of none.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from ps_protocol.cluster.model_status import ModelPosition
from ps_protocol.errors import ConfigError, InvalidRequest, Unavailable
from ps_protocol.logs import EventLogger
from ps_protocol.times import CALL_SECONDS, QUIESCE_SECONDS
from ps_server.checkpoint.checkpoint import Checkpoint
from ps_server.checkpoint.manifest import read_seal
from ps_server.checkpoint.model_writer import write_part
from ps_server.checkpoint.record import Base, Mark, ShardPart
from ps_server.consistency import TrackerState, WorkerKey
from ps_server.shard import times
from ps_server.shard.placing import restore
from ps_server.shard.registry import Registry
from ps_server.shard.step.model import ShardModel

if TYPE_CHECKING:
    from ps_server.checkpoint.table_copy import TableCapture
    from ps_server.tables.table import ShardTable

logger = EventLogger(__name__)

_IN_TIME = 0.8
"""Of the time that a caller waits: after that it hears what has not come, before it gives up."""


class Quiescence:
    """Called by the service, on the shard's event loop. One quiesce at a time; a new one ends that before it."""

    def __init__(self, shard: int, registry: Registry) -> None:
        self._shard = shard
        self._registry = registry
        self._name = ""
        #: The quiesce at whose point every model is; empty: some may still have to take pushes.
        self._reached = ""
        #: A staged reshard waits for the cluster's decision, without a time limit.
        self._bound = False
        self._timer: asyncio.TimerHandle | None = None
        self._bases = CheckpointBases()

    def pause(self, name: str, seconds: float) -> list[ModelPosition]:
        """Decide about no push of any model until ``resume``, ``seconds`` at most. Returns where the models stand.

        Raises Unavailable while a move of slices has not been decided.
        """
        _check_hold(seconds)
        if self._bound and name != self._name:
            raise Unavailable(
                f"shard {self._shard} waits for the decision on a move of slices",
                shard=str(self._shard),
                remedy="try again",
            )
        if not self._bound:
            self._resume()
            self._hold(name, seconds)
            for model in self._registry.models:
                model.gate.admit({})
        return [_standing(model) for model in self._models()]

    def resume(self, name: str) -> None:
        """Resume, if ``name`` is the quiesce that pauses this shard."""
        if name == self._name:
            self._resume()

    async def catch_up(self, name: str, targets: Sequence[ModelPosition], seconds: float) -> list[ModelPosition]:
        """Catch up with ``targets``, and stay paused there, ``seconds`` at most. Returns where the models stand.

        A model of which nothing is here gets no pushes and is left out. Raises Unavailable when the quiesce is over, or
        what the others have does not come.
        """
        _check_hold(seconds)
        with self._kept(name):
            models = await self._catch_up(name, targets, _IN_TIME * seconds)
        if not self._bound:
            self._hold(name, seconds)
        return [_standing(model) for model in models]

    async def capture(
        self,
        name: str,
        targets: Sequence[ModelPosition],
        folder: Path,
        full_every: int,
        resumed: Callable[[Sequence[ModelPosition]], Awaitable[None]],
    ) -> list[tuple[ShardPart, TrackerState]]:
        """Catch up with ``targets``, copy, resume, and write the copy below ``folder``.

        Of tables only what was touched since the last checkpoint, but all once in ``full_every`` checkpoints.
        ``resumed`` is called in between with where the models stood: another quiesce may begin from then on. Returns
        what was written of each. Raises as ``catch_up``; StorageFull, ConfigError, and what ``resumed`` raises.
        """
        with self._kept(name):
            models = await self._catch_up(name, targets, times.CATCH_UP_SECONDS)
            tables = [table for model in models for table in model.tables]
            bases = await asyncio.to_thread(self._bases.bases, tables, folder, full_every)
            async with AsyncExitStack() as stack:
                standings = [_standing(model) for model in models]
                states = [model.tracker.persisted_state() for model in models]
                saved = [await stack.enter_async_context(model.save()) for model in models]
                copied = [await self._captured(name, model, bases) for model in models]
                layouts = [model.layout for model in models]
                self.resume(name)
                await resumed(standings)
                parts = []
                for layout, state, (published, entries), copies in zip(layouts, states, saved, copied, strict=True):
                    facts, values = {"tracker": state.to_json()}, published.region.bytes
                    part: ShardPart = await asyncio.to_thread(
                        write_part, folder, layout, values, entries, facts, tables=list(copies.values())
                    )
                    parts.append((part, state))
                    for table, copy in copies.items():
                        self._bases.wrote(table, folder, copy)
        return parts

    async def take(
        self, name: str, targets: Sequence[ModelPosition], hold: Callable[[ShardModel], Awaitable[None]]
    ) -> list[ModelPosition]:
        """Catch up with ``targets``, have ``hold`` take what it wants of each model there, and resume.

        Returns where the models stood. Raises as ``catch_up``, and what ``hold`` raises.
        """
        with self._kept(name):
            models = await self._catch_up(name, targets, _IN_TIME * CALL_SECONDS)
            standings = [_standing(model) for model in models]
            for model in models:
                await hold(model)
            self._check(name, self._reached)
            self.resume(name)
        return standings

    async def restore(self, folder: Path, name: str = "") -> list[str]:
        """Put the checkpoint in ``folder`` into the models it holds. Raises ModelMismatch, DamagedData, ConfigError.

        ``name``: the quiesce that pauses this shard; raises Unavailable when it is over. Empty: not told.
        """
        if name:
            # The request may have been held up until the others train on, or have what a repetition brought.
            self._check(name, self._name)
        if self._timer:
            self._timer.cancel()
        try:
            checkpoint = await asyncio.to_thread(Checkpoint.open, folder)
            if name:
                self._check(name, self._name)
            models = [model for model in self._models() if model.name in checkpoint.manifest.models]
            for model in models:
                await restore(checkpoint, model, only_first=False)
        finally:
            if self._name and not self._bound:
                self._hold(self._name, QUIESCE_SECONDS)
        return [model.name for model in models]

    @contextmanager
    def staging(self, name: str) -> Iterator[None]:
        """While a reshard is staged at the quiesce ``name``; from the end of the block on only ``resume`` ends it.

        Raises Unavailable when the shard is not paused there, or has resumed meanwhile.
        """
        with self._kept(name):
            self._check(name, self._reached)
            yield
            self._check(name, self._reached)
            self._bound = True

    def _models(self) -> list[ShardModel]:
        return [model for model in self._registry.models if model.initialised]

    async def _catch_up(self, name: str, targets: Sequence[ModelPosition], seconds: float) -> list[ShardModel]:
        wanted = {target.model: target for target in targets}
        models = [model for model in self._models() if model.name in wanted and model.layout.holds_any]
        for model in models:
            accepted = wanted[model.name].accepted.items()
            await _caught_up(model, {WorkerKey(*worker): sequence for worker, sequence in accepted}, seconds)
            self._check(name, self._name)
        for model in self._registry.models:
            model.gate.pause()
        self._reached = name
        return models

    async def _captured(
        self, name: str, model: ShardModel, bases: Mapping[ShardTable, tuple[Mark, Base]]
    ) -> dict[ShardTable, TableCapture]:
        """The tables of a paused model, copied piece by piece: lookups are served in between.

        Raises Unavailable when it has resumed meanwhile.
        """
        if not model.tables:
            return {}
        from ps_server.checkpoint.table_copy import TableCapture  # Compiled code: not for shards without tables.

        copies = await model.rows.read(lambda tables: {each: TableCapture(each, bases.get(each)) for each in tables})

        def step(_: Sequence[ShardTable]) -> bool:
            return any(copy.step() for copy in copies.values())

        while await model.rows.read(step):
            self._check(name, self._reached)
        self._check(name, self._reached)
        return copies

    def _hold(self, name: str, seconds: float) -> None:
        self._name = name
        self._timer = asyncio.get_running_loop().call_later(seconds, self._expired, name)

    @contextmanager
    def _kept(self, name: str) -> Iterator[None]:
        """No time limit in this block; an error in it ends the quiesce. Raises Unavailable when ``name`` is over."""
        self._check(name, self._name)
        if self._timer:
            self._timer.cancel()
        try:
            yield
        except BaseException:
            self.resume(name)
            raise

    def _check(self, name: str, held: str) -> None:
        if not name or name != held:
            raise Unavailable(
                f"shard {self._shard} has resumed: the quiesce came too late",
                shard=str(self._shard),
                remedy="try again",
            )

    def _expired(self, name: str) -> None:
        if name == self._name:
            logger.warning("move.failed", "shard %d resumes: the quiesce was not completed in time", self._shard)
            self._resume()

    def _resume(self) -> None:
        self._name = self._reached = ""
        self._bound = False
        if self._timer:
            self._timer.cancel()
        for model in self._registry.models:
            model.resume()


def _check_hold(seconds: float) -> None:
    """Raises InvalidRequest for a time out of range, or NaN."""
    if not 0 <= seconds <= times.LONGEST_QUIESCE_SECONDS:
        raise InvalidRequest(
            "a shard does not pause for so long",
            expected=f"0 to {times.LONGEST_QUIESCE_SECONDS:g} seconds",
            actual=f"{seconds} seconds",
        )


async def _caught_up(model: ShardModel, targets: Mapping[WorkerKey, int], seconds: float) -> None:
    """Take the pushes up to ``targets``, from the workers that live, and make their steps.

    Raises Unavailable when one does not come in ``seconds``, or in CATCH_UP_SECONDS where that is less.
    """
    model.gate.admit(targets)
    try:
        async with asyncio.timeout(min(seconds, times.CATCH_UP_SECONDS)):
            await model.gate.until(lambda: not _missing(model, targets))
            await model.gate.until(lambda: model.clipped is None or not model.clipped.is_closed)
    except TimeoutError:
        if not (missing := _missing(model, targets)):
            raise Unavailable(
                f"a step of model '{model.name}' waits on shard {model.layout.shard} for the norm of other shards",
                shard=str(model.layout.shard),
                remedy="try again",
            ) from None
        raise Unavailable(
            f"a push of {missing[0]} that another shard has did not come to shard {model.layout.shard}",
            shard=str(model.layout.shard),
            remedy="try again",
        ) from None
    model.gate.pause()


def _missing(model: ShardModel, targets: Mapping[WorkerKey, int]) -> list[WorkerKey]:
    """Workers whose push up to ``targets`` has not been accepted; not those that are gone, whose push cannot come."""
    known = {standing.worker: standing.last_sequence for standing in model.tracker.clocks()}
    return [worker for worker, sequence in targets.items() if known.get(worker, sequence) < sequence]


def _standing(model: ShardModel) -> ModelPosition:
    tracker = model.tracker
    accepted = {
        (standing.worker.rank, standing.worker.incarnation): standing.last_sequence for standing in tracker.clocks()
    }
    waiting = {(worker.rank, worker.incarnation): sequence for worker, sequence in tracker.rounds.open().items()}
    # A worker that is gone may have sent its last push to some shards only.
    waiting = {worker: waiting[worker] for worker in accepted if worker in waiting}
    return ModelPosition(model.name, accepted, waiting)


_REMEMBERED = 4
"""Checkpoints of a table; those that were not committed count, too."""


@dataclass(frozen=True, slots=True)
class _Written:
    folder: Path
    mark: Mark


class CheckpointBases:
    """Owned by Cuts. A table that came from elsewhere, or from a disk, is not known here: all of it is written next."""

    def __init__(self) -> None:
        self._written: WeakKeyDictionary[ShardTable, list[_Written]] = WeakKeyDictionary()

    def wrote(self, table: ShardTable, folder: Path, copy: TableCapture) -> None:
        """``copy`` was written to ``folder``; whether that becomes a checkpoint, others decide."""
        known = [each for each in self._written.get(table, []) if each.folder != folder]
        self._written[table] = [*known, _Written(folder, copy.mark())][-_REMEMBERED:]

    def bases(self, tables: Iterable[ShardTable], folder: Path, full_every: int) -> dict[ShardTable, tuple[Mark, Base]]:
        """What a checkpoint in ``folder`` may be based on, for those tables that it need not hold whole. Reads files.

        The newest one beside it that is complete, unless ``full_every`` - 1 increments are on top of each other there.
        """
        found = {table: self._base(table, folder, full_every) for table in tables}
        return {table: base for table, base in found.items() if base}

    def _base(self, table: ShardTable, folder: Path, full_every: int) -> tuple[Mark, Base] | None:
        for written in reversed(self._written.get(table, [])):
            if written.folder.parent != folder.parent:
                continue
            try:
                seal = read_seal(written.folder)
            except ConfigError:
                continue
            return (written.mark, Base(written.folder.name, seal)) if written.mark.depth + 1 < full_every else None
        return None
