"""Between the dataclasses of the cluster and the messages of the coordinator."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import islice
from typing import Any

from ps_protocol.cluster.history import CheckpointFacts, Curve, Curves, JobHistory, PlacedVariable
from ps_protocol.cluster.job import DEFAULT_JOB, job_name
from ps_protocol.cluster.leases import LeaseAnswer, LeaseAsk, Span
from ps_protocol.cluster.scaling import ScaleAsk, ScaleOrder, ScaleProgress
from ps_protocol.cluster.view import (
    BarrierState,
    ClosedModelAsk,
    ClusterStatus,
    ClusterView,
    Divergence,
    JobEvent,
    Joined,
    JoinRequest,
    LogCounts,
    Member,
    MemberStats,
    MemberStatus,
    MoveProgress,
    Role,
    TableCounts,
    UpdateCounts,
)
from ps_protocol.errors import ConfigError, InvalidRequest
from ps_protocol.text import printable
from ps_protocol.v1 import coordinator_pb2 as pb
from ps_protocol.wire.convert.fields import GIVEN, Converter, EnumNumbers, Special
from ps_protocol.wire.convert.model import CONSISTENCY
from ps_protocol.wire.convert.weights import STATE as WEIGHTS_STATE

#: What is kept of a member's statistics, so that no member crowds out the others.
_MAX_NAMED = 64
_MAX_TEXT = 256
_LAST_MOMENT = 253402300799.0
"""The end of the year 9999, in seconds since 1970."""

_ROLES = EnumNumbers(Role, pb.Role.DESCRIPTOR)


def role_to_pb(role: Role) -> pb.Role:
    """The number of ``role``."""
    number: pb.Role = _ROLES.numbers[role]
    return number


def role_from_pb(number: int) -> Role:
    """Raises InvalidRequest for a number that this version does not know."""
    return _ROLES.member(number, "role")


def _short(text: str) -> str:
    return printable(text[:_MAX_TEXT])


def _named(numbers: Mapping[str, Any]) -> dict[str, Any]:
    """The first of ``numbers``."""
    return {_short(name): value for name, value in islice(numbers.items(), _MAX_NAMED)}


def _moment(seconds: float) -> float:
    """Seconds since 1970 that a calendar has; 0 for others."""
    return seconds if 0 < seconds < _LAST_MOMENT else 0.0


def _job_name(name: str) -> str:
    """Raises InvalidRequest for what can name no job; empty where the coordinator gives none."""
    try:
        return name and job_name("the name that the coordinator tells", name)
    except ConfigError as error:
        raise InvalidRequest(error.message, expected=error.expected, actual=error.actual) from error


_EPOCHS = Special(
    lambda epochs: [pb.ModelEpoch(name=name, epoch=epoch) for name, epoch in epochs.items()],
    lambda messages: {each.name: each.epoch for each in messages},
)
_NUMBERS = Special(lambda numbers: pb.Numbers(numbers=sorted(numbers)), lambda message: frozenset(message.numbers))
_FIRST_NAMED = Special(dict, _named)
_SHOWN = Special(str, printable)

EVENT = Converter(JobEvent, pb.JobEvent, printable)
MEMBER = Converter(Member, pb.Member, printable)
JOIN = Converter(JoinRequest, pb.JoinRequest, address=_SHOWN, host=_SHOWN)
JOINED = Converter(Joined, pb.JoinReply, member=GIVEN, job=Special(str, _job_name))
TABLE_COUNTS = Converter(TableCounts, pb.TableCounts, _short)
UPDATE_COUNTS = Converter(UpdateCounts, pb.UpdateCounts, _short)
STATS = Converter(
    MemberStats,
    pb.MemberStats,
    _short,
    metrics=_FIRST_NAMED,
    versions=_FIRST_NAMED,
    wait_seconds=_FIRST_NAMED,
    streams=_FIRST_NAMED,
    log=Converter(LogCounts, pb.LogCounts),
    tables=Special(TABLE_COUNTS.all_to_pb, lambda messages: TABLE_COUNTS.all_from_pb(messages[:_MAX_NAMED])),
    certificate_ends=Special(float, _moment),
    updates=Special(UPDATE_COUNTS.all_to_pb, lambda messages: UPDATE_COUNTS.all_from_pb(messages[:_MAX_NAMED])),
)
VIEW = Converter(
    ClusterView,
    pb.ClusterView,
    printable,
    members=MEMBER,
    consistency=CONSISTENCY,
    models=_EPOCHS,
    released_models=_EPOCHS,
)
CLOSED_MODEL = Converter(ClosedModelAsk, pb.CloseModelRequest)
BARRIER = Converter(BarrierState, pb.BarrierReply)
MOVE_PROGRESS = Converter(MoveProgress, pb.ReshardProgress)
DIVERGENCE = Converter(Divergence, pb.Divergence, printable, member=MEMBER)
STATUS = Converter(
    ClusterStatus,
    pb.ClusterStatus,
    printable,
    view=VIEW,
    members=Converter(MemberStatus, pb.MemberStatus, printable, member=MEMBER, stats=STATS),
    decisions=EVENT,
    divergences=DIVERGENCE,
    certificate_ends=Special(float, _moment),
    job=Special(str, lambda name: _job_name(name) or DEFAULT_JOB),
)

SPAN = Converter(Span, pb.ItemSpan)
LEASE_ASK = Converter(
    LeaseAsk,
    pb.LeaseDataRequest,
    trained=SPAN,
    held=Special(
        lambda spans: pb.HeldItems(spans=SPAN.all_to_pb(spans)), lambda message: SPAN.all_from_pb(message.spans)
    ),
)
LEASE_ANSWER = Converter(LeaseAnswer, pb.LeaseDataReply, span=SPAN)

SCALE_ASK = Converter(ScaleAsk, pb.ScaleRequest)
SCALE_PROGRESS = Converter(ScaleProgress, pb.ScaleProgress, printable)
SCALE_ORDER = Converter(ScaleOrder, pb.ScaleOrder, ranks=_NUMBERS, shards=_NUMBERS)

CURVE = Converter(Curve, pb.Curve, printable)
HISTORY = Converter(
    JobHistory,
    pb.JobHistory,
    printable,
    status=STATUS,
    curves=GIVEN,
    events=EVENT,
    checkpoints=Converter(CheckpointFacts, pb.CheckpointFacts, printable),
    placement=Converter(PlacedVariable, pb.PlacedVariable, printable),
    publications=WEIGHTS_STATE,
    wait_shares=Special(
        lambda shares: [pb.WaitShares(rank=rank, shares=dict(each)) for rank, each in shares.items()],
        lambda messages: {
            each.rank: {printable(reason): share for reason, share in each.shares.items()} for each in messages
        },
    ),
    table_growth=Special(
        lambda growth: [
            pb.TableGrowth(model=model, table=table, rows_per_second=rate) for (model, table), rate in growth.items()
        ],
        lambda messages: {(printable(each.model), printable(each.table)): each.rows_per_second for each in messages},
    ),
)


def history_to_pb(history: JobHistory) -> pb.JobHistory:
    """The message of a job's history."""
    curves = history.curves
    return HISTORY.to_pb(
        history,
        times=curves.times,
        curves=CURVE.all_to_pb(curves.curves),
        point_seconds=curves.point_seconds,
        generation=curves.generation,
    )


