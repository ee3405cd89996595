"""Decides from a seed what one run is: sizes, mode, how much work, and which faults come when."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from random import Random

from ps_protocol.model.spec import Consistency, Mode, StalePolicy

ALL_FAULTS = (
    "worker_crash",
    "shard_crash",
    "snapshot_crash",
    "coordinator_crash",
    "partition",
    "stream_break",
    "stop_worker",
    "stop_shard",
    "stop_coordinator",
    "disk_full",
    "journal_refuses",
    "mode",
    "worker_joins",
    "worker_replaced",
    "old_copy",
    "all_crash",
    "checkpoint",
)
"""Kinds of faults. There are two more: ``calls``, lost, late and repeated all the time until faults end, and ``move``,
slices that move between shards while the job trains.
"""

_SEPARATE = ("calls", "move")


@dataclass(frozen=True, slots=True)
class Size:
    """What the command line says of a run."""

    shards: int = 4
    workers: int = 6
    #: Per worker, over all phases.
    steps: int = 6
    faults: tuple[str, ...] = (*ALL_FAULTS, *_SEPARATE)


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault at one time."""

    time: float
    kind: str


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything a run needs but its own random numbers."""

    seed: int
    shards: int
    workers: int
    #: Per worker and phase.
    steps: int
    phases: int
    #: Mean time of a worker between two steps.
    think_seconds: float
    skipped: float
    consistency: Consistency
    #: 0: workers come and go.
    expected_workers: int
    durable: bool
    snapshot_seconds: float
    fsync: bool
    #: How long a sync of a file takes at most.
    sync_seconds: float
    log_bytes: int
    momentum: float
    overlap: bool
    #: Each worker steps them one after another.
    models: int
    #: Each shard is two processes: one serves, the other follows its log.
    standby: bool
    #: With standbys: a push is acknowledged when the standby has it, not before.
    acknowledged_after: bool
    #: The format of payloads, as workers name it.
    wire: str
    #: The model has a table of rows, where it has one at all: see ``has_table``.
    table: bool
    lease_seconds: float
    heartbeat_seconds: float
    delay_seconds: float
    calls_lost: float
    calls_late: float
    data_items: int
    #: Faults come before this; then everything is healed.
    quiet_at: float
    #: All workers must be done by then.
    ends_at: float
    #: Rows of each variable.
    rows: tuple[int, ...]
    faults: tuple[Fault, ...] = field(default=())

    @property
    def has_checkpoints(self) -> bool:
        """Whether the coordinator has a folder for checkpoints."""
        return any(fault.kind == "checkpoint" for fault in self.faults)

    @property
    def has_table(self) -> bool:
        """Whether the model has a table: not beside another model, and not with steps that overlap."""
        return self.table and not self.overlap and self.models == 1

    @property
    def keeps_acknowledged(self) -> bool:
        """Whether no acknowledged push may be lost, whichever process or disk a shard goes on with."""
        return self.durable and (self.acknowledged_after or not self.standby)

    def __str__(self) -> str:
        kept = "durable" if self.durable else "snapshot"
        return (
            f"{self.shards} shards, {self.workers} workers x {self.phases} phases x {self.steps} steps, "
            f"{self.consistency}, {kept}, {len(self.faults)} faults until {self.quiet_at:.0f} s"
        )


def random_mode(random: Random, expected_workers: int) -> Consistency:
    """Any mode that the coordinator accepts."""
    policy = random.choice([StalePolicy.ACCEPT, StalePolicy.ACCEPT, StalePolicy.REJECT, StalePolicy.SCALE])
    threshold = random.randrange(4) if policy is not StalePolicy.ACCEPT else 0
    match random.choice([Mode.ASYNC, Mode.SSP, Mode.SSP, Mode.SYNC, Mode.SYNC]):
        case Mode.ASYNC:
            return Consistency(Mode.ASYNC, stale_policy=policy, stale_threshold=threshold)
        case Mode.SSP:
            return Consistency(Mode.SSP, staleness=random.randrange(4), stale_policy=policy, stale_threshold=threshold)
        case _:
            backup = random.choice([0, 0, 1, expected_workers // 4]) if expected_workers > 1 else 0
            backup = min(backup, max(0, expected_workers - 1))
            grace_seconds = random.choice([0.0, 0.5, 3.0]) if backup else 0.0
            return Consistency(Mode.SYNC, backup=backup, grace_seconds=grace_seconds)


def make_plan(seed: int, size: Size) -> Plan:
    """The run that ``seed`` stands for; the same whenever ``size`` is the same."""
    random, more = Random(f"plan of {seed}"), Random(f"more of {seed}")
    large = size.workers > 100
    expected = size.workers if random.random() < 0.7 else 0
    window = random.uniform(5, 15)
    phases = random.choice([1, 2, 3]) if not large else 1
    steps = -(-size.steps // phases)
    durable = random.random() < 0.8
    calls = "calls" in size.faults
    kinds = [kind for kind in size.faults if kind not in _SEPARATE]
    count = (random.randrange(2, 14) if not large else random.randrange(10, 40)) if kinds else 0
    faults = sorted((Fault(random.uniform(0.5, window), random.choice(kinds)) for _ in range(count)), key=_by_time)
    plan = Plan(
        seed=seed,
        shards=size.shards,
        workers=size.workers,
        steps=steps,
        phases=phases,
        think_seconds=window / (steps * phases + 1) * random.uniform(0.3, 1.0),
        skipped=random.choice([0.0, 0.0, 0.05, 0.3]),
        consistency=random_mode(random, expected),
        expected_workers=expected,
        durable=durable,
        snapshot_seconds=random.choice([0.0 if durable else 0.7, 0.7, 3.0, 5.0]),
        fsync=durable and random.random() < 0.5,
        sync_seconds=random.choice([0.0, 0.001, 0.05]),
        log_bytes=1 << 20,
        momentum=random.choice([0.0, 0.5]),
        overlap=random.random() < 0.25,
        models=2 if more.random() < 0.2 and not large else 1,
        standby=durable and not large and more.random() < 0.2,
        acknowledged_after=more.random() < 0.6,
        wire=more.choice(["raw", "raw", "raw", "int8", "topk:0.3"]),
        table=more.random() < 0.3 and not large,
        lease_seconds=5.0 if not large else 10.0,
        heartbeat_seconds=2.0 if not large else 2.5,
        delay_seconds=random.choice([0.001, 0.005, 0.05]) if not large else random.choice([0.001, 0.003]),
        calls_lost=random.choice([0.0, 0.02, 0.2]) if calls else 0.0,
        calls_late=random.choice([0.0, 0.02, 0.2]) if calls else 0.0,
        data_items=random.choice([0, size.workers * steps]) if not large or random.random() < 0.1 else 0,
        quiet_at=window,
        ends_at=window + 300.0,
        rows=_rows(size.shards, random),
        faults=tuple(faults),
    )
    moves = "move" in size.faults and more.random() < 0.3 and not large
    return _with_moves(plan, more) if moves and plan.keeps_acknowledged else plan


def _with_moves(plan: Plan, random: Random) -> Plan:
    """Slices move. The order of updates must not matter, and each element brings the same: the judge adds them up."""
    times = [random.uniform(1.5, plan.quiet_at) for _ in range(random.randrange(1, 4))]
    faults = sorted((*plan.faults, *(Fault(time, "move") for time in times)), key=_by_time)
    return replace(plan, momentum=0.0, wire="raw", models=1, table=False, faults=tuple(faults))


def _by_time(fault: Fault) -> float:
    return fault.time


def _rows(shards: int, random: Random) -> tuple[int, ...]:
    """A model of which every shard gets something, whole variables and parts of one."""
    return (2 * shards, *(random.randrange(2, 5) for _ in range(shards)))
