"""Histories of jobs, made by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ps_protocol.cluster.history import JobHistory
from ps_protocol.cluster.view import ClusterStatus, ClusterView, Member, MemberStats, MemberStatus, Role
from ps_protocol.cluster.weights import WeightsPiece, WeightsReader, WeightsState, WeightsVersion
from ps_protocol.model.spec import Consistency


def entry(
    role: Role,
    index: int,
    gone: str = "",
    heard: float = 0.1,
    incarnation: int = 1,
    ended_at: float = 0.0,
    **stats: Any,
) -> MemberStatus:
    address = f"127.0.0.1:{7000 + index}" if role is Role.SHARD else ""
    member = Member(role, index, incarnation, address)
    return MemberStatus(member, heard, MemberStats(**stats), "host", 7, gone, ended_at)


def worker(rank: int, **more: Any) -> MemberStatus:
    return entry(Role.WORKER, rank, **more)


def shard(number: int, **more: Any) -> MemberStatus:
    return entry(Role.SHARD, number, **more)


def history(*members: MemberStatus, consistency: Consistency | None = None, **more: Any) -> JobHistory:
    """A job that trains, of which ``members`` are told; ``more`` are fields of its view or of the history."""
    view = ClusterView(
        revision=1,
        members=tuple(each.member for each in members if not each.gone),
        consistency=consistency or Consistency(),
        expected_shards=max(1, sum(each.member.role is Role.SHARD for each in members)),
        started=True,
    )
    names = {name for name in more if hasattr(view, name)}
    view = replace(view, **{name: more.pop(name) for name in names})
    return JobHistory(ClusterStatus(view, members, at_seconds=1010.0), 1010.0, 1000.0, **more)


def publication(name: str = "policy", *readers: WeightsReader, **more: Any) -> WeightsState:
    """Weights with version 7 of step 70, published 90 s before the moment of ``history``."""
    version = WeightsVersion(7, "model", 70, "", 920.0, (WeightsPiece(0, 1, "", b"", 5000),))
    more = {"versions": (version,), "reader_count": len(readers), **more}
    state = WeightsState(name, "model", 8, 7, readers=readers, **more)
    return replace(state, most_behind=max(map(state.behind, readers), default=0))
