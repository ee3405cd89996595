"""The settings of a cluster: sizes, leases, partitioning, the first consistency mode."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import click

from ps_protocol.cluster.job import DEFAULT_JOB
from ps_protocol.cluster.scaling import MOST_RANKS, WorkerRange
from ps_protocol.errors import ConfigError, InvalidRequest
from ps_protocol.model.spec import Consistency, StalePolicy
from ps_server.coordinator.placement.variables import Balanced, FixedShards, MaxSize, MinSize, PartitionRule
from ps_server.limits import JobLimits
from ps_server.settings import setting


@dataclass(frozen=True, slots=True)
class PartitionOptions:
    """The options of how variables are partitioned."""

    partition: str = setting(
        "balanced",
        "How variables are partitioned over the shards. balanced: by bytes, in as few slices as possible. fixed, min, "
        "max: as TensorFlow's FixedShards, MinSize and MaxSize partitioners.",
        click.Choice(["balanced", "fixed", "min", "max"]),
    )
    partition_slices: int = setting(
        0,
        "fixed: slices per variable (0: one per shard). min, max: the most slices per variable (0: one per shard with "
        "min, no limit with max).",
        click.IntRange(0),
    )
    partition_bytes: int = setting(256 << 10, "min, max: size of a slice.")

    def rule(self, shards: int) -> PartitionRule:
        """The rule for a job with this many shards."""
        slices, nbytes = self.partition_slices, self.partition_bytes
        match self.partition:
            case "fixed":
                return FixedShards(slices or shards)
            case "min":
                return MinSize(nbytes, slices or shards)
            case "max":
                return MaxSize(nbytes, slices)
            case _:
                return Balanced()


@dataclass(frozen=True, slots=True)
class ClusterSettings:
    """The settings of a cluster. They are fixed while the coordinator runs, except for the mode."""

    expected_shards: int = 1
    #: 0: workers join and leave at any time, and the job awaits none.
    expected_workers: int = 0
    #: With ``expected_workers`` 0: how many the start awaits, and the most at the same time; 0: any number.
    least_workers: int = 0
    most_workers: int = 0
    consistency: Consistency = field(default_factory=Consistency)
    partition: PartitionRule = field(default_factory=Balanced)
    lease_seconds: float = setting(
        20.0,
        "A member without a heartbeat for this long counts as dead, for example one that hangs or is cut off from the "
        "network. The end of a process is noticed within 5 seconds. Use more than the longest pause of a busy machine.",
    )
    heartbeat_seconds: float = setting(
        1.0,
        "Interval at which members renew their lease. More than 300 members do so less often, after a quarter of the "
        "lease at most.",
    )
    seed: int = 0
    #: Incarnations count up from here, above those that an earlier coordinator assigned.
    first_incarnation: int = 1
    limits: JobLimits = field(default_factory=JobLimits)
    #: The time at which the steady clock read 0, in seconds since 1970.
    clock_began: float = 0.0
    #: Name of the job, for people, metrics and logs.
    job: str = DEFAULT_JOB
    #: Random, made at the first start of the job; empty: readers cannot tell the job from another one.
    job_id: str = ""

    @property
    def identity(self) -> JobIdentity:
        """The settings that must be the same at every start of the coordinator of this job."""
        return JobIdentity(
            self.expected_shards,
            self.expected_workers,
            self.partition,
            self.seed,
            self.least_workers,
            self.most_workers,
            self.job_id,
        )

    @property
    def always_workers(self) -> int:
        """The least number of workers of the job while none is missing."""
        return self.expected_workers or self.least_workers


@dataclass(frozen=True, slots=True)
class JobIdentity:
    """The settings that identify a job: placement and shuffling depend on them."""

    expected_shards: int
    expected_workers: int
    partition: PartitionRule
    seed: int
    least_workers: int = 0
    most_workers: int = 0
    #: Empty in a journal of version 0.1.0.
    job_id: str = ""

    @property
    def workers(self) -> WorkerRange:
        """How many workers the job has."""
        if self.expected_workers:
            return WorkerRange(self.expected_workers, self.expected_workers)
        return WorkerRange(self.least_workers, self.most_workers or MOST_RANKS)


def check_same_job(settings: ClusterSettings, kept: JobIdentity) -> None:
    """Raises ConfigError if ``settings`` contradict the journal's ``kept``; the error names every such flag."""
    ours = settings.identity
    named = (
        ("--shards", kept.expected_shards, ours.expected_shards),
        ("--workers", str(kept.workers), str(ours.workers)),
        ("--partition", partition_flags(kept.partition), partition_flags(ours.partition)),
        ("--seed", kept.seed, ours.seed),
    )
    contradictions = [(flag, then, now) for flag, then, now in named if then != now]
    if contradictions:
        raise ConfigError(
            "the journal belongs to a job with other settings",
            expected=", ".join(f"{flag} {then}" for flag, then, _ in contradictions),
            actual=", ".join(f"{flag} {now}" for flag, _, now in contradictions),
            remedy="give the expected flags, or begin a new job in another --data-dir",
        )


def partition_flags(rule: PartitionRule) -> str:
    """The value of --partition that selects ``rule``, with the flags that refine it."""
    match rule:
        case FixedShards(slices):
            return f"fixed --partition-slices {slices}"
        case MinSize(nbytes, slices):
            return f"min --partition-bytes {nbytes} --partition-slices {slices}"
        case MaxSize(nbytes, slices):
            return f"max --partition-bytes {nbytes} --partition-slices {slices}"
        case _:
            return "balanced"


def check_consistency(consistency: Consistency, expected_workers: int) -> None:
    """Raises InvalidRequest for a mode that contradicts itself or cannot work with this number of workers.

    ``expected_workers``: how many the job has at least; 0: it may have any number.
    """
    mode, shown = consistency.mode, str(consistency)
    if min(consistency.staleness, consistency.backup, consistency.stale_threshold) < 0:
        raise InvalidRequest("staleness, backup and stale threshold are not negative", actual=shown)
    if not 0 <= consistency.grace_seconds < math.inf:
        raise InvalidRequest("a grace time is a number of seconds, not negative", actual=f"{consistency.grace_seconds}")
    if consistency.grace_seconds and not consistency.backup:
        raise InvalidRequest(
            "a grace time needs sync with backup: otherwise a step waits for every live worker, or for none",
            expected="mode sync, backup 1 or more",
            actual=f"mode {mode.value}, backup {consistency.backup}, grace_seconds {consistency.grace_seconds:g}",
            remedy="use sync with backup, or leave the grace time out",
        )
    if consistency.staleness and not mode.takes_staleness:
        raise InvalidRequest(
            f"staleness {consistency.staleness} is for ssp only", actual=shown, remedy="use ssp, or leave staleness out"
        )
    if consistency.stale_policy is not StalePolicy.ACCEPT and mode.collects:
        raise InvalidRequest(
            "sync has no stale pushes: late ones are dropped", actual=shown, remedy="use the policy accept"
        )
    if not consistency.backup:
        return
    if not mode.collects:
        raise InvalidRequest(
            f"backup {consistency.backup} is for sync only", actual=shown, remedy="use sync, or leave backup out"
        )
    if consistency.backup >= expected_workers:
        raise InvalidRequest(
            "a step of sync cannot omit that many pushes",
            expected=f"backup below the number of workers, {expected_workers or 'which must be known: --workers'}",
            actual=shown,
            remedy="lower --backup or raise --workers",
        )
