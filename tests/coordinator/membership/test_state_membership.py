import gc

import pytest

from ps_protocol import PROTOCOL_VERSION
from ps_protocol.cluster.view import JoinRequest, MemberStats, Role
from ps_protocol.errors import Fenced, InvalidRequest, ProtocolVersionMismatch, UnknownShard
from ps_server.coordinator.membership.members import GONE_KEPT
from tests.coordinator.cluster import Cluster
from tests.support.length import choose


def test_workers_without_a_rank_get_the_lowest_free_one() -> None:
    c = Cluster()
    first, _, _ = c.worker(), c.worker(), c.worker()
    c.leave(first)
    assert c.worker().member.index == 0
    assert c.worker().member.index == 3


def test_incarnations_rise_from_the_start_value() -> None:
    c = Cluster()
    assert [c.worker().member.incarnation for _ in range(3)] == [100, 101, 102]


def test_a_repeated_join_gets_the_same_answer_and_changes_nothing() -> None:
    c = Cluster()
    first = c.worker(token="mine")
    view = c.state.view
    assert c.worker(token="mine") == first
    assert c.state.view is view


@pytest.mark.parametrize(
    ("role", "index"), [(Role.WORKER, 1), (Role.EVALUATOR, 0), (Role.SHARD, 0)], ids=["another rank", "role", "shard"]
)
def test_the_token_of_another_place_gets_no_membership(role: Role, index: int) -> None:
    c = Cluster()
    c.worker(0, token="mine")
    view = c.state.view
    with pytest.raises(InvalidRequest, match="the join of another place") as caught:
        c.state.membership.join(JoinRequest(role, index, "host:1", "mine"), 0.0)
    assert (caught.value.expected, caught.value.actual) == ("worker 0", f"{role.value} {index}")
    assert caught.value.remedy
    assert c.state.view is view


def test_the_revision_of_a_join_is_the_first_view_that_shows_the_member() -> None:
    c = Cluster()
    joined = c.worker()
    assert joined.revision == c.state.view.revision
    assert joined.member in c.state.view.members


@pytest.mark.parametrize("role", [Role.WORKER, Role.EVALUATOR, Role.SHARD])
@pytest.mark.parametrize("proof", ["lineage", "take over"])
def test_the_next_process_of_a_place_fences_the_one_before_it(role: Role, proof: str) -> None:
    c = Cluster()
    lineage = "job 7" if proof == "lineage" else ""
    old = c.state.membership.join(JoinRequest(role, 0, "host:1", "first", lineage=lineage), 0.0).value
    ask = JoinRequest(role, 0, "host:2", "other", lineage=lineage, take_over=proof == "take over")
    decision = c.state.membership.join(ask, 0.0)
    assert f"incarnation {old.member.incarnation} is fenced" in decision.reason
    assert list(c.state.view.live(role).values()) == [decision.value.member]
    with pytest.raises(Fenced, match="incarnation 101 took its place") as caught:
        c.heartbeat(old)
    assert caught.value.remedy


def test_a_shard_number_out_of_range_is_refused_naming_the_range() -> None:
    with pytest.raises(UnknownShard, match=r"no shard 3.*expected: 0 to 2.*--shards 4"):
        Cluster(expected_shards=3).shard(3)


@pytest.mark.parametrize("ask", [JoinRequest(Role.SHARD, None, "host:1", "t"), JoinRequest(Role.SHARD, 0, "", "t")])
def test_a_shard_needs_a_number_and_an_address(ask: JoinRequest) -> None:
    with pytest.raises(InvalidRequest, match="number and the address"):
        Cluster().state.membership.join(ask, 0.0)


def test_another_protocol_version_is_refused_naming_both() -> None:
    ours = f"worker speaks protocol version 99, the coordinator {PROTOCOL_VERSION}"
    with pytest.raises(ProtocolVersionMismatch, match=ours):
        Cluster().state.membership.join(JoinRequest(Role.WORKER, None, "", "t", protocol_version=99), 0.0)


