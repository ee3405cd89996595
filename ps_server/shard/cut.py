"""Owns the moments in which a shard decides about no push: so that all shards can be copied at one point of the job.

A cut in two halves, after Chandy and Lamport, "Distributed Snapshots", 1985: first every shard stops deciding and says
what it has accepted; then each takes what any of them had, and is copied. A worker's push is in the copy of every shard
or of none.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ps_protocol.errors import InvalidRequest, Unavailable
from ps_protocol.v1 import shard_pb2 as pb
from ps_server.checkpoint import Checkpoint, Part
from ps_server.checkpoint.table_part import Base, Mark
from ps_server.checkpoint.writer import write_part
from ps_server.consistency import WorkerKey
from ps_server.shard.marks import Marks
from ps_server.shard.model import ShardModel
from ps_server.shard.registry import Registry
from ps_server.shard.restore import restore

if TYPE_CHECKING:
    from ps_server.checkpoint.table_copy import TableCopy
    from ps_server.tables import Table

logger = logging.getLogger(__name__)

REACH_SECONDS = 30.0
"""How long a cut waits for pushes that another shard has accepted."""


MAX_HOLD_SECONDS = 600.0
"""How long a cut may hold a shard without hearing more of it, at most."""

HOLD_SECONDS = 10.0
"""How long a shard that has restored a checkpoint waits for the others."""


class Cuts:
    """Called by the service, on the shard's event loop. One cut at a time; a new one ends that before it."""

    def __init__(self, shard: int, registry: Registry) -> None:
        self._shard = shard
        self._registry = registry
        self._name = ""
        #: The cut at which every model stands; empty: some may still have to take pushes.
        self._reached = ""
        #: Who holds the cut waits for the cluster's decision, however long that takes.
        self._bound = False
        self._timer: asyncio.TimerHandle | None = None
        self._marks = Marks()

    def freeze(self, name: str, seconds: float) -> list[pb.ModelCut]:
        """Decide about no push of any model until told, ``seconds`` at most. Returns where the models stand.

        Raises Unavailable while it has not been decided how slices lie.
        """
        _check_hold(seconds)
        if self._bound and name != self._name:
            raise Unavailable(
                f"shard {self._shard} waits to hear whether slices have moved",
                shard=str(self._shard),
                remedy="try again",
            )
        if not self._bound:
            self._thaw()
            self._hold(name, seconds)
            for model in self._registry.models:
                model.gate.admit({})
        return [_standing(model) for model in self._models()]

    def thaw(self, name: str) -> None:
        """Go on, if ``name`` is the cut that holds this shard."""
        if name == self._name:
            self._thaw()

    async def reach(self, name: str, targets: Sequence[pb.ModelCut], seconds: float) -> list[pb.ModelCut]:
        """Go as far as ``targets``, and stand still there, ``seconds`` at most. Returns where the models stand.

        A model of which nothing is here gets no pushes and is left out. Raises Unavailable when the cut is over or what
        the others have does not come.
        """
        _check_hold(seconds)
        with self._kept(name):
            models = await self._reach(name, targets)
        if not self._bound:
            self._hold(name, seconds)
        return [_standing(model) for model in models]

    async def cut(
        self, name: str, targets: Sequence[pb.ModelCut], folder: Path, full_every: int = 1
    ) -> tuple[list[pb.ModelCut], list[str]]:
        """Go as far as ``targets``, copy, go on, and write the copy below ``folder``.

        Of tables only what was touched since the last checkpoint, but all once in ``full_every`` checkpoints.
        Returns where the models stood, and what was written of each as JSON. Raises as ``reach``; StorageFull,
        ConfigError.
        """
        with self._kept(name):
            models = await self._reach(name, targets)
            tables = [table for model in models for table in model.tables]
            bases = await asyncio.to_thread(self._marks.bases, tables, folder, full_every)
            async with AsyncExitStack() as stack:
                standings = [_standing(model) for model in models]
                mementos = [model.tracker.memento() for model in models]
                saved = [await stack.enter_async_context(model.save()) for model in models]
                copied = [await self._copied(name, model, bases) for model in models]
                self.thaw(name)
                parts = []
                for model, memento, (published, entries), copies in zip(models, mementos, saved, copied, strict=True):
                    facts, values = {"tracker": memento.to_json()}, published.region.bytes
                    part: Part = await asyncio.to_thread(
                        write_part, folder, model.layout, values, entries, facts, tables=list(copies.values())
                    )
                    parts.append(json.dumps(part.to_json()))
                    for table, copy in copies.items():
                        self._marks.wrote(table, folder, copy)
        return standings, parts

    async def restore(self, folder: Path) -> list[str]:
        """Put the checkpoint in ``folder`` into the models it holds. Raises ModelMismatch, DamagedData, ConfigError."""
        checkpoint = await asyncio.to_thread(Checkpoint.open, folder)
        models = [model for model in self._models() if model.name in checkpoint.manifest.models]
        if self._timer:
            self._timer.cancel()
        try:
            for model in models:
                await restore(checkpoint, model, only_first=False)
        finally:
            if self._name and not self._bound:
                self._hold(self._name, HOLD_SECONDS)
        return [model.name for model in models]

    @contextmanager
    def prepared(self, name: str) -> Iterator[None]:
        """While something is prepared at the cut ``name``; from the end of the block on only ``thaw`` ends it.

        Raises Unavailable when the shard does not stand there, or has gone on meanwhile.
        """
        with self._kept(name):
            self._check(name, self._reached)
            yield
            self._check(name, self._reached)
            self._bound = True

    def _models(self) -> list[ShardModel]:
        return [model for model in self._registry.models if model.initialised]

    async def _reach(self, name: str, targets: Sequence[pb.ModelCut]) -> list[ShardModel]:
        wanted = {target.model: target for target in targets}
        models = [model for model in self._models() if model.name in wanted and model.layout.holds_any]
        for model in models:
            await _reach(model, {_worker(a.worker): a.sequence for a in wanted[model.name].accepted})
            self._check(name, self._name)
        for model in self._registry.models:
            model.gate.hold()
        self._reached = name
        return models

    async def _copied(
        self, name: str, model: ShardModel, bases: Mapping[Table, tuple[Mark, Base]]
    ) -> dict[Table, TableCopy]:
        """The tables of a model that stands still, copied piece by piece: who reads rows gets in between.

        Raises Unavailable when it has not stood still all the time.
        """
        if not model.tables:
            return {}
        from ps_server.checkpoint.table_copy import TableCopy  # Compiled code: not for shards without tables.

        copies = await model.with_tables(lambda tables: {each: TableCopy(each, bases.get(each)) for each in tables})

        def step(_: Sequence[Table]) -> bool:
            return any(copy.step() for copy in copies.values())

        while await model.with_tables(step):
            self._check(name, self._reached)
        self._check(name, self._reached)
        return copies

    def _hold(self, name: str, seconds: float) -> None:
        self._name = name
        self._timer = asyncio.get_running_loop().call_later(seconds, self._expired, name)

    @contextmanager
    def _kept(self, name: str) -> Iterator[None]:
        """No time limit in this block; an error in it ends the cut. Raises Unavailable when ``name`` is over."""
        self._check(name, self._name)
        if self._timer:
            self._timer.cancel()
        try:
            yield
        except BaseException:
            self.thaw(name)
            raise

    def _check(self, name: str, held: str) -> None:
        if not name or name != held:
            raise Unavailable(
                f"shard {self._shard} has gone on: the cut came too late", shard=str(self._shard), remedy="try again"
            )

    def _expired(self, name: str) -> None:
        if name == self._name:
            logger.warning("shard %d goes on: whoever wanted a cut through it has gone", self._shard)
            self._thaw()

    def _thaw(self) -> None:
        self._name = self._reached = ""
        self._bound = False
        if self._timer:
            self._timer.cancel()
        for model in self._registry.models:
            model.thaw()


