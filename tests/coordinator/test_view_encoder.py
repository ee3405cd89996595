"""Watchers are sent what has changed of a view, and have the whole of it. Pure; costs about 1 CPU s."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ps_protocol.client.coordinator_streams import ViewStream
from ps_protocol.cluster.view import ClusterView, Joined, JoinRequest, Member, Role
from ps_protocol.errors import InvalidRequest
from ps_protocol.model.spec import Consistency, Mode
from ps_protocol.v1 import coordinator_pb2 as pb
from ps_protocol.wire.convert.cluster import VIEW, changed_view_from_pb
from ps_server.coordinator import views as view_encoder
from ps_server.coordinator.membership.members import Members, SavedMember
from ps_server.coordinator.views import ViewEncoder
from tests.coordinator.cluster import Cluster


def received(messages: Iterable[bytes]) -> list[ClusterView]:
    """What a client makes of one stream."""
    return list(ViewStream([pb.ClusterView.FromString(each) for each in messages], "the coordinator"))


@st.composite
def histories(draw: st.DrawFn) -> list[ClusterView]:
    """The views of a cluster that workers and shards join, leave, and in which they replace each other."""
    c = Cluster(expected_shards=3)
    views = []
    for _ in range(draw(st.integers(1, 25))):
        held = [member for member in c.state.view.members if member.role is Role.WORKER]
        if held and draw(st.booleans()):
            gone = draw(st.sampled_from(held))
            c.state.membership.leave(gone.role, gone.index, gone.incarnation, "", 0.0)
        elif draw(st.integers(0, 4)) == 0:
            c.shard(draw(st.integers(0, 2)))
        else:
            c.worker(draw(st.integers(0, 7)))
        views.append(c.state.view)
    return views


@given(histories(), st.data())
def test_every_watcher_has_the_views_that_were_told(views: list[ClusterView], data: st.DataObject) -> None:
    encoder = ViewEncoder()
    watchers: list[tuple[list[ClusterView], list[bytes]]] = [([], []) for _ in range(4)]
    for view in views:
        for told, messages in watchers:
            if data.draw(st.booleans()):
                messages.append(encoder.encode(view, told[-1] if told else None))
                told.append(view)
    for told, messages in watchers:
        assert received(messages) == told


def many(count: int) -> ClusterView:
    return ClusterView(9, tuple(Member(Role.WORKER, rank, rank + 1) for rank in range(count)))


def test_a_change_costs_what_has_changed() -> None:
    encoder, before = ViewEncoder(), many(1000)
    after = replace(before, revision=10, members=(*before.members[1:], Member(Role.WORKER, 1000, 2000)))
    message = pb.ClusterView.FromString(encoder.encode(after, before))
    assert [place.index for place in message.members] == [1000]
    assert [place.index for place in message.gone] == [0]
    assert (message.base_revision, message.revision) == (9, 10)
    assert len(encoder.encode(after, before)) < 100 < 5_000 < len(encoder.encode(after))


def test_a_change_of_the_mode_tells_no_members() -> None:
    before = many(1000)
    after = replace(before, revision=10, consistency=Consistency(Mode.SYNC))
    message = pb.ClusterView.FromString(ViewEncoder().encode(after, before))
    assert not message.members
    assert changed_view_from_pb(message, before) == after


def test_a_view_with_nothing_in_common_is_sent_whole() -> None:
    message = pb.ClusterView.FromString(ViewEncoder().encode(replace(many(3), revision=10), ClusterView(9)))
    assert (message.base_revision, len(message.members)) == (0, 3)


def test_a_view_without_a_revision_is_no_base() -> None:
    before = replace(many(10), revision=0)
    assert pb.ClusterView.FromString(ViewEncoder().encode(replace(before, revision=1), before)).base_revision == 0


def test_watchers_that_are_told_the_same_share_its_bytes() -> None:
    encoder, before = ViewEncoder(), many(10)
    after = replace(before, revision=10)
    assert encoder.encode(after, before) is encoder.encode(after, before)
    assert encoder.encode(after) is encoder.encode(after)


def test_too_many_different_watchers_are_sent_the_whole_view(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(view_encoder, "MOST_CHANGES", 2)
    encoder, after = ViewEncoder(), replace(many(10), revision=99)
    bases = [
        pb.ClusterView.FromString(encoder.encode(after, replace(after, revision=revision))).base_revision
        for revision in (1, 2, 3, 2)
    ]
    assert bases == [1, 2, 0, 2]


def test_members_that_have_gone_are_forgotten() -> None:
    encoder = ViewEncoder()
    encoder.encode(many(100))
    encoder.encode(many(3))
    assert len(encoder._members) == 3


def test_changes_since_a_view_that_was_not_told_are_refused() -> None:
    before = many(10)
    message = pb.ClusterView.FromString(ViewEncoder().encode(replace(before, revision=10), before))
    with pytest.raises(InvalidRequest, match=r"a view that did not come.*revision 8.*revision 9"):
        changed_view_from_pb(message, replace(before, revision=8))
    with pytest.raises(InvalidRequest, match="revision 0"):
        list(ViewStream([message], "the coordinator"))


def test_one_who_takes_no_changes_is_sent_none() -> None:
    encoder, view = ViewEncoder(), many(10)
    encoder.encode(replace(view, revision=10), view)
    assert VIEW.from_pb(pb.ClusterView.FromString(encoder.encode(replace(view, revision=11)))).members == view.members


@given(st.lists(st.tuples(st.sampled_from(Role), st.integers(0, 5))))
def test_members_are_in_the_order_of_their_roles_and_numbers(places: list[tuple[Role, int]]) -> None:
    members, held = Members(), {}
    for number, place in enumerate(places):
        if place in held:
            record = members.holder(*place)
            assert record is not None
            members.end(record, "left", 0.0)
            del held[place]
        else:
            held[place] = Member(*place, number)
            members.begin(_saved(held[place]), 0.0)
        expected = sorted(held.values(), key=lambda member: (member.role.value, member.index))
        assert members.members == tuple(expected)


def _saved(member: Member) -> SavedMember:
    ask = JoinRequest(member.role, member.index, "", f"token {member.incarnation}")
    return SavedMember(ask, Joined(member, 20.0, 1.0, 1, 0, 0))
