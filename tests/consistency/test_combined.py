"""Combined pushes: the workers of one host push as one, each known by its own sequence; or each by itself."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ps_protocol.errors import Fenced
from ps_protocol.model.spec import Consistency, StalePolicy
from ps_server.consistency import LIMIT, PushInfo, Tracker, Verdict, WorkerKey

from .job import ASYNC, SYNC, Job, at, backup, ssp, stale

MODES = [ASYNC, ssp(3), SYNC, backup(1)]


def combined(job: Job, *ranks: int, clock: int = 1, pulled: dict[int, int] | None = None) -> PushInfo:
    """The push of ``ranks`` as one, which the first of them sends."""
    sender, *others = (job.info(rank, clock, pulled=(pulled or {}).get(rank, 0)) for rank in ranks)
    lowest = min(each.pulled_version for each in (sender, *others))
    return replace(sender, others=tuple(others), pulled_version=lowest)


def state(job: Job) -> object:
    tracker = job.tracker
    return tracker.clocks(), tracker.version, tracker.persisted_state().standings, len(tracker.rounds)


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_a_combined_push_moves_the_clock_of_each_of_its_workers_and_makes_one_update(mode: Consistency) -> None:
    job = Job(mode, 3)
    push = combined(job, 2, 0, 1)
    assert job.tracker.push(push).verdict is (Verdict.HOLD if job.tracker.collects else Verdict.APPLY)
    job.rounds()
    assert [standing.position for standing in job.tracker.clocks()] == [at(1)] * 3
    assert [standing.last_sequence for standing in job.tracker.clocks()] == [1] * 3
    assert job.tracker.version == job.tracker.counts.outcomes["applied"] == 1
    assert sum(job.tracker.counts.staleness) == 1


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_repeated_it_is_a_duplicate_and_so_is_each_of_its_workers_own_push(mode: Consistency) -> None:
    job = Job(mode, 3)
    push = combined(job, 0, 1, 2)
    job.tracker.push(push)
    before = state(job)
    for again in (push, *(replace(each, others=()) for each in push.contributions)):
        assert job.tracker.push(again).verdict is Verdict.DUPLICATE
    assert state(job) == before


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_where_a_worker_has_pushed_by_itself_nothing_is_accepted_and_the_others_do_so_too(mode: Consistency) -> None:
    job = Job(mode, 3)
    push = combined(job, 0, 1, 2)
    job.tracker.push(replace(push.others[1], others=()))
    before = state(job)
    assert job.tracker.push(push).verdict is Verdict.SEPARATE
    assert state(job) == before
    assert job.tracker.counts.outcomes["separate"] == 1
    assert job.tracker.push(replace(push, others=())).verdict in (Verdict.APPLY, Verdict.HOLD)
    assert job.tracker.push(push).verdict is Verdict.SEPARATE, "one of three is still missing"
    assert job.tracker.push(push.others[0]).verdict in (Verdict.APPLY, Verdict.HOLD, Verdict.LATE)
    assert job.tracker.push(push).verdict is Verdict.DUPLICATE


def test_a_worker_that_is_gone_or_replaced_or_was_never_there_makes_the_others_push_by_themselves() -> None:
    for other in (WorkerKey(1, 1), WorkerKey(1, 3), WorkerKey(2, 3)):
        job = Job(ASYNC, 2)
        push = combined(job, 0, 1)
        assert job.tracker.push(replace(push, others=(replace(push.others[0], worker=other),))).verdict is (
            Verdict.SEPARATE
        )
        assert job.position(0) == at(0)
    job.leave(1)
    assert job.tracker.push(push).verdict is Verdict.SEPARATE


def test_a_sender_that_is_not_live_is_fenced() -> None:
    job = Job(ASYNC, 2)
    push = combined(job, 0, 1)
    job.leave(0)
    with pytest.raises(Fenced):
        job.tracker.push(push)


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("clock", [0, 5, LIMIT])
def test_a_position_that_is_not_a_next_one_makes_each_push_by_itself(mode: Consistency, clock: int) -> None:
    job = Job(mode, 2)
    job.tracker.attach(job.key(1), 0, 5)
    push = combined(job, 0, 1, clock=6)
    for bad in (
        replace(push, others=(replace(push.others[0], position=at(clock)),)),
        replace(push, others=(replace(push.others[0], sequence=LIMIT),)),
    ):
        before = state(job)
        assert job.tracker.push(bad).verdict is Verdict.SEPARATE
        assert state(job) == before
    assert job.tracker.push(push).verdict is not Verdict.SEPARATE


def test_different_steps_are_one_push_only_where_its_answer_waits_for_nobody() -> None:
    for mode, verdict in ((ASYNC, Verdict.APPLY), (ssp(3), Verdict.SEPARATE), (SYNC, Verdict.SEPARATE)):
        job = Job(mode, 2)
        push = combined(job, 0, 1)
        assert job.tracker.push(replace(push, position=at(2))).verdict is verdict


def test_a_round_waits_for_workers_and_not_for_pushes_and_is_in_the_order_of_the_lowest_ranks() -> None:
    job = Job(SYNC, 5)
    job.tracker.push(combined(job, 4, 1))
    job.tracker.push(combined(job, 3, 2))
    assert job.rounds() == []
    job.push(0, 1)
    assert job.rounds() == [(at(1), [0, 4, 3])], "named by who sent it"
    assert job.tracker.version == 1
    assert job.tracker.counts.outcomes["applied"] == 3


def test_two_shards_that_saw_different_pushes_count_each_worker_once() -> None:
    """One shard has the combined push, the sender dies, and each worker pushes by itself on the other, too."""
    one, other = Job(SYNC, 3), Job(SYNC, 3)
    push = combined(one, 0, 1, 2)
    assert one.tracker.push(push).verdict is Verdict.HOLD
    for job, verdict in ((one, Verdict.DUPLICATE), (other, Verdict.HOLD)):
        for each in push.contributions:
            assert job.tracker.push(replace(each, others=())).verdict is verdict
    assert one.rounds() == [(at(1), [0])]
    assert other.rounds() == [(at(1), [0, 1, 2])]
    assert one.tracker.clocks() == other.tracker.clocks()


def test_it_is_as_stale_as_the_oldest_parameters_in_it() -> None:
    job = Job(stale(StalePolicy.REJECT, 1), 3)
    job.push(2, 1)
    job.push(2, 2)
    decision = job.tracker.push(combined(job, 0, 1, pulled={0: 2, 1: 0}))
    assert (decision.verdict, decision.staleness) == (Verdict.STALE, 2)
    assert job.position(0) == job.position(1) == at(1)
    decision = job.tracker.push(combined(job, 0, 1, clock=2, pulled={0: 2, 1: 1}))
    assert (decision.verdict, decision.staleness) == (Verdict.APPLY, 1)


def test_in_a_round_that_has_passed_it_is_late_for_all() -> None:
    job = Job(backup(2), 4)
    job.push(0, 1)
    job.push(1, 1)
    assert job.rounds() == [(at(1), [0, 1])]
    assert job.tracker.push(combined(job, 2, 3)).verdict is Verdict.LATE
    assert job.tracker.counts.outcomes["late"] == 1


def test_its_pull_does_not_wait_for_one_of_its_own_workers_where_async_has_just_ended() -> None:
    job = Job(ASYNC, 2)
    push = combined(job, 0, 1)
    push = replace(push, others=(replace(push.others[0], position=at(3)),))
    assert job.tracker.push(push).verdict is Verdict.APPLY
    job.tracker.configure(ssp(1))
    assert not job.tracker.may_pull(at(3))
    assert job.tracker.may_pull(push.lowest)


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_all_of_its_workers_are_known_after_a_restart_from_the_state_and_from_the_log(mode: Consistency) -> None:
    job = Job(mode, 3)
    push = combined(job, 1, 2, 0)
    job.tracker.push(push)
    job.rounds()
    restored, replayed = Tracker(mode), Tracker(mode)
    restored.restore(job.tracker.persisted_state())
    replayed.replay([push], 1, is_round=job.tracker.collects)
    for tracker in (restored, replayed):
        assert tracker.clocks() == job.tracker.clocks()
        assert tracker.persisted_state() == job.tracker.persisted_state()
        tracker.members(job.live)
        for again in (push, *push.others):
            assert tracker.push(again).verdict is Verdict.DUPLICATE


def test_in_an_open_round_none_of_its_workers_is_known_to_a_successor() -> None:
    job = Job(SYNC, 3)
    push = combined(job, 1, 2)
    job.tracker.push(push)
    assert job.tracker.rounds.open() == {job.key(1): 1, job.key(2): 1}
    restored = Tracker(SYNC)
    restored.restore(job.tracker.persisted_state())
    restored.members(job.live)
    assert restored.push(push).verdict is Verdict.HOLD


def test_skipped_by_all_it_moves_their_clocks_and_changes_nothing() -> None:
    for mode in MODES:
        job = Job(mode, 2)
        assert job.tracker.push(replace(combined(job, 0, 1), skipped=True)).verdict is Verdict.SKIP
        job.rounds()
        assert (job.position(0), job.position(1), job.tracker.version) == (at(1), at(1), 0)
        assert job.tracker.counts.outcomes["skipped"] == 1


def test_a_round_that_is_closed_until_its_norm_is_known_has_it_once() -> None:
    job = Job(backup(1), 4)
    job.tracker.push(combined(job, 2, 1))
    assert job.tracker.close_ready(0.0) is None
    job.push(3, 1)
    assert [push.worker.rank for push in job.tracker.close_ready(0.0) or ()] == [2, 3]
    assert job.push(0, 1).verdict is Verdict.LATE
    taken = job.tracker.take_closed(4.0)
    assert (taken.version, [push.workers for push in taken.contributions]) == (1, [2, 1])
    assert [standing.last_sequence for standing in job.tracker.persisted_state().standings] == [0, 1, 1, 1]
    assert job.tracker.part_of_norm(at(1)) == 4.0
