"""Between the dataclasses of ps_protocol.cluster.view and the messages of the coordinator."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import islice
from typing import TypeVar

from ps_protocol.cluster.closed_model import ClosedModelAsk
from ps_protocol.cluster.events import JobEvent
from ps_protocol.cluster.job import DEFAULT_JOB, job_name
from ps_protocol.cluster.view import (
    BarrierState,
    ClusterStatus,
    ClusterView,
    Joined,
    Member,
    MemberStats,
    MemberStatus,
    MoveProgress,
    Role,
)
from ps_protocol.errors import ConfigError, InvalidRequest
from ps_protocol.text import printable
from ps_protocol.v1 import coordinator_pb2 as pb
from ps_protocol.wire.convert.enums import enum_member
from ps_protocol.wire.convert.held import (
    log_counts_from_pb,
    log_counts_to_pb,
    table_counts_from_pb,
    table_counts_to_pb,
)
from ps_protocol.wire.convert.model import consistency_from_pb, consistency_to_pb

#: What is kept of a member's statistics, so that no member crowds out the others.
_MAX_NAMED = 64
_MAX_TEXT = 256
_LAST_MOMENT = 253402300799.0
"""The end of the year 9999, in seconds since 1970."""

N = TypeVar("N")

_ROLES: dict[Role, pb.Role] = {r: getattr(pb, f"ROLE_{r.name}") for r in Role}


def event_to_pb(event: JobEvent) -> pb.JobEvent:
    """The wire form of an event."""
    return pb.JobEvent(number=event.number, at_seconds=event.at_seconds, text=event.text, warning=event.warning)


def event_from_pb(message: pb.JobEvent) -> JobEvent:
    """An event, with a text that can be shown."""
    return JobEvent(message.number, message.at_seconds, printable(message.text), message.warning)


def role_to_pb(role: Role) -> pb.Role:
    """The wire's number of ``role``."""
    return _ROLES[role]


def role_from_pb(number: int) -> Role:
    """Raises InvalidRequest for a number this version does not know."""
    return enum_member(_ROLES, number, "role")


def member_to_pb(member: Member) -> pb.Member:
    """The wire form of a member."""
    return pb.Member(
        role=_ROLES[member.role], index=member.index, incarnation=member.incarnation, address=member.address
    )


def member_from_pb(message: pb.Member) -> Member:
    """Raises InvalidRequest for an unknown role."""
    return Member(role_from_pb(message.role), message.index, message.incarnation, printable(message.address))


def joined_to_pb(joined: Joined) -> pb.JoinReply:
    """The wire form of a join's answer; role and address are the asker's own."""
    return pb.JoinReply(
        index=joined.member.index,
        incarnation=joined.member.incarnation,
        lease_seconds=joined.lease_seconds,
        heartbeat_seconds=joined.heartbeat_seconds,
        revision=joined.revision,
        seed=joined.seed,
        phase=joined.phase,
        job=joined.job,
    )


def joined_from_pb(message: pb.JoinReply, role: Role, address: str) -> Joined:
    """What the process that asked as ``role`` at ``address`` was told."""
    return Joined(
        member=Member(role, message.index, message.incarnation, address),
        lease_seconds=message.lease_seconds,
        heartbeat_seconds=message.heartbeat_seconds,
        revision=message.revision,
        seed=message.seed,
        phase=message.phase,
        job=_job_from_pb(message.job),
    )


def _job_from_pb(name: str) -> str:
    """Raises InvalidRequest for what can name no job; a coordinator may tell none."""
    try:
        return name and job_name("the name that the coordinator tells", name)
    except ConfigError as error:
        raise InvalidRequest(error.message, expected=error.expected, actual=error.actual) from error


def stats_to_pb(stats: MemberStats) -> pb.MemberStats:
    """The wire form of a member's statistics."""
    return pb.MemberStats(
        steps=stats.steps,
        version=stats.version,
        steps_per_second=stats.steps_per_second,
        bytes_per_second=stats.bytes_per_second,
        samples_per_second=stats.samples_per_second,
        staleness=stats.staleness,
        metrics=dict(stats.metrics),
        transport=stats.transport,
        samples=stats.samples,
        dropped=stats.dropped,
        standby_lag=stats.standby_lag,
        activity=stats.activity,
        versions=dict(stats.versions),
        phase=stats.phase,
        clock=stats.clock,
        wait_seconds=dict(stats.wait_seconds),
        streams=dict(stats.streams),
        held_bytes=stats.held_bytes,
        log=log_counts_to_pb(stats.log) if stats.log else None,
        tables=map(table_counts_to_pb, stats.tables),
        metrics_address=stats.metrics_address,
        queued_pushes=stats.queued_pushes,
        queued_bytes=stats.queued_bytes,
        certificate_ends=stats.certificate_ends,
    )


