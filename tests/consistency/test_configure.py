"""The mode may change at any moment: nothing is lost, nobody waits for ever."""

from __future__ import annotations

import pytest

from ps_protocol.model.spec import Consistency
from ps_server.consistency import ParkedPulls, Verdict

from .job import ASYNC, SYNC, Job, at, backup, ssp


def test_a_worker_behind_at_the_change_to_sync_goes_on_alone_until_it_reaches_the_other() -> None:
    job = Job(ASYNC)
    job.push(0, 10)
    job.push(1, 7)
    job.tracker.configure(SYNC)
    assert not job.tracker.may_pull(at(10))
    for clock in (8, 9, 10):
        job.push(1, clock)
        assert job.rounds() == [(at(clock), [1])]
        assert job.tracker.may_pull(at(clock))
    assert job.tracker.may_pull(at(10))
    job.push(0, 11)
    assert job.rounds() == []
    job.push(1, 11)
    assert job.rounds() == [(at(11), [0, 1])]


@pytest.mark.parametrize("mode", [ASYNC, ssp(1)], ids=str)
def test_a_step_applied_on_arrival_needs_no_round_after_the_change_to_sync(mode: Consistency) -> None:
    job = Job(mode)
    job.push(0, 4)
    job.push(1, 4)
    job.tracker.configure(SYNC)
    assert job.tracker.may_pull(at(4))


@pytest.mark.parametrize("mode", [ASYNC, ssp(2)], ids=str)
def test_leaving_sync_applies_what_was_held_as_it_is(mode: Consistency) -> None:
    job = Job(SYNC, workers=3)
    job.push(0, 1)
    job.push(2, 1)
    job.push(0, 2)
    job.tracker.configure(mode)
    assert job.rounds() == [(at(1), [0, 2]), (at(2), [0])]
    assert job.tracker.version == 2
    assert job.push(1, 1).verdict is Verdict.APPLY


def test_a_parked_pull_waits_for_the_held_rounds_that_leaving_sync_has_made_ready() -> None:
    job = Job(SYNC)
    job.push(0, 1)
    job.tracker.configure(ASYNC)
    assert job.tracker.blocker(at(1)) == "step 1 is about to be applied"
    job.rounds()
    assert job.tracker.blocker(at(1)) is None


def test_a_wider_bound_lets_waiting_workers_go_on() -> None:
    job = Job(ssp(1))
    job.push(0, 3)
    assert not job.tracker.may_pull(at(3))
    job.tracker.configure(ssp(3))
    assert job.tracker.may_pull(at(3))


def test_another_backup_worker_makes_the_round_ready() -> None:
    job = Job(SYNC, workers=3)
    job.push(0, 1)
    job.push(1, 1)
    assert job.rounds() == []
    job.tracker.configure(backup(1))
    assert job.rounds() == [(at(1), [0, 1])]


def test_an_applied_step_stays_answered_when_the_backup_workers_are_taken_away() -> None:
    job = Job(backup(1))
    job.push(0, 1)
    assert job.rounds() == [(at(1), [0])]
    job.tracker.configure(SYNC)
    assert job.tracker.may_pull(at(1))


def test_the_mode_in_force_can_be_read() -> None:
    job = Job(SYNC)
    job.tracker.configure(ssp(3))
    assert job.tracker.consistency == ssp(3)


def test_parked_pulls_are_released_lowest_first_and_once() -> None:
    job = Job(ssp(0), workers=3)
    parked: ParkedPulls[str] = ParkedPulls()
    for position, token in ((at(3), "third"), (at(1), "first"), (at(2), "second"), (at(2), "after second")):
        parked.park(position, token)
    assert parked.release(job.tracker) == []
    for rank in range(3):
        job.push(rank, 2)
    assert parked.release(job.tracker) == ["first", "second", "after second"]
    assert parked.release(job.tracker) == []
    assert list(parked) == ["third"]
    job.tracker.configure(ASYNC)
    assert parked.release(job.tracker) == ["third"]
    assert len(parked) == 0


def test_a_discarded_pull_is_not_released() -> None:
    job = Job(ASYNC)
    parked: ParkedPulls[str] = ParkedPulls()
    for clock, token in enumerate(("a", "b", "c")):
        parked.park(at(clock), token)
    parked.discard("b")
    parked.discard("unknown")
    assert parked.release(job.tracker) == ["a", "c"]
