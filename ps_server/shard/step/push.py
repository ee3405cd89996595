"""One push on its way through a shard: what came, where its gradients are, and what was decided about it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ps_protocol.cluster.requests import PushHeader
from ps_protocol.errors import InvalidRequest, NonFiniteGradient
from ps_protocol.model.spec import ModelSpec, NonFinite, Options
from ps_server import tables as row_tables
from ps_server.consistency import Position, PushDecision, PushInfo, Round, WorkerKey
from ps_server.optimizers.gradients import first_nonfinite
from ps_server.shard.counters import StepTimes
from ps_server.shard.execution.executor import ShardExecutor
from ps_server.shard.step.push_trace import ServedPush
from ps_server.shard.step.pushed_rows import PushedRows, inspect, nonfinite_rows
from ps_server.state.region import Region

QUICK_BYTES = 1 << 20
"""To look at so many bytes of gradients takes no more time than handing that to a thread."""


MAX_WORKERS = 256
"""Workers of one combined push: many more than one host runs."""


def _nobody(_push: IncomingPush) -> None:
    """Nobody waits to be called."""


@dataclass(slots=True, eq=False)
class IncomingPush:
    """Read by its stream, decided by the model, applied in the executor, answered by its stream.

    Its region belongs to the model from ``ShardModel.push`` on.
    """

    info: PushInfo
    #: The gradients; None for a skipped push, and once they are not needed any more.
    region: Region | None
    absent: frozenset[int]
    options: Sequence[Options]
    #: The region is a worker's memory: to be read only, and never to be kept.
    lent: bool = False
    with_buffers: bool = False
    #: The worker has looked, and is believed: there is no NaN or infinity in it.
    finite: bool = False
    #: sync: what its gradients weigh in the mean of their step.
    weight: float = 1.0
    #: Where gradients are clipped: the squared norm of the whole push, over all shards, as its worker sent it.
    squared_norm: float | None = None
    #: Steps that the parameters wanted back are used later than usual.
    ahead: int = 0
    #: None: no table takes part.
    rows: PushedRows | None = None
    #: Reserved for it in the log.
    reserved_bytes: int = 0
    #: Seconds it took until its gradients or rows were checked, in the executor, before it was decided about.
    checked_seconds: float = 0.0
    decision: PushDecision | None = None
    #: Why it was refused.
    error: Exception | None = None
    #: Called where it was gathered, once it is decided and its update is made.
    decided: Callable[[IncomingPush], None] = _nobody
    #: The trace of this push; None if its worker does not trace it.
    trace: ServedPush | None = None


class HeldPushes(Mapping[tuple[WorkerKey, int], IncomingPush]):
    """Accepted pushes that wait for the others of their step (sync), by worker and sequence.

    Knows how long each step has been open.
    """

    def __init__(self) -> None:
        self._pushes: dict[tuple[WorkerKey, int], IncomingPush] = {}
        #: When the first push of each open step came.
        self._began: dict[Position, float] = {}

    def __getitem__(self, key: tuple[WorkerKey, int]) -> IncomingPush:
        return self._pushes[key]

    def __iter__(self) -> Iterator[tuple[WorkerKey, int]]:
        return iter(self._pushes)

    def __len__(self) -> int:
        return len(self._pushes)

    def hold(self, push: IncomingPush) -> None:
        """Keep ``push`` until its step is taken."""
        self._pushes[push.info.worker, push.info.sequence] = push
        self._began.setdefault(push.info.position, time.perf_counter())

    def take(self, ready: Round, times: StepTimes) -> list[IncomingPush]:
        """The pushes of a step that ends; how long it was open is counted in ``times``."""
        if began := self._began.pop(ready.position, None):
            times.round.observe(time.perf_counter() - began)
        return [self._pushes.pop((info.worker, info.sequence)) for info in ready.contributions]

    def take_all(self) -> list[IncomingPush]:
        """The pushes of all steps, which will not end here."""
        pushes = list(self._pushes.values())
        self._pushes.clear()
        self._began.clear()
        return pushes


def combined_info(sender: PushInfo, header: PushHeader) -> PushInfo:
    """The whole of a combined push, whose sender has ``sender`` in it. Raises InvalidRequest."""
    announced = header.contributions
    if len(announced) >= MAX_WORKERS:
        raise InvalidRequest(
            f"a combined push of worker {sender.worker.rank} is of too many workers",
            expected=f"at most {MAX_WORKERS}",
            actual=str(len(announced) + 1),
        )
    ranks = [sender.worker.rank, *(each.worker[0] for each in announced)]
    if len(set(ranks)) < len(ranks):
        raise InvalidRequest(
            f"a combined push of worker {sender.worker.rank} has a worker twice",
            expected="its sender, and each of the other workers once",
            actual=f"ranks {ranks}",
        )
    others, pulled = [], [sender.pulled_version]
    for each in announced:
        if each.sequence == 0:
            raise InvalidRequest(
                f"a push of worker {each.worker[0]} in a combined one needs a sequence",
                expected="1 or more",
                actual="0",
            )
        worker, position = WorkerKey(*each.worker), Position(each.phase, each.clock)
        others.append(PushInfo(worker, each.sequence, position, each.pulled_version, each.skipped))
        if not each.skipped:
            pulled.append(each.pulled_version)
    others.sort(key=lambda each: each.worker)
    return replace(sender, pulled_version=min(pulled), others=tuple(others))


def require_weight(weight: float, rank: int) -> None:
    """Raises InvalidRequest for a weight with which there is no mean."""
    if not 0.0 < weight < math.inf:
        raise InvalidRequest(
            f"a push of worker {rank} has a weight that no mean can be taken with",
            expected="a positive finite number",
            actual=str(weight),
            remedy="weigh a push with the number of its samples, and make no step for a batch without any",
        )


def require_norm(squared_norm: float | None, spec: ModelSpec, rank: int) -> None:
    """Raises InvalidRequest for a push of a model whose gradients are clipped that does not bring its norm."""
    allowed = spec.nonfinite is NonFinite.ALLOW
    if squared_norm is None or not (squared_norm >= 0.0 or (allowed and math.isnan(squared_norm))):
        raise InvalidRequest(
            f"a push of worker {rank} lacks the norm of its gradients",
            expected=f"a squared norm, for the gradients of model '{spec.name}' are clipped",
            actual=str(squared_norm),
        )


async def must_skip(push: IncomingPush, executor: ShardExecutor, tables: Sequence[row_tables.ShardTable]) -> bool:
    """Whether the gradients of the push are not to be applied: one of them is not finite.

    Raises NonFiniteGradient where the model's policy is to refuse those, InvalidRequest and TableFull for rows that
    cannot be taken. Notes how long it took.
    """
    began = time.perf_counter()
    try:
        return await _must_skip(push, executor, tables)
    finally:
        push.checked_seconds = time.perf_counter() - began


async def _must_skip(push: IncomingPush, executor: ShardExecutor, tables: Sequence[row_tables.ShardTable]) -> bool:
    rows, region = push.rows, push.region
    if region is None:
        return False
    layout, policy = region.layout, region.layout.shard_map.spec.nonfinite
    if rows is not None:
        cost = rows.ids_cost if push.finite else rows.cost
        name = await executor.submit(lambda: inspect(rows, tables, layout, finite=push.finite), cost)
        if name is not None and policy is NonFinite.REFUSE:
            raise nonfinite_rows(name, push.info.worker.rank, layout.shard)
        if name is not None:
            return True
    if push.finite or policy is NonFinite.ALLOW:
        return False
    size = layout.parameter_bytes
    look = executor.submit(lambda: first_nonfinite(layout, region, push.absent), size, quick=size <= QUICK_BYTES)
    name = await look
    if name is not None and policy is NonFinite.REFUSE:
        raise NonFiniteGradient(
            f"a gradient from worker {push.info.worker.rank} holds NaN or infinity; nothing was applied",
            variable=name,
            shard=str(layout.shard),
            remedy='lower the learning rate, clip gradients, or pass nonfinite="skip" to cluster.optimizer',
        )
    return name is not None
