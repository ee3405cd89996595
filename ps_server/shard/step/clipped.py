"""Steps of a model whose gradients are clipped by their norm, and rounds of one that is on several shards.

Entered for models with ``clip_grad_norm`` only. A round whose time has come is closed: its pushes are settled, and
later ones are late. Its step is combined, the shards ask each other for their parts of the squared norm, and it is
taken when all parts are there; then each shard scales its part alike. Until then nothing has changed, so a shard that
is killed meanwhile forgets the round, gets its pushes again, and asks again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from ps_protocol.errors import PsError
from ps_protocol.model.layout import Layout
from ps_server import tables as row_tables
from ps_server.consistency import Position, PushInfo, Round, Tracker, WorkerKey
from ps_server.failpoints import Failpoints
from ps_server.optimizers.gradients import clip_factor, scale_gradients, squared_norm, total
from ps_server.shard import times
from ps_server.shard.execution.executor import ShardExecutor
from ps_server.shard.step.applier import Applier, Combined, combined
from ps_server.shard.step.push import IncomingPush
from ps_server.state.region import RegionPool
from ps_server.state.replica import Step
from ps_server.tasks import Conditions

AskNorm = Callable[[int, str, int, Position], Awaitable[float]]
"""The part of another shard: its number, model, epoch, position. Returns when that is known, however long it takes."""


class ClippedSteps:
    """What an Applier calls in place of ``combined``; in the executor. Without state."""

    def __init__(self, max_norm: float, *, alone: bool) -> None:
        """``alone``: one shard holds the whole model, so that the norm of its part is the norm."""
        self._max_norm = max_norm
        self._alone = alone

    def combine(
        self,
        pushes: Sequence[IncomingPush],
        scale: float,
        live_workers: int,
        pool: RegionPool,
        tables: Sequence[row_tables.ShardTable],
        *,
        keep: bool = False,
    ) -> Combined:
        """See ``combined``. Over several shards it is for a push that is applied alone, which brings its norm."""
        norm = pushes[0].squared_norm
        factor = None if self._alone or norm is None else clip_factor(self._max_norm, norm)
        # What is scaled is memory of this shard.
        step, taken = combined(pushes, scale, live_workers, pool, tables, keep=keep or factor != 1.0)
        if factor is None:
            factor = clip_factor(self._max_norm, squared_norm(step.gradients, step.absent, step.tables))
        return scaled(step, factor), taken


class JoinedRound:
    """The step of a closed round, from before its norm is known until it is made. Its work is done in the executor."""

    def __init__(self, pushes: Sequence[IncomingPush], live_workers: int, max_norm: float) -> None:
        self._pushes = pushes
        self._live_workers = live_workers
        self._max_norm = max_norm
        self._pool: RegionPool | None = None
        self._combined: Combined | None = None
        self._part = 0.0
        #: The squared norm over all shards.
        self.total = 0.0

    def join(self, pool: RegionPool, tables: Sequence[row_tables.ShardTable]) -> float:
        """Combine the pushes; the squared norm of what they make on this shard."""
        self._combined = combined(self._pushes, 1.0, self._live_workers, pool, tables, keep=True)
        self._pool, (step, _) = pool, self._combined
        self._part = squared_norm(step.gradients, step.absent, step.tables)
        return self._part

    def combine(
        self,
        pushes: Sequence[IncomingPush],
        scale: float,
        live_workers: int,
        pool: RegionPool,
        tables: Sequence[row_tables.ShardTable],
        *,
        keep: bool = False,
    ) -> Combined:
        """See ``combined``; of the same pushes."""
        if self._combined is None:
            raise RuntimeError("a round is made before it is joined")
        (step, taken), self._combined = self._combined, None
        # Tables may have been loaded since it was joined.
        rows = [replace(each, updates=tables[each.table].updates + 1) for each in step.tables]
        step = replace(step, tables=rows, squared_norm=self._part)
        return scaled(step, clip_factor(self._max_norm, self.total)), taken

    def forget(self) -> None:
        """Give its memory back: the round is not made here."""
        if self._combined is not None and self._pool is not None:
            (_, taken), self._combined = self._combined, None
            if taken is not None:
                self._pool.give(taken)


def scaled(step: Step, factor: float) -> Step:
    """``step`` with its gradients times ``factor``; those of variables are changed in place."""
    if factor == 1.0:
        return step
    scale_gradients(step.gradients, step.absent, factor)
    rows = [replace(each, gradients=each.gradients * np.float32(factor)) for each in step.tables]
    return replace(step, tables=rows)


class ClippedRounds:
    """Part of one ShardModel, on the shard's event loop. At most one round is closed at a time."""

    def __init__(
        self,
        layout: Layout,
        applier: Applier,
        executor: ShardExecutor,
        held: Mapping[tuple[WorkerKey, int], IncomingPush],
        ask: AskNorm,
        advance: Callable[[], None],
        failpoints: Failpoints,
    ) -> None:
        """``held``: accepted pushes whose step is still open. ``advance`` is called when a round can be taken."""
        spec = layout.shard_map.spec
        self._layout, self._name, self._max_norm = layout, spec.name, spec.clip_grad_norm
        self._others = [shard for shard in layout.shard_map.holders if shard != layout.shard]
        self._applier = applier
        self._tracker: Tracker = applier.tracker
        self._executor = executor
        self._held = held
        self._ask = ask
        self._advance = advance
        self._failpoints = failpoints
        self.live_workers = 1
        #: The steps of the rounds returned last, by position, until they are queued.
        self.joined: dict[Position, JoinedRound] = {}
        self._exchange: asyncio.Task[None] | None = None
        #: The closed round, once all parts of its norm are known.
        self._settled: tuple[float, JoinedRound] | None = None
        #: What the tracker knows.
        self._changes = Conditions()

    @property
    def is_closed(self) -> bool:
        """Whether a round waits for its norm, or to be taken."""
        return self._tracker.norms.closed is not None

    def take_ready(self, now: float) -> list[Round]:
        """As the tracker's: the rounds whose norm is known. Closes the next one."""
        rounds = []
        while True:
            if self._settled is not None:
                part, joined = self._settled
                self._settled = None
                rounds.append(self._tracker.take_closed(part))
                self.joined[rounds[-1].position] = joined
            pushes = self._tracker.close_ready(now)
            if pushes is None:
                break
            if pushes:
                self._exchange = asyncio.create_task(self._settle(pushes), name="round norm")
                break
            rounds.append(self._tracker.take_closed(0.0))
        self._changes.wake()
        return rounds

    async def part(self, position: Position) -> float | None:
        """What this shard adds to the squared norm of a round; None: not known after a while. Raises what stopped the
        model.
        """
        gate, tracker = self._applier.gate, self._tracker
        await self._changes.until(
            lambda: gate.closed is not None or tracker.part_of_norm(position) is not None, times.NORM_SECONDS
        )
        gate.check()
        return tracker.part_of_norm(position)

    def stop(self) -> None:
        """The model is stopped: no round is taken any more."""
        if self._exchange is not None:
            self._exchange.cancel()
        self._changes.wake()

    async def _settle(self, infos: Sequence[PushInfo]) -> None:
        norms, position = self._tracker.norms, infos[0].position
        pushes = [self._held[info.worker, info.sequence] for info in infos]
        joined = JoinedRound(pushes, self.live_workers, self._max_norm)
        pool, tables = self._applier.pool, self._applier.replica.tables
        cost = self._layout.region_bytes + sum(push.rows.cost for push in pushes if push.rows)
        try:
            norms.part = await asyncio.shield(self._executor.submit(lambda: joined.join(pool, tables), cost))
            self._changes.wake()
            norms.waits_for = f"the gradient norm of {position} on {_named(self._others)}"
            epoch = self._layout.shard_map.epoch
            asked = (self._ask(shard, self._name, epoch, position) for shard in self._others)
            joined.total = total([norms.part, *await asyncio.gather(*asked)])
            if self._failpoints.armed:
                self._failpoints.hit("after_round_norm")
        except asyncio.CancelledError:
            # Queued behind the joining.
            await asyncio.shield(self._executor.submit(joined.forget, 0))
            raise
        except PsError as error:
            self._applier.stop(error)
            return
        except Exception as error:  # noqa: BLE001 -- the model is stopped with it
            self._applier.failed(error)
            return
        self._exchange, self._settled = None, (norms.part, joined)
        self._advance()


def _named(shards: Sequence[int]) -> str:
    return f"shard{'s' if len(shards) > 1 else ''} {', '.join(map(str, shards))}"
