"""A push that has arrived whole: whether it has anything to apply, and how several become one optimizer step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from ps_protocol.errors import NonFiniteGradient
from ps_protocol.model import Buffers, NonFinite, Options
from ps_server import tables as row_tables
from ps_server.consistency import PushInfo
from ps_server.optimizers import (
    Region,
    Step,
    assign_buffers,
    average,
    average_buffers,
    copy_region,
    first_nonfinite,
)
from ps_server.shard.lane import Lane
from ps_server.shard.pool import RegionPool
from ps_server.shard.pushed_rows import PushedRows, combined_rows, inspect, nonfinite_rows


@dataclass(frozen=True, slots=True)
class Gradients:
    """A region of gradients: one of the pool's, or ``lent`` by a worker, to be read only and never to be kept."""

    region: Region
    lent: bool = False


@dataclass(frozen=True, slots=True)
class Push:
    """A push that has arrived whole. Its region belongs to the model from ``ShardModel.push`` on."""

    info: PushInfo
    #: None for a skipped push.
    gradients: Gradients | None
    absent: frozenset[int]
    options: Sequence[Options]
    with_buffers: bool = False
    #: No parameters are wanted back.
    push_only: bool = False
    #: The worker has looked: there is no NaN or infinity in it.
    finite: bool = False
    #: Steps that the parameters wanted back are used later than usual.
    ahead: int = 0
    #: None: no table takes part.
    rows: PushedRows | None = None

    @property
    def rows_bytes(self) -> int:
        """Bytes of ids and gradients of rows."""
        return len(self.rows.buffer) if self.rows else 0


async def must_skip(push: Push, lane: Lane, tables: Sequence[row_tables.Table]) -> bool:
    """Whether the push has nothing to apply. Raises NonFiniteGradient where the model's policy is to refuse.

    Raises InvalidRequest and TableFull for rows that cannot be taken.
    """
    if push.gradients is None:
        return push.info.skipped
    rows, layout = push.rows, push.gradients.region.layout
    if rows is not None:
        name = await lane.submit(lambda: inspect(rows, tables, layout, finite=push.finite), rows.cost)
        if name is not None and layout.shard_map.spec.nonfinite is NonFinite.REFUSE:
            raise nonfinite_rows(name, push.info.worker.rank, layout.shard)
        if name is not None:
            return True
    if push.finite:
        return push.info.skipped
    region = push.gradients.region
    policy = layout.shard_map.spec.nonfinite
    if policy is NonFinite.ALLOW:
        return push.info.skipped
    name = await lane.submit(lambda: first_nonfinite(layout, region, push.absent), layout.parameter_bytes)
    if name is not None and policy is NonFinite.REFUSE:
        raise NonFiniteGradient(
            f"a gradient from worker {push.info.worker.rank} holds NaN or infinity; nothing was applied",
            variable=name,
            shard=str(layout.shard),
            remedy='lower the learning rate, clip gradients, or pass nonfinite="skip" to cluster.optimizer',
        )
    return name is not None


@contextmanager
def combined(
    pushes: Sequence[Push],
    scale: float,
    live_workers: int,
    pool: RegionPool,
    tables: Sequence[row_tables.Table],
    *,
    keep: bool = False,
) -> Iterator[Step]:
    """In the lane: the step that ``pushes`` make together, in rank order. Valid until the end of the block.

    ``keep``: nothing of it lies in memory that a worker can change, for it is written down before it is made.
    """
    parts = [push.gradients for push in pushes if push.gradients is not None]
    into, owned = parts[0].region, not parts[0].lent or (len(pushes) == 1 and not keep)
    if not owned:
        into = pool.take()
    try:
        absent = pushes[0].absent
        if len(pushes) == 1 and not owned:
            copy_region(parts[0].region, into)
        if len(pushes) > 1:
            absent = average(into, [part.region for part in parts], [push.absent for push in pushes])
        weight = _combine_buffers(into, [push for push in pushes if push.with_buffers], live_workers)
        rows = combined_rows([push.rows for push in pushes], tables, len(pushes), keep=keep)
        yield Step(into, absent, pushes[0].options, scale, weight, rows)
    finally:
        if not owned:
            pool.give(into)


def _combine_buffers(into: Region, pushes: Sequence[Push], live_workers: int) -> float:
    """Leave the buffers that came in ``into``, as the model's policy says; returns their weight."""
    policy = into.layout.shard_map.spec.buffers
    values = [push.gradients.region for push in pushes if push.gradients is not None]
    if not values:
        return 0.0
    if policy is Buffers.AVERAGE and len(values) > 1:
        average_buffers(into, values)
        return 1.0
    if into is not values[0]:
        assign_buffers(into, values[0])
    return 1.0 if policy is Buffers.RANK0 else 1 / live_workers
