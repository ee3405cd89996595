"""Who may hold a shard's place: a process that brings state must bring the newest."""

import pytest

from ps_protocol.cluster.view import Joined, JoinRequest, Role
from ps_protocol.errors import Fenced, InvalidRequest
from tests.coordinator.cluster import Cluster


def keeping(c: Cluster, state: int = 0) -> Joined:
    """A shard that joined with ``state`` and has its own on disk."""
    joined = c.shard(state=state)
    c.keep(joined)
    return joined


def test_a_shard_killed_before_it_wrote_under_its_new_incarnation_still_has_the_newest_state() -> None:
    c = Cluster()
    first = keeping(c)
    for _ in range(3):
        c.shard(state=first.member.incarnation)
    assert c.keep(c.shard(state=first.member.incarnation))


def test_an_old_primary_is_refused_after_its_standby_took_over_naming_both_incarnations_and_the_remedy() -> None:
    c = Cluster()
    primary = keeping(c)
    standby = keeping(c, primary.member.incarnation)
    view = c.state.view
    old, new = primary.member.incarnation, standby.member.incarnation
    told = rf"newer state elsewhere.*shard: 0; expected: state of incarnation {new}; actual: state of incarnation {old}"
    with pytest.raises(Fenced, match=told) as caught:
        c.shard(state=old)
    assert "--standby" in caught.value.remedy
    assert "data directory" in caught.value.remedy
    assert c.state.view is view
    c.heartbeat(standby)


def test_an_old_primary_is_refused_also_when_the_standby_has_died_since() -> None:
    c = Cluster(lease_seconds=5.0)
    primary = keeping(c)
    standby = keeping(c, primary.member.incarnation)
    c.now = 100.0
    c.state.membership.expire(c.now)
    with pytest.raises(Fenced):
        c.shard(state=primary.member.incarnation)
    c.shard(state=standby.member.incarnation)


def test_a_taker_that_has_not_announced_its_state_does_not_lock_the_old_primary_out() -> None:
    c = Cluster()
    primary = keeping(c)
    taker = c.shard(state=primary.member.incarnation)
    c.shard(state=primary.member.incarnation)
    with pytest.raises(Fenced):
        c.keep(taker)


def test_a_shard_without_state_takes_the_place_and_the_last_writer_may_take_it_back() -> None:
    c = Cluster()
    first = keeping(c)
    c.shard()
    c.shard(state=first.member.incarnation)


def test_a_shard_that_began_empty_and_keeps_state_locks_out_what_was_before_it() -> None:
    c = Cluster()
    first = keeping(c)
    keeping(c)
    with pytest.raises(Fenced, match="newer state"):
        c.shard(state=first.member.incarnation)


def test_announcing_again_says_nothing_new_and_does_not_touch_other_shards() -> None:
    c = Cluster(expected_shards=2)
    zero, one = c.shard(0), c.shard(1)
    assert c.keep(zero) == f"shard 0 keeps its state as incarnation {zero.member.incarnation}"
    assert c.keep(zero) == ""
    c.shard(1, state=1)
    with pytest.raises(Fenced):
        c.keep(one)


def test_a_coordinator_that_knows_nothing_accepts_any_state_and_counts_on_above_it() -> None:
    c = Cluster()
    first = c.shard(state=5000)
    assert first.member.incarnation == 5001
    assert c.worker().member.incarnation == 5002
    with pytest.raises(Fenced):
        c.shard(state=4999)


@pytest.mark.parametrize(("role", "state"), [(Role.WORKER, 1), (Role.EVALUATOR, 1), (Role.SHARD, 1 << 63)])
def test_state_that_cannot_be_is_refused(role: Role, state: int) -> None:
    c = Cluster()
    with pytest.raises(InvalidRequest, match=f"a {role.value} cannot hold state of incarnation {state}"):
        c.state.membership.join(JoinRequest(role, 0, "host:1", "token", data_incarnation=state), 0.0)
    assert c.worker().member.incarnation == 100


def test_a_worker_that_says_it_keeps_state_changes_nothing() -> None:
    c = Cluster()
    assert c.keep(c.worker()) == ""
