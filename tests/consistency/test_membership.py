"""Who takes part, and from where."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import replace

import pytest

from ps_protocol.errors import Fenced, InvalidRequest
from ps_server.consistency import Position, PushInfo, Tracker, Verdict, WorkerKey

from .job import ASYNC, SYNC, Job, at, backup, ssp


def test_workers_listed_before_the_first_push_are_waited_for_without_having_attached() -> None:
    job = Job(SYNC, workers=3)
    job.push(0, 1)
    job.push(1, 1)
    assert job.rounds() == []
    job.push(2, 1)
    assert job.rounds() == [(at(1), [0, 1, 2])]


def test_a_worker_listed_after_the_first_push_is_not_waited_for_until_it_attaches() -> None:
    job = Job(SYNC)
    job.push(0, 1)
    job.live[2] = 9
    job.tracker.members(job.live)
    job.push(1, 1)
    assert job.rounds() == [(at(1), [0, 1])]
    assert job.tracker.attach(job.key(2), 0) == at(1)
    job.push(0, 2)
    job.push(1, 2)
    assert job.rounds() == []


def test_pushes_that_a_worker_has_had_answered_count_as_accepted_after_a_restart() -> None:
    job = Job(ASYNC)
    job.push(0, 1)
    restarted = Tracker(ASYNC)
    restarted.restore(job.tracker.persisted_state())
    restarted.members(job.live)
    worker = job.key(0)
    restarted.attach(worker, 0, 3)
    assert restarted.last_sequence(worker) == 1
    assert restarted.answered(worker, 3)
    assert not restarted.answered(worker, 2)
    assert restarted.last_sequence(worker) == 3
    assert restarted.push(PushInfo(worker, 3, at(4), 1)).verdict is Verdict.DUPLICATE
    assert restarted.push(PushInfo(worker, 4, at(4), 1)).verdict is Verdict.APPLY


def test_what_a_worker_says_it_has_had_answered_is_checked() -> None:
    job = Job(ASYNC)
    with pytest.raises(InvalidRequest, match="answered is out of range"):
        job.tracker.answered(job.key(0), 1 << 48)
    with pytest.raises(Fenced):
        job.tracker.answered(WorkerKey(0, 99), 1)


def test_a_newcomer_enters_where_the_slowest_participant_stands() -> None:
    job = Job(ASYNC)
    job.push(0, 5)
    job.push(1, 3)
    assert job.join(2, 9) == at(3)


def test_a_newcomer_never_enters_below_the_last_applied_step() -> None:
    job = Job(backup(1), workers=3)
    for rank in (0, 1):
        job.push(rank, 1)
    assert job.rounds() == [(at(1), [0, 1])]
    assert job.position(2) == at(0)
    assert job.join(3, 9) == at(1)


def test_a_newcomer_alone_enters_at_the_highest_position_ever_reached() -> None:
    job = Job(ASYNC)
    job.push(0, 7)
    job.push(1, 3)
    job.leave(0)
    job.leave(1)
    assert job.join(5, 9) == at(7)


def test_a_newcomer_is_not_carried_over_a_barrier_it_has_not_passed() -> None:
    job = Job(SYNC)
    for rank in (0, 1):
        job.push(rank, 4)
        job.rounds()
        job.tracker.arrive(job.key(rank), 0)
    assert job.join(2, 9, phase=0) == at(4)
    assert job.push(2, 5).verdict.value == "held"
    assert job.rounds() == [(at(5), [2])]


def test_a_newcomer_that_has_passed_a_barrier_enters_behind_it() -> None:
    job = Job(ASYNC)
    job.push(0, 4)
    assert job.join(2, 9, phase=1) == Position(1, 0)


def test_attaching_again_keeps_the_place_and_the_sequence() -> None:
    job = Job(ASYNC)
    job.push(0, 1)
    job.push(0, 2)
    assert job.tracker.attach(job.key(0), 0) == at(2)
    assert job.tracker.last_sequence(job.key(0)) == 2


@pytest.mark.parametrize("clock", [2, 7])
def test_a_worker_whose_pushes_a_restart_forgot_goes_on_where_it_says_it_stands(clock: int) -> None:
    """Not where a newcomer would: its steps changed nothing here, but the others count them on every shard."""
    job = Job(ssp(0))
    job.push(0, 5)
    job.live[2] = 9
    job.tracker.members(job.live)
    assert job.tracker.attach(job.key(2), 0, clock) == job.position(2) == at(clock)
    job.push(2, clock + 1)
    assert job.tracker.attach(job.key(2), 0, clock) == at(clock + 1)


def test_a_worker_that_was_only_listed_after_a_restart_goes_on_where_it_says_it_stands() -> None:
    job = Job(ssp(0))
    job.push(0, 5)
    again = Tracker(ssp(0))
    again.restore(job.tracker.persisted_state())
    again.members({1: 2})
    assert again.attach(job.key(1), 0, 3) == at(3)
    assert again.may_pull(at(3))


def test_after_a_restart_nobody_enters_below_a_round_that_passed_without_pushes() -> None:
    job = Job(SYNC)
    for clock in (1, 2):
        for rank in (0, 1):
            job.push(rank, clock, skipped=clock == 2)
    assert job.rounds() == [(at(1), [0, 1]), (at(2), [])]
    again = Tracker(SYNC)
    again.restore(job.tracker.persisted_state())
    again.members({})
    again.members({0: 8, 1: 9})
    assert again.attach(WorkerKey(0, 8), 0) == at(2)


def test_a_job_that_begins_with_a_checkpoint_does_not_begin_behind_a_barrier_in_which_a_worker_was() -> None:
    """Its workers have not passed that barrier, and would wait there for those that are not in it."""
    job = Job(ASYNC)
    job.push(0, 2)
    job.tracker.arrive(job.key(0), 0)
    moved = Tracker(ASYNC)
    moved.restore(replace(job.tracker.persisted_state(), standings=job.tracker.clocks()))
    assert moved.clocks()[0].position == Position(1, 0)
    assert moved.persisted_state().highest == at(2)


def test_a_worker_that_has_come_further_than_is_known_here_goes_on_where_it_says() -> None:
    job = Job(ASYNC)
    job.push(0, 2)
    assert job.tracker.attach(job.key(0), 0, 4) == at(4)
    assert job.tracker.attach(job.key(0), 0, 1) == at(4)


def test_attaching_again_after_a_barrier_begins_the_new_phase() -> None:
    job = Job(ASYNC)
    job.push(0, 2)
    assert job.tracker.attach(job.key(0), 1) == job.position(0) == Position(1, 0)


def test_a_lost_worker_opens_the_round_it_held_up() -> None:
    job = Job(SYNC, workers=3)
    job.push(0, 1)
    job.push(1, 1)
    job.leave(2)
    assert job.rounds() == [(at(1), [0, 1])]


def test_a_held_push_stays_in_its_round_when_its_worker_is_lost() -> None:
    job = Job(SYNC, workers=3)
    job.push(2, 1)
    job.leave(2)
    job.push(0, 1)
    assert job.rounds() == []
    job.push(1, 1)
    assert job.rounds() == [(at(1), [0, 1, 2])]


def test_a_held_push_is_applied_even_when_every_worker_is_lost() -> None:
    job = Job(SYNC)
    job.push(0, 1)
    job.leave(0)
    job.leave(1)
    assert job.rounds() == [(at(1), [0])]


def test_a_lost_worker_unblocks_those_it_held_up() -> None:
    job = Job(ssp(1))
    job.push(0, 2)
    assert not job.tracker.may_pull(at(2))
    job.leave(1)
    assert job.tracker.may_pull(at(2))


def test_a_new_incarnation_replaces_the_old_one_at_once() -> None:
    job = Job(ASYNC)
    job.push(0, 4)
    job.push(1, 1)
    old = job.key(1)
    assert job.join(1, 9) == at(4)
    assert job.tracker.last_sequence(job.key(1)) == 0
    with pytest.raises(Fenced, match=r"expected: worker 1 \(incarnation 9\)"):
        job.tracker.push(PushInfo(old, 2, at(5), 0))


STRANGER = WorkerKey(7, 3)


@pytest.mark.parametrize(
    "event",
    [
        lambda tracker: tracker.attach(STRANGER, 0),
        lambda tracker: tracker.push(PushInfo(STRANGER, 1, at(1), 0)),
        lambda tracker: tracker.arrive(STRANGER, 0),
        lambda tracker: tracker.last_sequence(STRANGER),
    ],
    ids=["attach", "push", "arrive", "last_sequence"],
)
def test_a_worker_that_is_not_live_is_fenced_and_told_what_to_do(event: Callable[[Tracker], object]) -> None:
    job = Job(ASYNC)
    with pytest.raises(Fenced, match="start the worker again"):
        event(job.tracker)
    assert all(standing.worker != STRANGER for standing in job.tracker.clocks())


def test_a_latecomer_that_pushes_before_it_attaches_is_refused() -> None:
    job = Job(ASYNC)
    job.push(0, 1)
    job.live[2] = 9
    job.tracker.members(job.live)
    with pytest.raises(InvalidRequest, match="open the stream"):
        job.push(2, 1)


def test_a_worker_in_the_barrier_holds_nobody_back_in_the_phase_it_left() -> None:
    job = Job(SYNC, workers=2)
    job.tracker.arrive(job.key(1), 0)
    job.push(0, 1)
    assert job.rounds() == [(at(1), [0])]


def test_a_worker_still_in_the_old_phase_holds_up_the_first_step_of_the_new_one() -> None:
    job = Job(SYNC, workers=2)
    job.tracker.arrive(job.key(0), 0)
    job.push(0, 1, phase=1)
    assert job.rounds() == []
    job.tracker.arrive(job.key(1), 0)
    assert job.rounds() == []
    job.push(1, 1, phase=1)
    assert job.rounds() == [(at(1, phase=1), [0, 1])]


def test_arriving_twice_or_late_changes_nothing() -> None:
    job = Job(ASYNC)
    job.tracker.arrive(job.key(0), 1)
    job.push(0, 3, phase=2)
    for phase in (0, 1):
        job.tracker.arrive(job.key(0), phase)
    assert job.position(0) == Position(2, 3)


def test_ten_thousand_joins_leave_no_trace() -> None:
    def size_after(joins: int) -> int:
        job = Job(backup(1), workers=1)
        for incarnation in range(2, joins + 2):
            rank = 1 + incarnation % 3
            clock = job.join(rank, incarnation).clock + 1
            job.push(rank, clock)
            job.push(0, clock, skipped=incarnation % 5 == 0)
            job.rounds()
            if incarnation % 2:
                job.leave(rank)
        return len(pickle.dumps(job.tracker))

    assert size_after(10_000) <= size_after(100) + 200
