"""The steps of a model whose gradients are clipped: as the applier makes others, then scaled to the norm allowed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import numpy as np

from ps_server import tables as row_tables
from ps_server.optimizers.clipping import clip_factor, scale_gradients, squared_norm
from ps_server.shard.step.applier import combined
from ps_server.shard.step.push import IncomingPush
from ps_server.state.region import RegionPool
from ps_server.state.replica import Step


class ClippedSteps:
    """What an Applier calls in place of ``combined``; in the executor. Without state."""

    def __init__(self, max_norm: float, *, alone: bool) -> None:
        """``alone``: one shard holds the whole model, so that the norm of its part is the norm."""
        self._max_norm = max_norm
        self._alone = alone

    @contextmanager
    def combine(
        self,
        pushes: Sequence[IncomingPush],
        scale: float,
        live_workers: int,
        pool: RegionPool,
        tables: Sequence[row_tables.ShardTable],
        *,
        keep: bool = False,
    ) -> Iterator[Step]:
        """See ``combined``. Over several shards it is for a push that is applied alone: its worker told its norm."""
        told = pushes[0].squared_norm
        factor = None if self._alone or told is None else clip_factor(self._max_norm, told)
        # What is scaled is memory of this shard.
        with combined(pushes, scale, live_workers, pool, tables, keep=keep or factor != 1.0) as step:
            if factor is None:
                factor = clip_factor(self._max_norm, squared_norm(step.gradients, step.absent, step.tables))
            yield scaled(step, factor)


class JoinedRound:
    """The step of a closed round, from before its norm is known until it is made. Its work is done in the executor."""

    def __init__(self, pushes: Sequence[IncomingPush], live_workers: int, max_norm: float) -> None:
        self._pushes = pushes
        self._live_workers = live_workers
        self._max_norm = max_norm
        self._held = ExitStack()
        self._step: Step | None = None
        self._part = 0.0
        #: The squared norm over all shards.
        self.total = 0.0

    def join(self, pool: RegionPool, tables: Sequence[row_tables.ShardTable]) -> float:
        """Combine the pushes; the squared norm of what they make on this shard."""
        joined = combined(self._pushes, 1.0, self._live_workers, pool, tables, keep=True)
        step = self._step = self._held.enter_context(joined)
        self._part = squared_norm(step.gradients, step.absent, step.tables)
        return self._part

    @contextmanager
    def combine(
        self,
        pushes: Sequence[IncomingPush],
        scale: float,
        live_workers: int,
        pool: RegionPool,
        tables: Sequence[row_tables.ShardTable],
        *,
        keep: bool = False,
    ) -> Iterator[Step]:
        """See ``combined``; of the same pushes."""
        with self._held:
            if (step := self._step) is None:
                raise RuntimeError("a round is made before it is joined")
            # Tables may have been loaded since it was joined.
            rows = [replace(each, updates=tables[each.table].updates + 1) for each in step.tables]
            step = replace(step, tables=rows, squared_norm=self._part)
            yield scaled(step, clip_factor(self._max_norm, self.total))

    def forget(self) -> None:
        """Give its memory back: the round is not made here."""
        self._held.close()


def scaled(step: Step, factor: float) -> Step:
    """``step`` with its gradients times ``factor``; those of variables are changed in place."""
    if factor == 1.0:
        return step
    scale_gradients(step.gradients, step.absent, factor)
    rows = [replace(each, gradients=each.gradients * np.float32(factor)) for each in step.tables]
    return replace(step, tables=rows)
