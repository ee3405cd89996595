"""Owns nothing: what every model of a shard shares, and how entries get into its log."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from ps_protocol.errors import InternalError
from ps_protocol.model.spec import ShardMap
from ps_protocol.rpc.channel import OpenChannel, open_async_channel
from ps_protocol.tracing.tracer import Tracer
from ps_server.checkpoint.directory import CheckpointRoots
from ps_server.failpoints import Failpoints
from ps_server.limits import LimitCounts, ShardLimits
from ps_server.log.entries import Entry, MemoryLog, UpdateLog
from ps_server.shard.byte_budget import ByteBudget, ByteBudgets
from ps_server.shard.durability.replication import Replication
from ps_server.shard.execution.executor import INLINE_WORK_BYTES, ShardExecutor
from ps_server.tables.arrays import machine_bytes
from ps_server.tables.row_memory import RowMemory

Work = Callable[[], Awaitable[None]]


async def _at_once(work: Work) -> None:
    await work()


@dataclass(frozen=True)
class ShardContext:
    """What every model of a shard shares."""

    shard: int
    executor: ShardExecutor
    #: Asks the coordinator for the shard map of a model. Raises PsError.
    fetch_shard_map: Callable[[str], Awaitable[ShardMap]]
    log: UpdateLog = field(default_factory=MemoryLog)
    failpoints: Failpoints = field(default_factory=Failpoints)
    #: What the standby has; None where there is no log to follow.
    replication: Replication | None = None
    #: Awaited before a model gets its first values: from then on this directory counts. Raises PsError.
    announce: Callable[[], Awaitable[None]] | None = None
    #: Does work that logs, so that the disk has it when it returns, also where the log is not written all the time.
    keep: Callable[[Work], Awaitable[None]] = _at_once
    #: Whether every push that was acknowledged before this process served must be known here.
    promises: Callable[[], bool] = lambda: False
    #: Values of variables of all models that this shard takes.
    max_model_bytes: int = field(default_factory=machine_bytes)
    #: The limit for rows of tables, above which they are on disk.
    row_memory: RowMemory | None = None
    #: Memory of answers on their way, and of what clients are sending.
    budgets: ByteBudgets = field(default_factory=ByteBudgets.of)
    #: Where checkpoints may be.
    checkpoints: CheckpointRoots = field(default_factory=CheckpointRoots)
    #: What clients may take, and how often they wanted more.
    limits: ShardLimits = field(default_factory=ShardLimits)
    limit_counts: LimitCounts = field(default_factory=LimitCounts)
    #: Whether to trust a worker's statement that its gradients are finite.
    trusts_workers: bool = True
    #: Opens a channel to another shard, with the credentials of this one.
    open_channel: OpenChannel = open_async_channel
    #: Records the pushes that workers trace; None: tracing is off.
    tracer: Tracer | None = None

    @property
    def answers(self) -> ByteBudget:
        """Of answers on their way."""
        return self.budgets.answers

    @property
    def uploads(self) -> ByteBudget:
        """Of what clients are sending."""
        return self.budgets.uploads

    @property
    def first_message(self) -> tuple[float, LimitCounts]:
        """How long the first message of a call may take, and where it is counted when it took longer."""
        return self.limits.first_message_seconds, self.limit_counts

    async def write(self, entry: Entry, nbytes: int, points: tuple[str, ...] = (), *, reserved: bool = False) -> None:
        """Log an entry of about ``nbytes`` bytes, between two failpoints; ``reserved``: the caller has room for it.

        Raises StorageFull, InternalError.
        """
        if not reserved:
            await self.log.reserve(nbytes)

        def work() -> None:
            for point in points[:1]:
                self.failpoints.hit(point)
            self.log.append(entry)
            for point in points[1:]:
                self.failpoints.hit(point)

        try:
            await self.executor.submit(work, max(nbytes, INLINE_WORK_BYTES * self.log.waits))
        except OSError as error:
            raise InternalError(f"shard {self.shard} cannot write its log: {error}") from error
        finally:
            if not reserved:
                self.log.release(nbytes)
