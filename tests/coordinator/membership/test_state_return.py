"""After the last worker was lost a job of a fixed number of workers begins again with all of them, but for the done."""

from __future__ import annotations

import pytest

from ps_protocol.cluster.view import Joined
from ps_server.coordinator.persistence.cluster_records import changed_rows, from_rows
from ps_server.coordinator.state import ClusterState
from tests.coordinator.cluster import Cluster


def running(workers: int = 2) -> tuple[Cluster, list[Joined]]:
    c = Cluster(expected_workers=workers)
    c.shard()
    joined = [c.worker() for _ in range(workers)]
    assert c.state.view.started
    return c, joined


def lose(c: Cluster, *lost: Joined) -> str:
    """Their leases end; the others are heard of."""
    c.now += 10.0
    for member in c.state.view.members:
        if member not in [each.member for each in lost]:
            c.state.membership._members.find(member.role, member.index, member.incarnation).last_heartbeat = c.now
    return c.state.membership.expire(c.now).reason


def test_when_all_are_lost_the_first_that_returns_waits_for_the_other() -> None:
    c, joined = running()
    assert lose(c, *joined).endswith("every worker was lost: the job waits until all expected ones are there again")
    assert not c.state.view.started
    c.worker()
    assert not c.state.view.started
    c.worker()
    assert c.state.view.started


def test_the_last_of_several_losses_counts_however_it_comes() -> None:
    c, (first, second) = running()
    lose(c, first)
    assert c.state.view.started
    assert "every worker was lost" in c.leave(second, "RuntimeError: out of memory")
    assert not c.state.view.started


def test_one_that_is_lost_while_another_lives_is_not_waited_for() -> None:
    c, (first, _) = running()
    lose(c, first)
    assert c.state.view.started
    c.worker(0)
    assert c.state.view.started


def test_a_worker_that_was_done_is_not_waited_for_again() -> None:
    c, (first, second) = running()
    c.leave(first)
    lose(c, second)
    assert not c.state.view.started
    c.worker(1)
    assert c.state.view.started
    # Neither at the next loss, unless it has come back meanwhile.
    lose(c, c.worker(1))
    c.worker(1)
    assert c.state.view.started
    lose(c, c.worker(0), c.worker(1))
    c.worker(1)
    assert not c.state.view.started


def test_one_that_returns_after_all_others_were_done_is_not_to_wait_for_them_when_it_is_lost_again() -> None:
    c, (first, second) = running()
    lose(c, first)
    c.leave(second)
    lose(c, c.worker(0))
    c.worker(0)
    assert c.state.view.started
    # In another run each that comes counts again.
    c.leave(c.worker(1))
    lose(c, c.worker(0), c.worker(1))
    c.worker(0)
    assert not c.state.view.started


def test_a_shard_that_is_away_meanwhile_is_not_waited_for() -> None:
    c, joined = running()
    lose(c, c.shard(), *joined)
    c.worker()
    c.worker()
    assert c.state.view.started


@pytest.mark.parametrize("why", ["", "KeyboardInterrupt"])
def test_where_workers_come_and_go_nobody_is_ever_waited_for(why: str) -> None:
    c = Cluster()
    c.shard()
    c.leave(c.worker(), why)
    assert c.state.view.started
    lose(c, c.worker())
    assert c.state.view.started


def test_a_clean_end_of_the_last_finishes_the_job() -> None:
    c, (first, second) = running()
    lose(c, first)
    c.leave(second)
    assert (c.state.view.finished, c.state.view.started) == (True, True)


def test_the_barrier_of_a_job_that_waits_again_names_those_who_are_missing() -> None:
    c, (_, second, third) = running(3)
    c.leave(second)
    lose(c, c.worker(0), third)
    back = c.worker(0)
    state = c.state.membership.arrive(0, back.member.incarnation, 0).value
    assert (state.released, state.missing_ranks) == (False, (2,))
    other = c.worker(2)
    assert c.arrive(other)


def test_who_is_waited_for_outlives_the_coordinator() -> None:
    c, (first, second) = running()
    c.leave(first)
    records = from_rows(
        {k: v for k, v in changed_rows(None, c.state.persisted_state()).items() if v is not None}, "here"
    )
    assert records is not None
    c.state = ClusterState.restore(c.settings, records, c.now)
    lose(c, second)
    records = c.state.persisted_state()
    c.state = ClusterState.restore(c.settings, records, c.now)
    assert not c.state.view.started
    c.worker(1)
    assert c.state.view.started