def stats_from_pb(message: pb.MemberStats) -> MemberStats:
    """A member's statistics: its first metrics and versions, and texts cut where they are very long."""
    return MemberStats(
        steps=message.steps,
        version=message.version,
        steps_per_second=message.steps_per_second,
        bytes_per_second=message.bytes_per_second,
        samples_per_second=message.samples_per_second,
        staleness=message.staleness,
        metrics=_first_named(message.metrics),
        transport=printable(message.transport[:_MAX_TEXT]),
        samples=message.samples,
        dropped=message.dropped,
        standby_lag=message.standby_lag if message.HasField("standby_lag") else None,
        activity=printable(message.activity[:_MAX_TEXT]),
        versions=_first_named(message.versions),
        phase=message.phase,
        clock=message.clock,
        wait_seconds=_first_named(message.wait_seconds),
        streams=_first_named(message.streams),
        held_bytes=message.held_bytes,
        log=log_counts_from_pb(message.log) if message.HasField("log") else None,
        tables=tuple(map(table_counts_from_pb, message.tables[:_MAX_NAMED])),
        metrics_address=printable(message.metrics_address[:_MAX_TEXT]),
        queued_pushes=message.queued_pushes,
        queued_bytes=message.queued_bytes,
        certificate_ends=_moment(message.certificate_ends),
    )


def _moment(seconds: float) -> float:
    """Seconds since 1970 that a calendar has; 0 for others."""
    return seconds if 0 < seconds < _LAST_MOMENT else 0.0


def _first_named(numbers: Mapping[str, N]) -> dict[str, N]:
    return {printable(name[:_MAX_TEXT]): value for name, value in islice(numbers.items(), _MAX_NAMED)}


def view_to_pb(view: ClusterView) -> pb.ClusterView:
    """The wire form of a cluster view."""
    return pb.ClusterView(
        revision=view.revision,
        members=[member_to_pb(m) for m in view.members],
        consistency=consistency_to_pb(view.consistency),
        models=[pb.ModelEpoch(name=name, epoch=epoch) for name, epoch in view.models.items()],
        expected_shards=view.expected_shards,
        expected_workers=view.expected_workers,
        started=view.started,
        finished=view.finished,
        released=view.released,
        spare=sorted(view.spare),
        moving=view.moving,
        journal_mark=view.journal_mark,
        released_models=[pb.ModelEpoch(name=name, epoch=epoch) for name, epoch in view.released_models.items()],
        least_workers=view.least_workers,
        wanted_workers=view.wanted_workers,
        wanted_shards=view.wanted_shards,
    )


def view_from_pb(message: pb.ClusterView) -> ClusterView:
    """Raises InvalidRequest for an unknown role or mode."""
    return ClusterView(
        revision=message.revision,
        members=tuple(member_from_pb(m) for m in message.members),
        consistency=consistency_from_pb(message.consistency),
        models={m.name: m.epoch for m in message.models},
        expected_shards=message.expected_shards,
        expected_workers=message.expected_workers,
        started=message.started,
        finished=message.finished,
        released=message.released,
        spare=frozenset(message.spare),
        moving=printable(message.moving),
        journal_mark=message.journal_mark,
        released_models={m.name: m.epoch for m in message.released_models},
        least_workers=message.least_workers,
        wanted_workers=message.wanted_workers if message.HasField("wanted_workers") else None,
        wanted_shards=message.wanted_shards if message.HasField("wanted_shards") else None,
    )


def encoded_member(member: Member) -> bytes:
    """The bytes of a view of nothing but ``member``."""
    return pb.ClusterView(members=[member_to_pb(member)]).SerializeToString()


def changed_view_to_pb(view: ClusterView, before: ClusterView) -> pb.ClusterView:
    """``view`` for one who has ``before``, whose members are the same objects where they have not changed.

    The whole view where that is shorter.
    """
    had, has = set(map(id, before.members)), set(map(id, view.members))
    changed = [member for member in view.members if id(member) not in had]
    taken = {(member.role, member.index) for member in changed}
    gone = [m for m in before.members if id(m) not in has and (m.role, m.index) not in taken]
    if not before.revision or len(changed) + len(gone) >= len(view.members):
        return view_to_pb(view)
    message = view_to_pb(replace(view, members=tuple(changed)))
    message.base_revision = before.revision
    message.gone.extend(map(member_to_pb, gone))
    return message


