"""sync with backup and a grace time: a step that has its quorum waits for the others, but not longer than that."""

from __future__ import annotations

from .job import SYNC, Job, at, backup

GRACE = 2.0


def test_a_step_with_its_quorum_waits_its_grace_time_and_no_longer() -> None:
    job = Job(backup(1, GRACE), workers=3)
    job.push(0, 1)
    assert (job.rounds(), job.tracker.grace_ends) == ([], None)
    job.now = 5.0
    job.push(2, 1)
    assert (job.rounds(), job.tracker.grace_ends) == ([], 7.0)
    assert not job.tracker.may_pull(at(1))
    job.now = 6.9
    assert job.rounds() == []
    job.now = 7.0
    assert (job.rounds(), job.tracker.grace_ends) == ([(at(1), [0, 2])], None)
    assert job.tracker.may_pull(at(1))


def test_when_all_are_there_the_step_is_made_at_once() -> None:
    job = Job(backup(1, GRACE), workers=3)
    for rank in (0, 2):
        job.push(rank, 1)
        job.rounds()
    job.now = 0.1
    job.push(1, 1)
    assert (job.rounds(), job.tracker.grace_ends) == ([(at(1), [0, 1, 2])], None)


def test_the_death_of_the_one_it_waits_for_ends_the_wait() -> None:
    job = Job(backup(1, GRACE), workers=3)
    for rank in (0, 2):
        job.push(rank, 1)
        assert job.rounds() == []
    job.leave(1)
    assert job.rounds() == [(at(1), [0, 2])]


def test_the_quorum_is_of_the_workers_that_live() -> None:
    job = Job(backup(1, GRACE), workers=4)
    job.push(0, 1)
    job.push(1, 1)
    assert (job.rounds(), job.tracker.grace_ends) == ([], None)
    job.leave(3)
    assert (job.rounds(), job.tracker.grace_ends) == ([], GRACE)


def test_a_newcomer_that_takes_the_quorum_away_restarts_the_grace_time() -> None:
    job = Job(backup(1, GRACE), workers=2)
    job.push(0, 1)
    assert (job.rounds(), job.tracker.grace_ends) == ([], GRACE)
    job.now = 1.5
    assert job.join(2, 9) == at(0)
    assert (job.rounds(), job.tracker.grace_ends) == ([], None)
    job.push(2, 1)
    assert (job.rounds(), job.tracker.grace_ends) == ([], 1.5 + GRACE)


def test_each_step_has_its_own_grace_time() -> None:
    job = Job(backup(1, GRACE), workers=2)
    for clock in (1, 2):
        job.push(0, clock)
    job.rounds()
    job.now = GRACE
    assert (job.rounds(), job.tracker.grace_ends) == ([(at(1), [0])], 2 * GRACE)
    job.now = 2 * GRACE
    assert job.rounds() == [(at(2), [0])]


def test_a_push_that_comes_after_the_grace_time_is_late() -> None:
    job = Job(backup(1, GRACE), workers=2)
    job.push(0, 1)
    job.rounds()
    job.now = GRACE
    job.rounds()
    assert job.push(1, 1).reason == "step 1 was applied without it; now at step 1"


def test_while_it_waits_people_are_told_for_whom_and_that_there_is_a_grace_time() -> None:
    job = Job(backup(1, GRACE), workers=2)
    job.push(0, 1)
    job.rounds()
    assert job.tracker.blocker(at(1)) == "waiting for worker 1 at step 0 (sync(backup=1, grace 2 s))"


def test_a_shorter_grace_time_counts_from_when_the_step_had_its_quorum() -> None:
    job = Job(backup(1, 60.0), workers=2)
    job.push(0, 1)
    job.rounds()
    job.now = 3.0
    job.tracker.configure(backup(1, GRACE))
    assert job.tracker.grace_ends == GRACE
    assert job.rounds() == [(at(1), [0])]


def test_without_backup_there_is_no_quorum_short_of_all() -> None:
    job = Job(SYNC, workers=2)
    job.push(0, 1)
    job.now = 1e6
    assert (job.rounds(), job.tracker.grace_ends) == ([], None)
