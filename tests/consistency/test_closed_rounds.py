"""Closed rounds, while shards ask each other for norms: their pushes are settled, and every part is found again."""

from __future__ import annotations

import json

import pytest

from ps_protocol.v1 import shard_pb2 as pb
from ps_server.consistency import Tracker, TrackerState, Verdict
from ps_server.consistency.rounds import KEPT_NORMS
from ps_server.consistency.tracker_state import pushes_from_pb, pushes_to_pb

from .job import ASYNC, SYNC, Job, at, backup


def closed(consistency=SYNC, workers: int = 2) -> Job:
    """A job whose first round is closed: all workers have pushed, or all but the backup workers."""
    job = Job(consistency, workers)
    for rank in range(workers - consistency.backup):
        job.push(rank, 1)
    assert len(job.tracker.close_ready(0.0) or ()) == workers - consistency.backup
    return job


def test_a_closed_round_is_not_applied_until_it_is_taken() -> None:
    job = closed()
    tracker = job.tracker
    assert (tracker.version, tracker.applied) == (0, at(0))
    assert not tracker.may_pull(at(1))
    assert tracker.close_ready(0.0) is None
    taken = tracker.take_closed(2.5)
    assert ([push.worker.rank for push in taken.contributions], taken.version, tracker.applied) == ([0, 1], 1, at(1))
    assert tracker.may_pull(at(1))


def test_a_push_that_comes_when_its_round_is_closed_is_late_and_told_where_to_go_on() -> None:
    job = closed(backup(1), workers=3)
    late = job.push(2, 1)
    assert late.verdict is Verdict.LATE
    assert job.tracker.resume(at(1)) == at(1)
    assert [push.worker.rank for push in job.tracker.take_closed(1.0).contributions] == [0, 1]


def test_a_worker_that_joins_while_a_round_is_closed_enters_behind_it() -> None:
    job = closed()
    assert job.join(2, 9) == at(1)


def test_what_the_round_waits_for_is_told_to_those_who_wait() -> None:
    job = closed()
    assert job.tracker.blocker(at(1)) == "step 1 is about to be applied"
    job.tracker.norms.waits_for = "the gradient norm of step 1 on shard 1"
    assert job.tracker.blocker(at(1)) == "the gradient norm of step 1 on shard 1"


def test_the_part_of_a_round_is_known_once_it_is_computed_and_after_it_is_taken() -> None:
    job = closed()
    tracker = job.tracker
    assert tracker.part_of_norm(at(1)) is None
    tracker.norms.part = 2.5
    assert tracker.part_of_norm(at(1)) == 2.5
    tracker.take_closed(2.5)
    assert tracker.part_of_norm(at(1)) == 2.5


def test_a_round_that_is_still_to_come_has_no_part_yet() -> None:
    job = Job(SYNC)
    assert job.tracker.part_of_norm(at(1)) is None
    job.push(0, 1)
    assert job.tracker.part_of_norm(at(1)) is None


def test_a_round_that_was_passed_without_a_push_here_has_the_part_zero() -> None:
    job = Job(SYNC)
    for rank in (0, 1):
        job.push(rank, 2)  # their pushes of step 1 went to other shards alone, before they lost it
    assert job.tracker.part_of_norm(at(1)) == 0.0
    job.leave(0)
    job.leave(1)
    assert job.tracker.part_of_norm(at(3)) == 0.0, "nobody is left who could push it"


def test_where_pushes_are_applied_alone_no_round_comes() -> None:
    job = Job(ASYNC)
    job.push(0, 1)
    assert job.tracker.part_of_norm(at(1)) == job.tracker.part_of_norm(at(9)) == 0.0


def test_what_was_pending_when_the_mode_changed_is_closed_as_it_is() -> None:
    job = Job(SYNC)
    job.push(0, 1)
    job.tracker.configure(ASYNC)
    assert job.tracker.part_of_norm(at(1)) is None
    assert len(job.tracker.close_ready(0.0) or ()) == 1


def test_a_round_of_skipped_pushes_is_closed_with_none() -> None:
    job = Job(SYNC)
    job.push(0, 1, skipped=True)
    job.push(1, 1, skipped=True)
    assert job.tracker.close_ready(0.0) == ()
    job.tracker.take_closed(0.0)
    assert (job.tracker.version, job.tracker.applied, job.tracker.part_of_norm(at(1))) == (0, at(1), 0.0)


def after(rounds: int) -> Job:
    job = Job(SYNC)
    for clock in range(1, rounds + 1):
        for rank in (0, 1):
            job.push(rank, clock)
        job.tracker.close_ready(0.0)
        job.tracker.take_closed(float(clock))
    return job


@pytest.mark.parametrize("rounds", [1, KEPT_NORMS + 3])
def test_a_restart_knows_the_last_parts_again(rounds: int) -> None:
    state = after(rounds).tracker.persisted_state()
    through_json = TrackerState.from_json(json.loads(json.dumps(state.to_json())))
    through_pb = pushes_from_pb(pb.KnownPushes.FromString(pushes_to_pb(state).SerializeToString()))
    assert through_json.norms == through_pb.norms == state.norms
    for known in (through_json, through_pb):
        again = Tracker(SYNC)
        again.restore(known)
        last = range(max(1, rounds - KEPT_NORMS + 1), rounds + 1)
        assert [again.part_of_norm(at(clock)) for clock in last] == [float(clock) for clock in last]


def test_a_closed_round_is_not_part_of_what_a_restart_knows() -> None:
    job = after(1)
    for rank in (0, 1):
        job.push(rank, 2)
    job.tracker.close_ready(0.0)
    job.tracker.norms.part = 7.0
    again = Tracker(SYNC)
    again.restore(job.tracker.persisted_state())
    again.members(job.live)
    assert (again.applied, again.part_of_norm(at(1)), again.part_of_norm(at(2))) == (at(1), 1.0, None)


def test_a_replayed_update_brings_its_part() -> None:
    job = after(2)
    again = Tracker(SYNC)
    again.replay([job.info(0, 2)], 2, is_round=True, squared_norm=2.0)
    assert again.part_of_norm(at(2)) == 2.0


def test_a_state_of_an_older_version_has_no_parts() -> None:
    data = after(1).tracker.persisted_state().to_json()
    del data["norms"]
    assert TrackerState.from_json(json.loads(json.dumps(data))).norms == ()