def changed_view_from_pb(message: pb.ClusterView, before: ClusterView) -> ClusterView:
    """The view that ``message`` tells, after ``before``; a whole one is taken as it is.

    Raises InvalidRequest for an unknown role or mode, and for changes since another view than ``before``.
    """
    view = view_from_pb(message)
    if not message.base_revision:
        return view
    if message.base_revision != before.revision:
        raise InvalidRequest(
            "a view of the cluster tells changes since a view that was not told",
            expected=f"changes since revision {before.revision}",
            actual=f"changes since revision {message.base_revision}",
        )
    other = {(member.role, member.index) for member in view.members}
    other.update((role_from_pb(place.role), place.index) for place in message.gone)
    same = (member for member in before.members if (member.role, member.index) not in other)
    members = sorted((*same, *view.members), key=lambda member: (member.role.value, member.index))
    return replace(view, members=tuple(members))


def closed_model_to_pb(worker: Member, ask: ClosedModelAsk, wait_seconds: float) -> pb.CloseModelRequest:
    """The wire form of what ``worker`` asks."""
    return pb.CloseModelRequest(
        rank=worker.index,
        incarnation=worker.incarnation,
        model=ask.model,
        epoch=ask.epoch,
        release=ask.release,
        wait_seconds=wait_seconds,
    )


def closed_model_from_pb(message: pb.CloseModelRequest) -> ClosedModelAsk:
    """Raises InvalidRequest without an epoch."""
    if not message.epoch:
        raise InvalidRequest("a model that was closed had a shard map", expected="its epoch, from 1", actual="0")
    return ClosedModelAsk(message.model, message.epoch, message.release)


def barrier_to_pb(state: BarrierState) -> pb.BarrierReply:
    """The wire form of a barrier's state."""
    return pb.BarrierReply(released=state.released, missing_ranks=state.missing_ranks)


def barrier_from_pb(message: pb.BarrierReply) -> BarrierState:
    """A barrier's state."""
    return BarrierState(message.released, tuple(message.missing_ranks))


def progress_to_pb(progress: MoveProgress) -> pb.ReshardProgress:
    """The wire form of a move's progress."""
    return pb.ReshardProgress(
        moved_bytes=progress.moved_bytes,
        total_bytes=progress.total_bytes,
        batches=progress.batches,
        pause_seconds=progress.pause_seconds,
    )


def progress_from_pb(message: pb.ReshardProgress) -> MoveProgress:
    """A move's progress."""
    return MoveProgress(message.moved_bytes, message.total_bytes, message.batches, message.pause_seconds)


def status_to_pb(status: ClusterStatus) -> pb.ClusterStatus:
    """The wire form of a cluster's status."""
    members = [
        pb.MemberStatus(
            member=member_to_pb(m.member),
            seconds_since_heartbeat=m.seconds_since_heartbeat,
            stats=stats_to_pb(m.stats),
            host=m.host,
            pid=m.pid,
            gone=m.gone,
            ended_at=m.ended_at,
        )
        for m in status.members
    ]
    return pb.ClusterStatus(
        view=view_to_pb(status.view),
        members=members,
        metrics_url=status.metrics_url,
        decisions=map(event_to_pb, status.decisions),
        at_seconds=status.at_seconds,
        certificate_ends=status.certificate_ends,
        job=status.job,
    )


def status_from_pb(message: pb.ClusterStatus) -> ClusterStatus:
    """Raises InvalidRequest for an unknown role or mode."""
    members = (
        MemberStatus(
            member=member_from_pb(m.member),
            seconds_since_heartbeat=m.seconds_since_heartbeat,
            stats=stats_from_pb(m.stats),
            host=printable(m.host),
            pid=m.pid,
            gone=printable(m.gone),
            ended_at=m.ended_at,
        )
        for m in message.members
    )
    return ClusterStatus(
        view_from_pb(message.view),
        tuple(members),
        printable(message.metrics_url),
        tuple(map(event_from_pb, message.decisions)),
        message.at_seconds,
        _moment(message.certificate_ends),
        _job_from_pb(message.job) or DEFAULT_JOB,
    )
