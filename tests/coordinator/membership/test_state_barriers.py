import pytest

from ps_protocol.cluster.view import Joined
from ps_protocol.errors import Fenced, InvalidRequest
from tests.coordinator.cluster import Cluster


def started(workers: int) -> tuple[Cluster, list[Joined]]:
    c = Cluster()
    c.shard()
    return c, [c.worker() for _ in range(workers)]


def test_a_barrier_opens_when_every_live_worker_has_arrived() -> None:
    c, (a, b) = started(2)
    assert not c.arrive(a)
    assert not c.arrive(a)
    assert c.state.membership.arrive(a.member.index, a.member.incarnation, 0).value.missing_ranks == (1,)
    assert c.arrive(b)
    assert c.state.membership.phase == 1


def test_a_barrier_that_has_opened_answers_at_once() -> None:
    c, (a, b) = started(2)
    c.arrive(a), c.arrive(b)
    assert c.arrive(a, phase=0)
    assert not c.arrive(a, phase=1)


def test_the_barrier_of_a_phase_that_has_not_begun_is_refused() -> None:
    c, (a,) = started(1)
    with pytest.raises(InvalidRequest, match="expected: phase 0; actual: phase 1"):
        c.arrive(a, phase=1)


@pytest.mark.parametrize("how", ["leave", "lease"])
def test_a_barrier_opens_when_the_last_missing_worker_goes(how: str) -> None:
    c, (a, b) = started(2)
    c.arrive(a)
    if how == "leave":
        reason = c.leave(b)
    else:
        c.now = 4.0
        c.heartbeat(a)
        reason = c.state.membership.expire(5.0).reason
    assert "barrier of phase 0 opens for 1 workers" in reason
    assert c.arrive(a, phase=0)


def test_a_replaced_worker_has_to_arrive_again() -> None:
    c, (a, b) = started(2)
    c.arrive(a)
    again = c.worker(0)
    assert not c.arrive(b)
    with pytest.raises(Fenced):
        c.arrive(a)
    assert c.arrive(again)


def test_a_barrier_waits_for_expected_workers_that_have_not_joined_yet() -> None:
    c = Cluster(expected_workers=2)
    c.shard()
    a = c.worker()
    assert c.state.membership.arrive(0, a.member.incarnation, 0).value.missing_ranks == (1,)
    assert not c.arrive(a)
    assert c.arrive(c.worker())


def test_a_barrier_opens_when_the_start_was_all_it_waited_for() -> None:
    c = Cluster()
    a = c.worker()
    assert not c.arrive(a)
    c.shard()
    assert c.state.membership.phase == 1
    assert c.arrive(a)
