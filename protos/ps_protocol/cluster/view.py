"""The cluster as its members and its users see it: members and their statistics, the mode, the models, events."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from ps_protocol import PROTOCOL_VERSION
from ps_protocol.cluster.job import DEFAULT_JOB
from ps_protocol.errors import InvalidRequest
from ps_protocol.model.spec import Consistency


@dataclass(frozen=True, slots=True)
class ClosedModelAsk:
    """What a worker asks when it has closed a model."""

    model: str
    #: Of its shard map; distinguishes the model from another one of this name.
    epoch: int
    #: Drop the model on all shards, with the last worker that uses it.
    release: bool

    def __post_init__(self) -> None:
        if not self.epoch:
            raise InvalidRequest("a model that was closed had a shard map", expected="its epoch, from 1", actual="0")


@dataclass(frozen=True, slots=True)
class TableCounts:
    """The part of one table that a shard has."""

    model: str
    table: str
    rows: int
    #: Ids that have been used and have no row yet.
    waiting: int
    #: Bytes of rows, ids and maps, in memory and on disk.
    size_bytes: int
    #: Since the shard began: rows that came, that expired, that were evicted.
    inserted: int
    expired: int
    evicted: int
    #: Of the rows: those that are not in memory.
    on_disk: int = 0


@dataclass(frozen=True, slots=True)
class UpdateCounts:
    """The updates that a shard made of one model in async or ssp since its heartbeat before."""

    model: str
    #: Geometric mean of the norms of the sampled gradients, of the shard's part of the model; 0: none was sampled.
    gradient_norm: float
    #: Staleness of the pushes: the mean, and what 99 % of them did not exceed.
    staleness: float
    staleness_p99: float


@dataclass(frozen=True, slots=True)
class LogCounts:
    """The log and the snapshots in a shard's data directory."""

    #: The number of the last record.
    records: int
    #: Written since the process began.
    written_bytes: int
    #: Written since the last snapshot: what a restart replays.
    unsaved_bytes: int
    #: Since the last snapshot was complete; None: this process has made none.
    snapshot_age_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class JobEvent:
    """Something that happened, in words."""

    #: Rises by one with every event.
    number: int
    #: Seconds since 1970.
    at_seconds: float
    text: str
    #: Something was lost or is wrong.
    warning: bool = False


TOOK_OVER = "it took the place of the shard"
"""Why a standby leaves that has become the shard."""


class Role(enum.Enum):
    """What a member does. The coordinator itself is not a member."""

    SHARD = "shard"
    WORKER = "worker"
    EVALUATOR = "evaluator"
    #: Follows a shard's log, and takes its place when it is lost.
    STANDBY = "standby"


@dataclass(frozen=True, slots=True)
class Member:
    """A live member. ``index`` is its shard number or rank, ``address`` is set for shards only."""

    role: Role
    index: int
    #: Rises with every join of the cluster's life.
    incarnation: int
    address: str = ""

    def __str__(self) -> str:
        return f"{self.role.value} {self.index}"