def test_a_join_without_a_token_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="token"):
        Cluster().worker(token="")


def test_the_seed_and_the_phase_come_with_the_join() -> None:
    c = Cluster(seed=7)
    c.shard()
    first = c.worker()
    c.arrive(first)
    assert (first.seed, first.phase, c.worker().phase) == (7, 0, 1)


# Leases


def test_a_silent_member_is_removed_at_the_end_of_its_lease_and_not_before() -> None:
    c = Cluster(lease_seconds=5.0)
    silent, alive = c.worker(), c.worker()
    c.now = 4.0
    c.heartbeat(alive)
    assert c.state.membership.next_expiry() == 5.0
    assert c.state.membership.expire(4.9).value == ()
    decision = c.state.membership.expire(5.0)
    assert decision.value == (silent.member,)
    assert "worker 0" in decision.reason
    assert c.state.view.members == (alive.member,)
    with pytest.raises(Fenced, match="its lease of 5 s ended"):
        c.heartbeat(silent)


def test_a_repeated_join_renews_the_lease() -> None:
    c = Cluster(lease_seconds=5.0)
    c.worker(token="mine")
    c.now = 4.0
    c.worker(token="mine")
    assert c.state.membership.next_expiry() == 9.0


def test_extended_leases_end_later() -> None:
    c = Cluster(lease_seconds=5.0)
    c.worker()
    c.state.membership.extend_leases(60.0)
    assert c.state.membership.expire(64.0).value == ()
    assert len(c.state.membership.expire(65.0).value) == 1


def test_a_member_of_an_earlier_coordinator_is_told_so() -> None:
    c = Cluster()
    with pytest.raises(Fenced, match=r"does not know it.*held by nobody.*remedy"):
        c.state.membership.heartbeat(Role.WORKER, 0, 5, MemberStats(), 0.0)


def test_a_member_that_went_is_told_how_also_when_many_have_gone_since() -> None:
    c = Cluster()
    lost = c.worker(0)
    for _ in range(GONE_KEPT + 1):
        c.worker(0)
    with pytest.raises(Fenced, match="incarnation 101 took its place"):
        c.heartbeat(lost)


def test_when_more_have_gone_than_are_remembered_nobody_is_told_of_another_coordinator(monkeypatch) -> None:
    monkeypatch.setattr("ps_server.coordinator.membership.members.FATES_KEPT", 3)
    c = Cluster()
    lost = c.worker(0)
    for _ in range(5):
        c.worker(0)
    with pytest.raises(Fenced, match="so long ago that the reason is no longer known"):
        c.heartbeat(lost)


def test_a_member_whose_connection_ended_is_lost_soon_unless_a_heartbeat_comes() -> None:
    c = Cluster(lease_seconds=60.0)
    dead, blinked = c.worker(), c.worker()
    c.now = 10.0
    for joined in (dead, blinked):
        c.state.membership.disconnected(joined.member.role, joined.member.index, joined.member.incarnation, c.now)
    c.now = 11.0
    c.heartbeat(blinked)
    assert c.state.membership.next_expiry() == 15.0
    assert c.state.membership.expire(15.0).value == (dead.member,)
    assert c.state.membership.next_expiry() == 71.0
    with pytest.raises(Fenced, match="its connection ended, and no heartbeat came"):
        c.heartbeat(dead)


def test_a_member_is_connected_until_its_last_stream_ends() -> None:
    c = Cluster(lease_seconds=60.0)
    who = (Role.WORKER, 0, c.worker().member.incarnation)
    membership = c.state.membership
    membership.connected(*who)
    # It opens another one before the end of the first is noticed here.
    membership.connected(*who)
    membership.disconnected(*who, 10.0)
    assert membership.next_expiry() == 60.0
    membership.disconnected(*who, 20.0)
    assert membership.next_expiry() == 25.0
    membership.connected(*who)
    assert membership.next_expiry() == 60.0
    membership.disconnected(*who, 30.0)
    assert membership.next_expiry() == 35.0