def history_from_pb(message: pb.JobHistory) -> JobHistory:
    """A job's history. Raises InvalidRequest for an unknown role or mode."""
    times, curves = tuple(message.times), CURVE.all_from_pb(message.curves)
    return HISTORY.from_pb(message, curves=Curves(times, curves, message.point_seconds, message.generation))


def encoded_member(member: Member) -> bytes:
    """The bytes of a view of nothing but ``member``."""
    return pb.ClusterView(members=[MEMBER.to_pb(member)]).SerializeToString()


def changed_view_to_pb(view: ClusterView, before: ClusterView) -> pb.ClusterView:
    """``view`` for a watcher that has ``before``, whose members are the same objects where they have not changed.

    The whole view where that is shorter.
    """
    had, has = set(map(id, before.members)), set(map(id, view.members))
    changed = [member for member in view.members if id(member) not in had]
    taken = {(member.role, member.index) for member in changed}
    gone = [m for m in before.members if id(m) not in has and (m.role, m.index) not in taken]
    if not before.revision or len(changed) + len(gone) >= len(view.members):
        return VIEW.to_pb(view)
    changes = replace(view, members=tuple(changed))
    return VIEW.to_pb(changes, base_revision=before.revision, gone=MEMBER.all_to_pb(gone))


def changed_view_from_pb(message: pb.ClusterView, before: ClusterView) -> ClusterView:
    """The view that ``message`` changes ``before`` to; a whole one as it is.

    Raises InvalidRequest for an unknown role or mode, and for changes of another view than ``before``.
    """
    view = VIEW.from_pb(message)
    if not message.base_revision:
        return view
    if message.base_revision != before.revision:
        raise InvalidRequest(
            "a view of the cluster has changes since a view that did not come",
            expected=f"changes since revision {before.revision}",
            actual=f"changes since revision {message.base_revision}",
        )
    other = {(member.role, member.index) for member in view.members}
    other.update((role_from_pb(place.role), place.index) for place in message.gone)
    same = (member for member in before.members if (member.role, member.index) not in other)
    members = sorted((*same, *view.members), key=lambda member: (member.role.value, member.index))
    return replace(view, members=tuple(members))
