"""Which shards and standbys are lost while their processes may live: what a launcher is told to end."""

from __future__ import annotations

from dataclasses import replace

from ps_protocol.cluster.view import Joined, JoinRequest, Role
from ps_server.coordinator.state import ClusterState
from tests.coordinator.cluster import Cluster


def joins(c: Cluster, role: Role, index: int, pid: int, host: str = "h0") -> Joined:
    address, directory = ("host:1", "") if role is Role.SHARD else ("", f"kept {pid}")
    ask = JoinRequest(role, index, address, f"token {pid} {c.now}", host=host, pid=pid, directory=directory)
    return c.state.membership.join(replace(ask, take_over=role is Role.SHARD), c.now).value


def lost(state: ClusterState) -> list[tuple[str, int]]:
    return [(str(each.member), each.pid) for each in state.membership.lost_servers]


def expired(c: Cluster) -> Cluster:
    c.now += 10.0
    c.state.membership.expire(c.now)
    return c


def test_shards_and_standbys_whose_leases_ended_are_lost_and_no_others() -> None:
    c = Cluster(expected_shards=2)
    joins(c, Role.SHARD, 0, 10)
    joins(c, Role.SHARD, 1, 11)
    joins(c, Role.STANDBY, 1, 12)
    c.worker()
    left = joins(c, Role.SHARD, 0, 13)
    c.leave(left, "stopped")
    assert lost(c.state) == []
    assert lost(expired(c).state) == [("shard 1", 11), ("standby 1", 12)]
    assert [each.gone for each in c.state.membership.lost_servers] == ["its lease of 5 s ended"] * 2


def test_a_process_that_has_come_back_is_not_lost_whatever_its_place() -> None:
    c = Cluster()
    joins(c, Role.SHARD, 0, 10)
    expired(c)
    # Another one took the place, and the one before it still hangs.
    joins(c, Role.SHARD, 0, 11)
    assert lost(c.state) == [("shard 0", 10)]
    joins(c, Role.STANDBY, 0, 10, host="h1")
    assert lost(c.state) == [("shard 0", 10)]
    c.now += 1.0
    c.state.membership.leave(Role.STANDBY, 0, c.state.membership.members[-1].incarnation, "", c.now)
    joins(c, Role.STANDBY, 0, 10)
    assert lost(c.state) == []


def test_of_each_place_the_last_is_told() -> None:
    c = Cluster()
    joins(c, Role.SHARD, 0, 10)
    expired(c)
    joins(c, Role.SHARD, 0, 11)
    assert lost(expired(c).state) == [("shard 0", 11)]


def test_more_shards_than_former_members_are_remembered_are_all_told() -> None:
    c = Cluster(expected_shards=40)
    for number in range(40):
        joins(c, Role.SHARD, number, 1000 + number)
    assert len(lost(expired(c).state)) == 40


def test_a_coordinator_that_is_started_again_knows_them_from_its_journal() -> None:
    c = Cluster(expected_shards=2)
    joins(c, Role.SHARD, 0, 10)
    joins(c, Role.SHARD, 1, 11)
    c.leave(joins(c, Role.SHARD, 1, 12), "stopped")
    expired(c)
    again = ClusterState(c.settings)
    again.membership.restore(c.state.membership.persisted_state(), c.now, finished=False)
    assert lost(again) == [("shard 0", 10)]