@dataclass(frozen=True, slots=True)
class ClusterView:
    """One revision of the cluster. A later one has a higher ``revision``."""

    revision: int = 0
    members: tuple[Member, ...] = ()
    consistency: Consistency = field(default_factory=Consistency)
    #: Epoch of each model's shard map, by model name.
    models: Mapping[str, int] = field(default_factory=dict)
    expected_shards: int = 1
    #: 0: workers come and go; no number of them is waited for.
    expected_workers: int = 0
    #: All expected members have been there once.
    started: bool = False
    #: The job started and every worker has left.
    finished: bool = False
    #: The job is finished and what is written at its end is there: no member is needed any more.
    released: bool = False
    #: Shard numbers without slices: drained, or added and not used yet.
    spare: frozenset[int] = frozenset()
    #: Names the move of slices that has not been decided; empty: none.
    moving: str = ""
    #: Models that were released, with the last epoch of their shard maps.
    released_models: Mapping[str, int] = field(default_factory=dict)
    #: Proves what the coordinator's journal contained when this was sent; opaque. Empty without a journal.
    journal_mark: bytes = b""
    #: Where workers come and go: so many are waited for at the start.
    least_workers: int = 0
    #: The numbers that were asked for since; None: none was.
    wanted_workers: int | None = None
    wanted_shards: int | None = None

    @property
    def used_shards(self) -> tuple[int, ...]:
        """The shards that have slices, or will."""
        return tuple(number for number in range(self.expected_shards) if number not in self.spare)

    def was_released(self, model: str, epoch: int) -> bool:
        """Whether the model whose shard map had this ``epoch`` was released."""
        return epoch <= self.released_models.get(model, 0)

    def live(self, role: Role) -> dict[int, Member]:
        """Live members of one role, by index."""
        return {m.index: m for m in self.members if m.role is role}


@dataclass(frozen=True, slots=True)
class MemberStats:
    """What a member reports with each heartbeat. Workers count pushes they made, shards pushes they accepted."""

    steps: int = 0
    #: Shards: the highest of ``versions``.
    version: int = 0
    steps_per_second: float = 0.0
    bytes_per_second: float = 0.0
    samples_per_second: float = 0.0
    staleness: int = 0
    #: What the training script reported, such as loss.
    metrics: Mapping[str, float] = field(default_factory=dict)
    #: Workers: the transports of their steps; several when shards differ.
    transport: str = ""
    #: Workers: samples taken from loaders that the cluster splits.
    samples: int = 0
    #: Shards: pushes not applied, late for their step in sync, or staler than the mode allows.
    dropped: int = 0
    #: Shards: records of the log that the standby lacks; None without one that follows.
    standby_lag: int | None = None
    #: What it does before it can work as usual, in words.
    activity: str = ""
    #: Shards: the version of each model that they have a part of, by its name.
    versions: Mapping[str, int] = field(default_factory=dict)
    #: Workers: barriers passed, and the clock of the last push in that phase.
    phase: int = 0
    clock: int = 0
    #: Workers: seconds spent waiting since the process joined, by reason.
    wait_seconds: Mapping[str, float] = field(default_factory=dict)
    #: Shards: open step streams, by transport.
    streams: Mapping[str, int] = field(default_factory=dict)
    #: Shards: bytes of their parameters and buffers.
    held_bytes: int = 0
    #: Shards with a data directory.
    log: LogCounts | None = None
    tables: tuple[TableCounts, ...] = ()
    #: host:port of its metrics; empty: it serves none.
    metrics_address: str = ""
    #: Shards: pushes that waited for their turn to be applied, and their bytes; the mean since the heartbeat before.
    queued_pushes: float = 0.0
    queued_bytes: float = 0.0
    #: When the first of its certificates that are in the last tenth of their time expires, or has expired, in seconds
    #: since 1970; 0: none is.
    certificate_ends: float = 0.0
    #: Shards in async and ssp: one entry for each model with updates since the heartbeat before.
    updates: tuple[UpdateCounts, ...] = ()
    #: Workers: steps refused because a gradient held NaN or infinity.
    nonfinite: int = 0


@dataclass(frozen=True, slots=True)
class StandbyReport:
    """A shard's report on its standby; of the reports of one incarnation the one with the highest number counts."""

    number: int
    #: The data directory that has everything acknowledged; empty: none has.
    directory: str


