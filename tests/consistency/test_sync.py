"""sync: rounds of one step each, complete but for the backup workers, in order, each once."""

from __future__ import annotations

import itertools

import pytest

from ps_server.consistency import Position, Verdict

from .job import SYNC, Job, at, backup


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
def test_a_round_is_in_rank_order_whatever_the_order_of_arrival(order: tuple[int, ...]) -> None:
    job = Job(SYNC, workers=3)
    for rank in order:
        assert job.rounds() == []
        assert job.push(rank, 1).verdict is Verdict.HOLD
    assert job.rounds() == [(at(1), [0, 1, 2])]


def test_a_round_is_taken_once_and_makes_one_version() -> None:
    job = Job(SYNC)
    job.push(0, 1)
    job.push(1, 1)
    (taken,) = job.tracker.take_ready(0.0)
    assert (taken.version, job.tracker.version, job.tracker.applied) == (1, 1, at(1))
    assert job.rounds() == []


def test_a_pull_is_answered_once_its_step_has_been_taken() -> None:
    job = Job(SYNC)
    job.push(0, 1)
    assert job.tracker.blocker(at(1)) == "waiting for worker 1 at step 0 (sync)"
    job.push(1, 1)
    assert job.tracker.blocker(at(1)) == "step 1 is about to be applied"
    job.rounds()
    assert job.tracker.blocker(at(1)) is None
    assert job.tracker.blocker(at(2)) is not None


def test_pushes_sent_ahead_wait_each_in_the_round_of_its_step() -> None:
    job = Job(SYNC)
    for clock in (1, 2, 3):
        job.push(0, clock)
    job.push(1, 1)
    assert job.rounds() == [(at(1), [0, 1])]
    job.push(1, 2)
    job.push(1, 3)
    assert job.rounds() == [(at(2), [0, 1]), (at(3), [0, 1])]


def test_with_a_backup_worker_the_slowest_is_left_out_and_told_where_to_go_on() -> None:
    job = Job(backup(1), workers=3)
    for clock in (1, 2):
        job.push(2, clock)
        job.push(0, clock)
        assert job.rounds() == [(at(clock), [0, 2])]
    late = job.push(1, 1)
    assert late.verdict is Verdict.LATE
    assert late.reason == "step 1 was applied without it; now at step 2"
    assert job.position(1) == at(1)
    assert job.tracker.resume(at(1)) == at(2)
    assert job.tracker.resume(at(3)) == at(3)
    assert job.tracker.may_pull(at(1))
    assert (job.tracker.version, job.tracker.counts.outcomes["late"]) == (2, 1)


def test_a_late_worker_is_part_of_the_next_round_again() -> None:
    job = Job(backup(1), workers=2)
    job.push(0, 1)
    job.push(0, 2)
    assert job.rounds() == [(at(1), [0]), (at(2), [0])]
    job.push(1, 1)
    assert job.push(1, 3).verdict is Verdict.HOLD
    assert job.rounds() == [(at(3), [1])]


def test_a_late_push_of_an_earlier_phase_goes_on_in_its_own_phase() -> None:
    job = Job(backup(1), workers=2)
    job.tracker.arrive(job.key(0), 0)
    job.push(0, 1, phase=1)
    assert job.rounds() == [(Position(1, 1), [0])]
    assert job.push(1, 5).verdict is Verdict.LATE
    assert job.tracker.resume(at(5)) == at(5)


def test_a_skipped_late_push_is_late() -> None:
    job = Job(backup(1), workers=2)
    job.push(0, 1)
    job.rounds()
    assert job.push(1, 1, skipped=True).verdict is Verdict.LATE


def test_more_backup_workers_than_workers_still_need_one_push() -> None:
    job = Job(backup(5), workers=2)
    assert job.rounds() == []
    job.push(1, 1)
    assert job.rounds() == [(at(1), [1])]


def test_a_push_of_a_worker_that_died_since_does_not_stand_for_a_live_one() -> None:
    job = Job(SYNC, workers=4)
    job.push(3, 1)
    job.leave(3)
    job.push(0, 1)
    job.push(1, 1)
    assert job.rounds() == []
    job.push(2, 1)
    assert job.rounds() == [(at(1), [0, 1, 2, 3])]


def test_a_worker_replaced_while_its_push_was_held_may_push_the_step_again() -> None:
    job = Job(SYNC)
    job.push(1, 1)
    assert job.join(1, 9) == at(0)
    job.push(0, 1)
    job.push(1, 1)
    (taken,) = job.tracker.take_ready(0.0)
    assert [str(push.worker) for push in taken.contributions] == [
        "worker 0 (incarnation 1)",
        "worker 1 (incarnation 2)",
        "worker 1 (incarnation 9)",
    ]


def test_a_skipped_push_is_present_without_contributing() -> None:
    job = Job(SYNC)
    assert job.push(0, 1, skipped=True).verdict is Verdict.SKIP
    assert job.rounds() == []
    assert not job.tracker.may_pull(at(1))
    job.push(1, 1)
    assert job.rounds() == [(at(1), [1])]
    assert job.tracker.version == 1


def test_a_round_of_skipped_pushes_is_empty_and_makes_no_version() -> None:
    job = Job(SYNC)
    for rank in (0, 1):
        job.push(rank, 1, skipped=True)
    (taken,) = job.tracker.take_ready(0.0)
    assert (taken.contributions, taken.version, job.tracker.version) == ((), 0, 0)
    assert job.tracker.may_pull(at(1))
    assert job.tracker.counts.outcomes == {
        "applied": 0,
        "duplicate": 0,
        "late": 0,
        "stale": 0,
        "skipped": 2,
        "separate": 0,
    }


def test_staleness_of_a_contribution_is_taken_when_its_round_is() -> None:
    job = Job(SYNC)
    for clock in (1, 2):
        job.push(0, clock, pulled=0)
        job.push(1, clock, pulled=clock - 1)
    assert [r.staleness for r in job.tracker.take_ready(0.0)] == [(0, 0), (1, 0)]
    assert job.tracker.counts.staleness[:2] == [3, 1]
    assert job.tracker.counts.outcomes["applied"] == 4
