"""What one run is: sizes, mode, how much work, and which faults come when."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

from ps_protocol.model.spec import Consistency, Mode, StalePolicy, StaleRule

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
"""Kinds of faults."""

SEPARATE = ("calls", "move", "balance", "release", "restore", "new_job", "full_restart", "host", "reader", "relay")
"""More of them, which need what not every plan has.

``calls``: lost, late and repeated all the time until faults end. ``move``: a variable or a table moves to one shard
while the job trains. ``balance``: what is uneven is evened out. ``release``: an operator releases a model, which is
refused as long as a worker uses it. ``restore``: the newest checkpoint is put into the running job. ``new_job``: all
processes end, all disks but that of the checkpoints are lost, and a job begins with the newest checkpoint.
``full_restart``: the disk of a shard, whose log is small, fills until the shard is killed, or a while longer. ``host``:
a worker is killed, or stands still, while the workers of its host add their gradients up. ``reader``: a reader of
published weights is killed, or stands still. ``relay``: so is the relay that readers ask, or it is cut off from some
or all of the job.
"""

_HARMLESS_TO_SHARDS = frozenset(
    (
        "mode",
        "worker_crash",
        "worker_joins",
        "worker_replaced",
        "stop_worker",
        "stream_break",
        "host",
        "checkpoint",
        "restore",
        "release",
        "reader",
        "relay",
    )
)

SMALL_LOG_BYTES = 24 << 10
"""Some twenty records: see ``installed``."""


@dataclass(frozen=True, slots=True)
class Size:
    """What the command line says of a run."""

    shards: int = 4
    workers: int = 6
    #: Per worker, over all phases.
    steps: int = 6
    faults: tuple[str, ...] = (*ALL_FAULTS, *SEPARATE)
    #: The share of seeds with many faults of few kinds.
    swarms: float = 0.5


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
    #: At the end of each phase the second model is released; the next phase has another one.
    releases: bool
    #: Each shard is two processes: one serves, the other follows its log.
    standby: bool
    #: With standbys: a push is acknowledged when the standby has it, not before.
    acknowledged_after: bool
    #: The format of payloads, as workers name it.
    wire: str
    #: The rule of the models for stale pushes, as workers give it; None: that of the mode.
    stale: str | None
    #: The model has a table of rows, where it has one at all: see ``has_table``.
    table: bool
    #: Shards have a few of its rows in memory, the others on disk.
    rows_on_disk: bool
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
    #: Workers of each host, which push together; 1: each pushes by itself.
    per_host: int = 1
    #: They do so while the mode is sync, and not in others.
    per_host_in_sync: bool = False
    #: Processes that follow the weights which worker 0 publishes; 0: none are published.
    readers: int = 0
    #: Its steps from one version to the next, how many versions are kept, and whether it waits for each commit.
    publish_steps: int = 1
    keep_versions: int = 2
    publish_waits: bool = False
    #: The second reader has the weights as float32.
    converts: bool = False
    #: So many of the readers, the first ones, ask a relay; 0: there is none.
    relayed: int = 0
    #: How many versions it keeps, and whether it is told the name.
    relay_keeps: int = 2
    relay_is_told_the_name: bool = True

    @property
    def loses_no_view(self) -> bool:
        """Whether nothing keeps shards from views, and none forgets what it has decided, as moves do of held pushes."""
        kinds = {fault.kind for fault in self.faults}
        return kinds <= _HARMLESS_TO_SHARDS and not self.calls_lost and not self.calls_late

    @property
    def has_checkpoints(self) -> bool:
        """Whether the coordinator has a folder for checkpoints."""
        return any(fault.kind == "checkpoint" for fault in self.faults)

    @property
    def has_small_log(self) -> bool:
        """Whether logs reach their limit within a run."""
        return self.log_bytes <= SMALL_LOG_BYTES

    @property
    def has_table(self) -> bool:
        """Whether the model has a table: not beside another model, and not with steps that overlap."""
        return self.table and not self.overlap and self.models == 1

    @property
    def has_releases(self) -> bool:
        """Whether models are released: the last phase ends with the job."""
        return self.releases and self.models == 2 and self.phases > 1

    @property
    def keeps_acknowledged(self) -> bool:
        """Whether no acknowledged push may be lost, whichever process or disk a shard goes on with."""
        return self.durable and (self.acknowledged_after or not self.standby)

    def __str__(self) -> str:
        kept = "durable" if self.durable else "snapshot"
        own = f", models {self.stale}" if self.stale else ""
        hosts = f" on hosts of {self.per_host}" if self.per_host > 1 else ""
        hosts += " in sync" if self.per_host_in_sync else ""
        read = f", {self.readers} readers" if self.readers else ""
        read += f", {self.relayed} of them behind a relay" if self.relayed else ""
        return (
            f"{self.shards} shards, {self.workers} workers{hosts} x {self.phases} phases x {self.steps} steps, "
            f"{self.consistency}{own}, {kept}{read}, {len(self.faults)} faults until {self.quiet_at:.0f} s"
        )


def random_mode(random: Random, expected_workers: int) -> Consistency:
    """Any mode that the coordinator accepts."""
    policy = random.choice([StalePolicy.ACCEPT, StalePolicy.ACCEPT, StalePolicy.REJECT, StalePolicy.SCALE])
    threshold = random.randrange(4) if policy is not StalePolicy.ACCEPT else 0
    stale = StaleRule(policy, by_workers=True) if threshold == 3 else StaleRule(policy, threshold)
    match random.choice([Mode.ASYNC, Mode.SSP, Mode.SSP, Mode.SYNC, Mode.SYNC]):
        case Mode.ASYNC:
            return Consistency(Mode.ASYNC).with_rule(stale)
        case Mode.SSP:
            return Consistency(Mode.SSP, staleness=random.randrange(4)).with_rule(stale)
        case _:
            backup = random.choice([0, 0, 1, expected_workers // 4]) if expected_workers > 1 else 0
            backup = min(backup, max(0, expected_workers - 1))
            grace_seconds = random.choice([0.0, 0.5, 3.0]) if backup else 0.0
            return Consistency(Mode.SYNC, backup=backup, grace_seconds=grace_seconds)
