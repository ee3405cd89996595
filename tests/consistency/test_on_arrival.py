"""async and ssp: pushes are applied when they come; stale ones by policy; ssp bounds the distance between workers."""

from __future__ import annotations

import pytest

from ps_protocol.model.spec import WORKERS, Consistency, StalePolicy
from ps_server.consistency import Position, PushDecision, Verdict
from ps_server.consistency.tracker_state import STALENESS_BUCKETS

from .job import ASYNC, Job, at, ssp, stale


@pytest.mark.parametrize("mode", [ASYNC, ssp(2)], ids=str)
def test_each_push_makes_a_version(mode: Consistency) -> None:
    job = Job(mode)
    decisions = [job.push(0, 1), job.push(1, 1), job.push(0, 2)]
    assert [d.verdict for d in decisions] == [Verdict.APPLY] * 3
    assert job.tracker.version == 3
    assert job.rounds() == []


def test_async_answers_every_pull_at_once() -> None:
    job = Job(ASYNC)
    job.push(0, 1000)
    assert job.tracker.may_pull(at(1000))
    assert job.tracker.blocker(at(1000)) is None


@pytest.mark.parametrize("bound", [0, 1, 4])
def test_ssp_lets_a_worker_go_exactly_its_bound_ahead_of_the_slowest(bound: int) -> None:
    job = Job(ssp(bound))
    job.push(1, 2)
    assert job.tracker.may_pull(at(bound))
    assert not job.tracker.may_pull(at(bound + 1))
    job.push(0, 1)
    assert job.tracker.may_pull(at(bound + 1))
    assert not job.tracker.may_pull(at(bound + 2))


def test_ssp_holds_back_who_is_a_phase_ahead_however_large_the_bound() -> None:
    job = Job(ssp(1000))
    job.tracker.arrive(job.key(0), 0)
    job.push(0, 1, phase=1)
    job.push(1, 999)
    assert not job.tracker.may_pull(Position(1, 1))
    assert job.tracker.may_pull(at(999))
    job.tracker.arrive(job.key(1), 0)
    assert job.tracker.may_pull(Position(1, 1))


def test_a_blocked_pull_names_who_it_waits_for_and_where_that_one_stands() -> None:
    job = Job(ssp(2), workers=4)
    job.push(0, 20)
    job.push(3, 17)
    assert job.tracker.blocker(at(20)) == "waiting for worker 1 and 1 more at step 0 (ssp(2))"
    job.leave(1)
    job.leave(2)
    assert job.tracker.blocker(at(20)) == "waiting for worker 3 at step 17 (ssp(2))"


def test_staleness_is_what_was_applied_since_the_pull() -> None:
    job = Job(ASYNC)
    assert [job.push(0, clock, pulled=0).staleness for clock in (1, 2, 3)] == [0, 1, 2]
    assert job.push(1, 1, pulled=3).staleness == 0
    assert job.tracker.counts.staleness[:3] == [2, 1, 1]


def test_the_last_bucket_of_the_histogram_counts_all_beyond() -> None:
    job = Job(ASYNC)
    for clock in range(1, STALENESS_BUCKETS + 11):
        job.push(0, clock, pulled=0)
    assert job.tracker.counts.staleness == [1] * (STALENESS_BUCKETS - 1) + [11]


def test_a_push_above_the_threshold_is_rejected_and_its_clock_moves() -> None:
    job = Job(stale(StalePolicy.REJECT, 1))
    job.push(0, 1)
    assert job.push(0, 2, pulled=0).verdict is Verdict.APPLY
    decision = job.push(1, 1, pulled=0)
    assert (decision.verdict, decision.staleness) == (Verdict.STALE, 2)
    assert decision.reason == "staleness 2, the rule is to reject above 1"
    assert job.tracker.version == 2
    assert job.position(1) == at(1)
    assert job.tracker.counts.outcomes["stale"] == 1
    assert sum(job.tracker.counts.staleness) == 2


@pytest.mark.parametrize(
    ("threshold", "scales"),
    [
        (0, [1.0, 1.0, 1 / 2, 1 / 3, 1 / 4]),
        (1, [1.0, 1.0, 1 / 2, 1 / 3, 1 / 4]),
        (3, [1.0, 1.0, 1.0, 1.0, 3 / 4]),
    ],
)
def test_a_push_above_the_threshold_is_scaled_by_the_threshold_over_its_staleness(
    threshold: int, scales: list[float]
) -> None:
    job = Job(stale(StalePolicy.SCALE, threshold))
    assert [job.push(0, clock, pulled=0).scale for clock in range(1, 6)] == scales
    assert job.tracker.version == 5


def test_a_threshold_of_workers_follows_the_live_ones() -> None:
    job = Job(stale(StalePolicy.SCALE, WORKERS), workers=3)
    assert [job.push(0, clock, pulled=0).scale for clock in range(1, 6)] == [1.0, 1.0, 1.0, 1.0, 3 / 4]
    job.leave(2)
    assert job.push(0, 6, pulled=0).scale == 2 / 5
    job.join(2, 9)
    job.join(3, 10)
    assert job.push(0, 7, pulled=0).scale == 4 / 6


def test_pushes_staler_than_there_are_workers_are_rejected() -> None:
    job = Job(stale(StalePolicy.REJECT, WORKERS), workers=2)
    verdicts = [job.push(0, clock, pulled=0).verdict for clock in range(1, 5)]
    assert verdicts == [Verdict.APPLY, Verdict.APPLY, Verdict.APPLY, Verdict.STALE]
    job.leave(1)
    assert job.push(0, 5, pulled=1).verdict is Verdict.STALE
    assert job.push(0, 6, pulled=2).verdict is Verdict.APPLY


@pytest.mark.parametrize("policy", StalePolicy)
@pytest.mark.parametrize("threshold", [0, 1, WORKERS])
def test_a_fresh_push_is_applied_as_it_is_by_every_rule(policy: StalePolicy, threshold: int | str) -> None:
    job = Job(stale(policy, threshold))
    for clock in range(1, 4):
        decision = job.push(0, clock, pulled=clock - 1)
        assert decision == PushDecision(Verdict.APPLY)


def test_the_accepting_policy_ignores_the_threshold() -> None:
    job = Job(stale(StalePolicy.ACCEPT, 0))
    job.push(0, 1)
    decision = job.push(1, 1, pulled=0)
    assert (decision.verdict, decision.scale, decision.staleness) == (Verdict.APPLY, 1.0, 1)


@pytest.mark.parametrize("mode", [ASYNC, ssp(0), stale(StalePolicy.REJECT, 0)], ids=str)
def test_a_skipped_push_moves_the_clock_and_makes_no_version(mode: Consistency) -> None:
    job = Job(mode)
    job.push(1, 1)
    assert job.push(0, 1, skipped=True).verdict is Verdict.SKIP
    assert job.tracker.version == 1
    assert job.position(0) == at(1)
    assert job.tracker.may_pull(at(1))
    assert job.tracker.counts.outcomes["skipped"] == 1
    assert job.rounds() == []


def test_a_worker_that_has_seen_a_later_version_is_not_of_negative_staleness() -> None:
    job = Job(ASYNC)
    assert job.push(0, 1, pulled=50).staleness == 0