@dataclass(frozen=True, slots=True)
class JoinRequest:
    """A process that asks to join. The client fills in ``token``, ``host``, ``pid`` and ``lineage``."""

    role: Role
    #: None: the lowest free one, for a worker or evaluator.
    index: int | None = None
    #: host:port where a shard serves; empty for the other roles.
    address: str = ""
    #: Random, and the same in each repetition by one process.
    token: str = ""
    protocol_version: int = PROTOCOL_VERSION
    host: str = ""
    pid: int = 0
    #: Shards: the incarnation that last wrote the state of this process; 0: it has none.
    data_incarnation: int = 0
    #: Shards and standbys: name of the data directory; empty without one. One process at a time locks it.
    directory: str = ""
    #: Shards: take the place only if it is vacant and this directory has every acknowledged push.
    yields: bool = False
    #: Shards: add the number to the job, as a spare shard, if it is new.
    add: bool = False
    #: The same for all processes that a supervisor starts for a place, each after the end of the previous one.
    lineage: str = ""
    #: Take the place from a process that may be alive.
    take_over: bool = False

    def adds(self, shards: int) -> bool:
        """Whether this shard is added to a job of ``shards`` shards."""
        return self.add and self.role is Role.SHARD and self.index is not None and self.index >= shards


@dataclass(frozen=True, slots=True)
class Joined:
    """What a member learns when it joins."""

    member: Member
    lease_seconds: float
    heartbeat_seconds: float
    #: The first view that includes this member.
    revision: int
    #: Common seed of the job.
    seed: int
    #: Barriers the job had passed.
    phase: int
    #: Name of the job; empty: its coordinator sends none.
    job: str = ""


@dataclass(frozen=True, slots=True)
class HeartbeatAnswer:
    """What a member learns with each heartbeat."""

    #: Of the coordinator's journal; empty without one.
    journal_mark: bytes = b""
    #: When the next heartbeat is due; 0: as often as ``Joined`` says.
    next_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class BarrierState:
    """Whether a barrier has opened, and who is missing if not."""

    released: bool
    missing_ranks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class MoveProgress:
    """How far slices have been moved between shards."""

    moved_bytes: int = 0
    total_bytes: int = 0
    #: Batches so far; training paused once for each.
    batches: int = 0
    #: Length of the pause for the last one.
    pause_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class MemberStatus:
    """One member as people look at it."""

    member: Member
    seconds_since_heartbeat: float
    stats: MemberStats
    host: str = ""
    pid: int = 0
    #: Empty for a live member; else how it ended.
    gone: str = ""
    #: When it ended, in seconds since 1970; 0: it lives.
    ended_at: float = 0.0


@dataclass(frozen=True, slots=True)
class Divergence:
    """A number of one member that has grown far above its own history, in async or ssp."""

    member: Member
    #: What has grown: "gradient norm of model 'net'", "loss".
    what: str
    #: NaN: a gradient or a loss was no finite number.
    value: float
    #: The highest that was usual before.
    usual: float
    #: When it was last as usual, in seconds since 1970.
    since_seconds: float
    #: Of the shards, lately: the mean, and what 99 % of the pushes did not exceed.
    staleness: float = 0.0
    staleness_p99: float = 0.0
    #: The folder of the checkpoint from before that is kept, and its step; empty: none is.
    checkpoint: str = ""
    step: int = 0


@dataclass(frozen=True, slots=True)
class ClusterStatus:
    """The status of the cluster: live members first, then the last former ones."""

    view: ClusterView
    members: tuple[MemberStatus, ...]
    #: Where the coordinator serves its metrics; empty: nowhere.
    metrics_url: str = ""
    #: The last things that the coordinator has decided by itself, oldest first.
    decisions: tuple[JobEvent, ...] = ()
    #: When the coordinator sent this, in seconds since 1970.
    at_seconds: float = 0.0
    #: Of the coordinator, as in ``MemberStats``.
    certificate_ends: float = 0.0
    #: Name of the job.
    job: str = DEFAULT_JOB
    #: By model, the rule for stale pushes that it has of its own, in words.
    stale_rules: Mapping[str, str] = field(default_factory=dict)
    #: What has grown far above its own history.
    divergences: tuple[Divergence, ...] = ()
    #: Random, made at the first start of the job: its journal keeps it. Empty: it has none.
    job_id: str = ""
