"""How many workers and shards a job is to have: what may be asked for, which ends first, and what is waited for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ps_protocol.cluster.scaling import MOST_RANKS, ScaleAsk, WorkerRange, named
from ps_protocol.cluster.view import ClusterView, JoinRequest, Member, Role
from ps_protocol.errors import ConfigError, InvalidRequest, NotReady, PlaceTaken
from ps_protocol.model.spec import Consistency, Mode
from ps_server.coordinator.driver import Driver
from ps_server.coordinator.membership.scaling import WantedSize, awaited, lowest, scaled
from ps_server.coordinator.persistence.journal import Journal
from ps_server.coordinator.settings import ClusterSettings
from tests.coordinator.cluster import Cluster


@pytest.mark.parametrize(
    ("value", "least", "most", "text"),
    [
        (4, 4, 4, "4"),
        ("4", 4, 4, "4"),
        ("2:8", 2, 8, "2:8"),
        ((2, 8), 2, 8, "2:8"),
        ([0, 3], 0, 3, "0:3"),
        (0, 0, MOST_RANKS, "0"),
        ("3:3", 3, 3, "3"),
    ],
)
def test_a_number_of_workers_is_read_and_written(value, least, most, text):
    assert WorkerRange.of(value) == WorkerRange(least, most)
    assert str(WorkerRange(least, most)) == text
    assert WorkerRange.of(WorkerRange.of(text)) == WorkerRange(least, most)


@pytest.mark.parametrize("value", ["8:2", "-1", "2:", ":", "a", "1:2:3", (1, 2, 3), None, True, 2.0, "2:99999999", ()])
def test_what_is_no_number_of_workers_is_one_error(value):
    with pytest.raises(ConfigError, match="--workers"):
        WorkerRange.of(value)


def test_numbers_are_named():
    assert named("worker", {3}) == "worker 3"
    assert named("worker", {5, 3, 4}) == "workers 3, 4 and 5"
    assert named("shard", range(12), most=2) == "shards 0, 1, … (12 of them)"


def test_the_highest_numbers_end_and_the_lowest_free_ones_begin():
    assert lowest({0, 1, 2, 5}, 3) == {0, 1, 2}
    assert lowest({0, 2, 5}, 5) == {0, 1, 2, 3, 5}
    assert lowest({7}, 0) == set()


def view(*workers: int, shards: int = 2, spare: tuple[int, ...] = (), **fields: object) -> ClusterView:
    members = [Member(Role.WORKER, rank, 10 + rank) for rank in workers]
    members += [Member(Role.SHARD, number, 50 + number, "host:1") for number in range(shards)]
    made = ClusterView(members=tuple(members), expected_shards=shards, spare=frozenset(spare), started=True)
    return replace(made, **fields)


def test_workers_that_started_by_hand_count_and_the_same_again_changes_nothing():
    first = scaled(WantedSize(), ScaleAsk(workers=3), view(0, 5, least_workers=1), 8, by_count=False)
    assert first == WantedSize(1, ranks=frozenset({0, 1, 5}))
    assert awaited(first, view(0, 5)) == "worker 1 has to join"
    assert scaled(first, ScaleAsk(workers=3), view(0, 5, least_workers=1), 8, by_count=False) is first
    fewer = scaled(first, ScaleAsk(workers=1), view(0, 5, least_workers=1), 8, by_count=False)
    # Worker 1 may be starting: it is to be ended, too.
    assert fewer == WantedSize(2, ranks=frozenset({0}), ending=frozenset({1, 5}))
    assert awaited(fewer, view(0, 1, 5)) == "workers 1 and 5 have to end"
    assert awaited(fewer, view(0)) == ""


def test_of_shards_those_that_hold_least_numbers_stay_and_spare_ones_are_begun_again():
    more = scaled(WantedSize(), ScaleAsk(shards=3), view(0), 0, by_count=False)
    assert more == WantedSize(1, shards=frozenset({0, 1, 2}), added=frozenset({2}))
    assert awaited(more, view(0)) == "shard 2 has to start"
    assert awaited(more, view(0, shards=3, spare=(2,))) == "slices have to move to shard 2"
    assert awaited(more, view(0, shards=3)) == ""
    fewer = scaled(more, ScaleAsk(shards=1), view(0, shards=3), 0, by_count=False)
    assert awaited(fewer, view(0, shards=3)) == "slices have to leave shards 1 and 2"
    assert awaited(fewer, view(0, shards=3, spare=(1, 2))) == "shards 1 and 2 have to end"
    back = scaled(fewer, ScaleAsk(shards=2), view(0, shards=3, spare=(1, 2)), 0, by_count=False)
    assert (back.shards, back.added) == ({0, 1}, {1, 2})


REFUSED = [
    (ScaleAsk(), view(0), InvalidRequest, "nothing is to be scaled"),
    (ScaleAsk(workers=2), view(0, expected_workers=1), InvalidRequest, "is fixed.*--workers MIN:MAX, such as"),
    (ScaleAsk(workers=9), view(0, least_workers=2), InvalidRequest, "cannot have 9 workers.*expected: 2 to 8"),
    (ScaleAsk(workers=1), view(0, least_workers=2), InvalidRequest, "cannot have 1 workers.*expected: 2 to 8"),
    (ScaleAsk(shards=0), view(0), InvalidRequest, "cannot have as many shards"),
    (ScaleAsk(shards=4097), view(0), InvalidRequest, "cannot have as many shards"),
    (ScaleAsk(shards=3), view(finished=True), NotReady, "the job is finished"),
]


@pytest.mark.parametrize(("ask", "seen", "error", "text"), REFUSED)
def test_what_the_job_cannot_have_is_refused(ask, seen, error, text):
    with pytest.raises(error, match=text):
        scaled(WantedSize(), ask, seen, 8, by_count=False)


def test_as_many_workers_as_a_fixed_job_has_are_no_error():
    assert scaled(WantedSize(), ScaleAsk(workers=1), view(0, expected_workers=1), 0, by_count=False) == WantedSize()


def test_a_job_with_a_range_starts_with_the_least_and_takes_the_most():
    cluster = Cluster(expected_shards=1, least_workers=2, most_workers=3)
    cluster.shard()
    cluster.worker()
    assert not cluster.state.view.started
    cluster.worker()
    assert cluster.state.view.started
    assert cluster.state.view.expected_workers == 0
    cluster.worker()
    with pytest.raises(PlaceTaken, match=r"at most 3 workers.*--workers 1:4"):
        cluster.worker()
    with pytest.raises(InvalidRequest, match=r"at most 3 workers, and there is no rank 3"):
        cluster.worker(3)


def test_its_mode_may_leave_out_fewer_pushes_than_it_has_workers_at_least():
    Cluster(least_workers=3, most_workers=8, consistency=Consistency(Mode.SYNC, backup=2))
    with pytest.raises(InvalidRequest, match="below the number of workers, 3"):
        Cluster(least_workers=3, most_workers=8, consistency=Consistency(Mode.SYNC, backup=3))


def elastic(**settings: object) -> tuple[Cluster, list]:
    cluster = Cluster(expected_shards=1, least_workers=1, most_workers=8, **settings)
    cluster.shard()
    return cluster, [cluster.worker() for _ in range(3)]


def test_a_worker_that_the_job_is_not_to_have_any_more_did_not_fail():
    cluster, workers = elastic()
    cluster.state.scale(ScaleAsk(workers=2))
    left = cluster.state.membership.leave(Role.WORKER, 2, workers[2].member.incarnation, "Terminated", cluster.now)
    assert left.reason == "worker 2 left: ended by scale"
    assert not left.loss
    assert awaited(cluster.state.wanted, cluster.state.view) == ""
    # One that comes later, by hand, may fail as any other.
    later = cluster.worker(2)
    assert cluster.state.membership.leave(Role.WORKER, 2, later.member.incarnation, "ValueError: x", cluster.now).loss


def test_the_others_of_a_barrier_do_not_wait_for_it():
    cluster, workers = elastic()
    assert not cluster.arrive(workers[0])
    assert not cluster.arrive(workers[1])
    cluster.state.scale(ScaleAsk(workers=2))
    cluster.leave(workers[2], "Terminated")
    assert cluster.arrive(workers[0])


def test_the_last_worker_that_is_ended_does_not_finish_the_job_and_one_that_trained_to_the_end_is_not_replaced():
    cluster, workers = elastic()
    cluster.state.scale(ScaleAsk(workers=2))
    cluster.leave(workers[2], "Terminated")
    cluster.leave(workers[0])
    assert cluster.state.wanted.ranks == {1}
    assert cluster.state.view.wanted_workers == 1
    cluster.state.scale(ScaleAsk(workers=1))
    cluster.leave(workers[1], "Terminated")
    assert not cluster.state.view.finished


def test_after_the_end_of_the_job_workers_that_join_again_are_those_it_is_started_with():
    cluster, workers = elastic()
    cluster.state.scale(ScaleAsk(workers=4, shards=2))
    for worker in workers:
        cluster.leave(worker)
    assert cluster.state.view.finished
    assert (cluster.state.view.wanted_workers, cluster.state.view.wanted_shards) == (None, 2)
    cluster.worker()
    assert cluster.state.wanted.ranks is None


def test_where_only_the_number_counts_any_worker_may_end():
    cluster, workers = elastic()
    cluster.state.scale(ScaleAsk(workers=2), by_count=True)
    assert awaited(cluster.state.wanted, cluster.state.view) == "3 workers are there, 2 are wanted"
    assert cluster.leave(workers[0], "Terminated") == "worker 0 left: ended by scale"
    assert awaited(cluster.state.wanted, cluster.state.view) == ""
    cluster.leave(workers[2])
    assert cluster.state.view.wanted_workers == 1
    assert cluster.leave(workers[1], "Terminated") == "worker 1 left: Terminated"


def test_a_worker_that_has_left_after_training_is_done_until_one_of_its_rank_joins_again():
    driver = Driver(ClusterSettings(least_workers=1, most_workers=8, lease_seconds=600))
    driver.join(JoinRequest(Role.SHARD, 0, "host:1", "shard"))
    members = [driver.join(JoinRequest(Role.WORKER, rank, "", f"worker {rank}")).member for rank in range(3)]
    driver.leave(Role.WORKER, 0, members[0].incarnation, "")
    assert driver.wanted.done == {0}
    wanted = driver.scale(ScaleAsk(workers=1))
    assert (wanted.ranks, wanted.ending, wanted.done) == ({1}, {2}, {0})
    driver.leave(Role.WORKER, 2, members[2].incarnation, "Terminated")
    assert (driver.wanted.ending, driver.wanted.done) == (frozenset(), {0})
    # Its process may go on: the next ones have ranks of their own.
    assert driver.scale(ScaleAsk(workers=3)).ranks == {1, 2, 3}
    driver.join(JoinRequest(Role.WORKER, 0, "", "again"))
    assert driver.wanted.done == frozenset()


@pytest.mark.parametrize("number", [-1, True, 1.5, "2", MOST_RANKS + 1])
def test_what_is_no_number_of_processes_is_refused_where_it_is_asked_for(number):
    with pytest.raises(InvalidRequest, match="cannot have as many workers"):
        ScaleAsk(workers=number)
    with pytest.raises(InvalidRequest, match="cannot have as many shards"):
        ScaleAsk(shards=number)


def test_a_coordinator_that_is_started_again_keeps_what_is_wanted_and_a_new_run_of_the_job_its_shards_alone(tmp_path):
    settings = ClusterSettings(least_workers=1, most_workers=8, lease_seconds=600)
    with Journal.open(tmp_path) as journal:
        driver = Driver(settings, journal=journal)
        driver.join(JoinRequest(Role.SHARD, 0, "host:1", "shard"))
        worker = driver.join(JoinRequest(Role.WORKER, 0, "", "worker")).member
        wanted = driver.scale(ScaleAsk(3, 2))
    with Journal.open(tmp_path) as journal:
        driver = Driver(settings, journal=journal)
        assert (
            driver.wanted
            == wanted
            == WantedSize(1, frozenset({0, 1, 2}), frozenset(), frozenset({0, 1}), frozenset({1}))
        )
        assert (driver.view.wanted_workers, driver.view.wanted_shards) == (3, 2)
        driver.leave(Role.WORKER, 0, worker.incarnation, "")
        driver.release()
    with Journal.open(tmp_path) as journal:
        again = Driver(settings, journal=journal)
        assert (again.wanted.ranks, again.wanted.shards) == (None, {0, 1})
        assert (again.view.wanted_workers, again.view.wanted_shards) == (None, 2)


def test_another_range_is_another_job(tmp_path: Path):
    with Journal.open(tmp_path) as journal:
        Driver(ClusterSettings(least_workers=1, most_workers=8), journal=journal)
    with Journal.open(tmp_path) as journal, pytest.raises(ConfigError, match=r"--workers 1:8; actual: --workers 1:9"):
        Driver(ClusterSettings(least_workers=1, most_workers=9), journal=journal)