def test_a_stream_of_an_earlier_incarnation_connects_nobody() -> None:
    c = Cluster(lease_seconds=60.0)
    who = (Role.WORKER, 0, c.worker().member.incarnation)
    c.state.membership.disconnected(*who, 0.0)
    c.state.membership.connected(Role.WORKER, 0, who[2] - 1)
    c.state.membership.connected(Role.WORKER, 1, who[2])
    assert c.state.membership.next_expiry() == 5.0


def test_an_ended_connection_makes_no_short_lease_longer_and_concerns_that_incarnation_only() -> None:
    c = Cluster(lease_seconds=2.0)
    first = c.worker(0)
    c.state.membership.disconnected(Role.WORKER, 0, first.member.incarnation, 0.0)
    assert c.state.membership.next_expiry() == 2.0
    c = Cluster(lease_seconds=60.0)
    first, _ = c.worker(0), c.worker(0)
    c.state.membership.disconnected(Role.WORKER, 0, first.member.incarnation, 0.0)
    assert c.state.membership.next_expiry() == 60.0


def test_time_in_which_nobody_could_be_heard_counts_for_ended_connections_too() -> None:
    c = Cluster(lease_seconds=60.0)
    joined = c.worker(0)
    c.state.membership.disconnected(Role.WORKER, 0, joined.member.incarnation, 0.0)
    c.state.membership.extend_leases(30.0)
    assert c.state.membership.next_expiry() == 35.0


def test_leaving_twice_is_harmless_and_leaving_a_lost_place_is_not() -> None:
    c = Cluster()
    left, replaced = c.worker(), c.worker(1)
    assert c.leave(left) == "worker 0 left"
    assert c.leave(left) == ""
    c.worker(1)
    with pytest.raises(Fenced):
        c.leave(replaced)


def test_thousands_of_joins_do_not_grow_the_state() -> None:
    c = Cluster()

    def objects_after(times: int) -> int:
        for _ in range(times):
            c.leave(c.worker())
            c.worker(1)
        gc.collect()
        return len(gc.get_objects())

    before = objects_after(200)
    assert objects_after(choose(10_000, 2_000)) - before < 100
    assert len(c.state.status(0.0).members) == 1 + GONE_KEPT


# Start and finish


def test_the_job_starts_when_all_expected_members_have_been_there() -> None:
    c = Cluster(expected_shards=2, expected_workers=2)
    first = c.worker()
    c.shard(0)
    c.leave(first)
    c.shard(1)
    assert not c.state.view.started
    c.worker(1)
    assert c.state.view.started


def test_the_job_is_finished_when_the_last_worker_has_left_cleanly() -> None:
    c = Cluster()
    c.shard()
    first, second = c.worker(), c.worker()
    c.leave(first)
    assert not c.state.view.finished
    assert "finished" in c.leave(second)
    assert c.state.view.finished
    c.worker()
    assert not c.state.view.finished


@pytest.mark.parametrize("how", ["error", "lease"])
def test_a_job_whose_last_worker_failed_is_not_finished(how: str) -> None:
    c = Cluster()
    worker = c.worker()
    c.now = 4.0
    c.shard()
    if how == "error":
        c.leave(worker, "ValueError: bad data")
    else:
        c.state.membership.expire(5.0)
    assert not c.state.view.live(Role.WORKER)
    assert not c.state.view.finished


# Status


def test_the_status_shows_the_living_with_their_numbers_and_the_gone_with_their_fate() -> None:
    c = Cluster()
    a, b = c.worker(), c.worker()
    c.state.membership.heartbeat(Role.WORKER, 0, a.member.incarnation, MemberStats(steps=9), 2.0)
    c.now = 3.0
    c.leave(b, "KeyboardInterrupt")
    living, gone = c.state.status(5.0).members
    assert (living.member, living.seconds_since_heartbeat, living.stats.steps, living.gone) == (a.member, 3.0, 9, "")
    assert (gone.member, gone.gone) == (b.member, "left: KeyboardInterrupt")