def _check_hold(seconds: float) -> None:
    """Raises InvalidRequest for a time that no shard holds still. NaN is none either."""
    if not 0 <= seconds <= MAX_HOLD_SECONDS:
        raise InvalidRequest(
            "a shard does not hold still for so long",
            expected=f"0 to {MAX_HOLD_SECONDS:g} seconds",
            actual=f"{seconds} seconds",
        )


async def _reach(model: ShardModel, targets: Mapping[WorkerKey, int]) -> None:
    """Take the pushes up to ``targets``, from the workers that live. Raises Unavailable when one does not come."""
    model.gate.admit(targets)
    try:
        async with asyncio.timeout(REACH_SECONDS):
            while missing := [worker for worker, sequence in targets.items() if not model.has(worker, sequence)]:
                await model.gate.changed()
    except TimeoutError:
        raise Unavailable(
            f"a push of {missing[0]} that another shard has did not come to shard {model.layout.shard}",
            shard=str(model.layout.shard),
            remedy="try again",
        ) from None
    model.gate.hold()


def _standing(model: ShardModel) -> pb.ModelCut:
    tracker = model.tracker
    accepted = [
        pb.WorkerSequence(
            worker=pb.WorkerId(rank=standing.worker.rank, incarnation=standing.worker.incarnation),
            sequence=standing.last_sequence,
        )
        for standing in tracker.clocks()
    ]
    applied = tracker.applied
    return pb.ModelCut(model=model.name, accepted=accepted, phase=applied.phase, clock=applied.clock)


def _worker(worker: pb.WorkerId) -> WorkerKey:
    return WorkerKey(worker.rank, worker.incarnation)
