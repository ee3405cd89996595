"""The policy notices what holds, once, stays calm between its bounds, and keeps its limits. Costs about 1 CPU s."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ps_protocol.retry import WORKERS
from ps_server.coordinator.elasticity.decisions import AskForWorkers, Decision, JobLook, Relieve
from ps_server.coordinator.elasticity.policy import (
    LEAST_QUEUE,
    MOST_NAMED,
    MOVES_PER_HOUR,
    QUEUE_PART,
    ElasticPolicy,
    ElasticSettings,
    median_without,
)
from ps_server.coordinator.times import GIVEN_SECONDS, HOLD_SECONDS, LONGEST_HOLD_SECONDS, SETTLE_SECONDS
from tests.support.length import examples

MB = 1e6
DAY = 24 * 3600.0


class Watched:
    """A policy in a time of its own, which looks once a second."""

    def __init__(self, **settings: object) -> None:
        self.policy = ElasticPolicy(ElasticSettings(**settings))  # type: ignore[arg-type]
        self.now = 0.0
        self.decisions: list[tuple[float, Decision]] = []

    def see(self, seconds: float, look: JobLook) -> list[Decision]:
        found: list[Decision] = []
        for _ in range(int(seconds)):
            self.now += 1.0
            found += self.policy.decide(look, self.now)
        self.decisions += [(self.now, each) for each in found]
        return found


def workers(*speeds: float) -> JobLook:
    return JobLook(speeds=dict(enumerate(speeds)))


def shards(*traffic: float) -> JobLook:
    return JobLook(traffic=dict(enumerate(traffic)))


def queues(*lengths: float, traffic: float = 4.0) -> JobLook:
    """Shards of the same traffic, with so many pushes of 1 MB that wait."""
    queued = dict(enumerate(lengths))
    return replace(
        shards(*[traffic * MB] * len(lengths)),
        queued_pushes=queued,
        queued_bytes={k: v * MB for k, v in queued.items()},
    )


def texts(decisions: Iterable[Decision]) -> list[str]:
    return [each.reason for each in decisions]


@given(st.lists(st.floats(0.0, 1e6), min_size=1, max_size=9), st.data())
def test_the_median_of_the_others(numbers: list[float], data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(numbers) - 1))
    others = numbers[:at] + numbers[at + 1 :]
    assert median_without(sorted(numbers), numbers[at]) == (median(others) if others else 0.0)


SLOW = "worker 3 is slow: 5.0 steps/s, the others 20.0; its share of leased data shrinks"


def test_a_slow_worker_is_told_once_and_told_when_it_is_over() -> None:
    watched = Watched()
    assert not watched.see(HOLD_SECONDS, workers(20, 20, 20, 5))
    assert texts(watched.see(100, workers(20, 20, 20, 5))) == [SLOW]
    assert not watched.see(100, workers(20, 20, 20, 12))
    assert texts(watched.see(100, workers(20, 20, 20, 15))) == [
        "worker 3 is not slow any more: 15.0 steps/s, the others 20.0"
    ]


@pytest.mark.parametrize(
    "look",
    [
        pytest.param(workers(20, 20, 20, 11), id="a worker that is somewhat slower"),
        pytest.param(workers(20), id="one worker"),
        pytest.param(workers(0, 0, 0), id="all wait"),
        pytest.param(replace(workers(20, 20, 1), training=False), id="a job that does not train"),
        pytest.param(shards(9 * MB, 8 * MB), id="shards that are about as busy"),
        pytest.param(shards(9 * MB), id="one shard"),
        pytest.param(shards(0.9 * MB, 0.1 * MB), id="little traffic"),
        pytest.param(replace(shards(9 * MB, 1 * MB), moving=True), id="a move"),
        pytest.param(queues(9.0, 8.0, 7.0), id="queues that are about as long"),
        pytest.param(queues(LEAST_QUEUE, 0.0), id="a short queue"),
        pytest.param(queues(9.0), id="the queue of one shard"),
        pytest.param(JobLook(), id="nobody is there, and nobody is to be asked"),
    ],
)
def test_what_is_no_reason_for_anything(look: JobLook) -> None:
    assert not Watched(rebalance=True).see(1000, look)


def test_what_lasts_too_short_a_time_is_no_reason() -> None:
    watched = Watched()
    for _ in range(10):
        assert not watched.see(HOLD_SECONDS - 1, workers(20, 20, 5))
        assert not watched.see(2, workers(20, 20, 20))


def test_a_hot_shard_is_told_and_without_rebalance_nothing_moves() -> None:
    watched = Watched()
    assert texts(watched.see(2000, shards(9 * MB, 1 * MB, 2 * MB))) == ["shard 0 is hot: 9.0 MB/s, the mean is 4.0"]
    assert texts(watched.see(100, shards(4 * MB, 4 * MB, 4 * MB))) == [
        "shard 0 is not hot any more: 4.0 MB/s, the mean is 4.0"
    ]


def test_a_hot_shard_gives_as_much_as_brings_neither_across_the_mean() -> None:
    told, moved = Watched(rebalance=True).see(HOLD_SECONDS + 1, shards(9 * MB, 1 * MB, 2 * MB))
    assert told.warning
    assert isinstance(moved, Relieve)
    assert (moved.shard, moved.to, moved.part) == (0, 1, pytest.approx(3 / 9))
    assert moved.reason == "33% of shard 0 moves to shard 1: 9.0 MB/s, 1.0 there"


def test_a_shard_that_moves_do_not_help_is_left_alone_until_it_cools_down() -> None:
    watched = Watched(rebalance=True)
    found = watched.see(4000, shards(9 * MB, 1 * MB))
    assert [type(each) for each in found] == [Decision, Relieve, Decision]
    assert found[-1].reason == "shard 0 is left alone: moving slices did not lower its traffic"
    watched.see(100, shards(5 * MB, 5 * MB))
    assert any(isinstance(each, Relieve) for each in watched.see(100, shards(9 * MB, 1 * MB)))


def test_a_shard_whose_queue_stays_long_is_hot_though_its_traffic_is_not() -> None:
    watched = Watched()
    assert texts(watched.see(2000, queues(3.0, 0.0, 0.6))) == [
        "shard 0 is hot: 3.0 pushes (3.0 MB) wait, the mean is 1.2"
    ]
    assert not watched.see(1000, queues(1.5, 1.0, 1.0))
    assert not watched.see(1000, queues(0.45, 0.0, 0.0))
    assert texts(watched.see(100, queues(0.3, 0.0, 0.0))) == [
        "shard 0 is not hot any more: 0.3 pushes (0.3 MB) wait, the mean is 0.1"
    ]


def test_a_shard_that_was_calm_for_an_hour_has_to_be_hot_for_a_minute() -> None:
    watched = Watched()
    assert not watched.see(3600, shards(5 * MB, 5 * MB))
    assert not watched.see(60, shards(9 * MB, 1 * MB))
    assert texts(watched.see(2, shards(9 * MB, 1 * MB))) == ["shard 0 is hot: 9.0 MB/s, the mean is 5.0"]
    assert len(watched.see(100, shards(5 * MB, 5 * MB))) == 1
    assert len(watched.see(HOLD_SECONDS + 1, shards(9 * MB, 1 * MB))) == 1


def test_a_shard_that_was_hot_for_an_hour_has_to_be_calm_for_a_minute() -> None:
    watched = Watched()
    assert len(watched.see(3600 + HOLD_SECONDS, shards(9 * MB, 1 * MB))) == 1
    assert not watched.see(59, shards(5 * MB, 5 * MB))
    assert texts(watched.see(3, shards(5 * MB, 5 * MB))) == ["shard 0 is not hot any more: 5.0 MB/s, the mean is 5.0"]


def test_a_shard_that_was_calm_for_days_is_hot_after_five_minutes() -> None:
    policy = ElasticPolicy(ElasticSettings())
    for day in range(3):
        assert not policy.decide(shards(5 * MB, 5 * MB), day * DAY)
    assert not policy.decide(shards(9 * MB, 1 * MB), 2 * DAY + 1.0)
    assert not policy.decide(shards(9 * MB, 1 * MB), 2 * DAY + LONGEST_HOLD_SECONDS)
    assert policy.decide(shards(9 * MB, 1 * MB), 2 * DAY + LONGEST_HOLD_SECONDS + 1.0)


def test_traffic_and_queue_are_told_each() -> None:
    both = replace(shards(9 * MB, 1 * MB), queued_pushes={0: 2.0}, queued_bytes={0: 8 * MB})
    watched = Watched()
    traffic, queue = texts(watched.see(100, both))
    assert traffic == "shard 0 is hot: 9.0 MB/s, the mean is 5.0"
    assert queue == "shard 0 is hot: 2.0 pushes (8.0 MB) wait, the mean is 1.0"
    (traffic,) = texts(watched.see(100, replace(both, traffic={0: 5 * MB, 1: 5 * MB})))
    assert traffic == "shard 0 is not hot any more: 5.0 MB/s, the mean is 5.0"
    (queue,) = texts(watched.see(100, shards(5 * MB, 5 * MB)))
    assert queue == "shard 0 is not hot any more: 0.0 pushes (0.0 MB) wait, the mean is 0.0"


def test_what_is_given_for_traffic_goes_to_no_shard_with_a_long_queue() -> None:
    look = replace(shards(9 * MB, 1 * MB, 2 * MB), queued_pushes={1: 3.0})
    moved = next(each for each in Watched(rebalance=True).see(HOLD_SECONDS + 1, look) if isinstance(each, Relieve))
    assert (moved.shard, moved.to) == (0, 2)


def test_a_shard_with_a_long_queue_gives_a_small_part_to_the_one_with_the_shortest() -> None:
    told, moved = Watched(rebalance=True).see(HOLD_SECONDS + 1, queues(3.0, 0.2, 0.1))
    assert told.warning
    assert isinstance(moved, Relieve)
    assert (moved.shard, moved.to, moved.part) == (0, 2, QUEUE_PART)
    assert moved.reason == "10% of shard 0 moves to shard 2: 3.0 pushes wait, 0.1 there"


def test_for_a_queue_no_shard_gets_more_traffic_than_a_shard_may_have() -> None:
    look = queues(3.0, 0.0)
    watched = Watched(rebalance=True)
    assert len(watched.see(100, replace(look, traffic={0: 4 * MB, 1: 6 * MB}))) == 1
    (moved,) = watched.see(1, replace(look, traffic={0: 4.9 * MB, 1: 5.1 * MB}))
    assert isinstance(moved, Relieve)
    watched = Watched(rebalance=True)
    _, moved = watched.see(HOLD_SECONDS + 1, replace(look, traffic={0: 4.6 * MB, 1: 5.4 * MB}))
    assert isinstance(moved, Relieve)
    assert moved.part == QUEUE_PART
    _, moved = Watched(rebalance=True).see(HOLD_SECONDS + 1, replace(look, traffic={0: 4.2 * MB, 1: 5.8 * MB}))
    assert isinstance(moved, Relieve)
    assert moved.part == pytest.approx(0.2 / 4.2)


def test_a_shard_that_does_nothing_but_wait_gives_nothing_for_its_queue() -> None:
    (told,) = Watched(rebalance=True).see(1000, queues(3.0, 0.0, traffic=0.0))
    assert told.reason.startswith("shard 0 is hot")


def test_a_queue_that_moves_do_not_shorten_is_left_alone() -> None:
    found = Watched(rebalance=True).see(4000, queues(3.0, 0.1))
    assert [type(each) for each in found] == [Decision, Relieve, Decision]
    assert found[-1].reason == "shard 0 is left alone: moving slices did not shorten its queue"


def test_a_shard_gives_nothing_back_for_its_queue() -> None:
    watched = Watched(rebalance=True)
    assert isinstance(watched.see(HOLD_SECONDS + 1, queues(3.0, 0.1))[-1], Relieve)
    found = watched.see(4000, queues(0.1, 3.0))
    assert "shard 1 is hot: 3.0 pushes (3.0 MB) wait, the mean is 1.6" in texts(found)
    assert texts(found)[-1] == "shard 1 is left alone: it took slices of all that have less"
    assert not any(isinstance(each, Relieve) for each in found)


def test_what_a_shard_took_does_not_go_back_by_way_of_others_either() -> None:
    watched = Watched(rebalance=True)
    for traffic, wanted in (((9, 1, 4), (0, 1)), ((4, 9, 1), (1, 2)), ((3, 4, 9), None)):
        found = watched.see(200, shards(*(each * MB for each in traffic)))
        moves = [(each.shard, each.to) for each in found if isinstance(each, Relieve)]
        assert moves == ([wanted] if wanted else [])
    assert texts(found)[-1] == "shard 2 is left alone: it took slices of all that have less"


def test_a_day_later_slices_may_go_back() -> None:
    watched = Watched(rebalance=True)
    assert isinstance(watched.see(HOLD_SECONDS + 1, shards(9 * MB, 1 * MB))[-1], Relieve)
    watched.see(100, shards(5 * MB, 5 * MB))
    watched.now += GIVEN_SECONDS
    moved = watched.see(LONGEST_HOLD_SECONDS + 1, shards(1 * MB, 9 * MB))[-1]
    assert isinstance(moved, Relieve)
    assert (moved.shard, moved.to) == (1, 0)


def test_workers_that_are_lost_are_asked_for_with_growing_pauses() -> None:
    watched = Watched(workers=3)
    lost = replace(workers(20, 20), lost=frozenset({2}))
    assert not watched.see(HOLD_SECONDS, lost)
    (first,) = watched.see(59, lost)
    assert isinstance(first, AskForWorkers)
    assert (first.wanted, first.ranks, first.reason) == (3, (2,), "2 of 3 workers are there, lost: 2")
    asked = [at for at in range(7200) if watched.see(1, lost)]
    assert [b - a for a, b in pairwise(asked)][:5] == [120, 240, 480, 960, WORKERS.longest_seconds]
    assert texts(watched.see(100, workers(20, 20, 20))) == ["all 3 workers are there again"]


def test_many_workers_that_become_slow_at_once_are_one_decision() -> None:
    watched = Watched()
    told = texts(watched.see(60, workers(*[20.0] * 60, *[1.0] * (MOST_NAMED + 1))))
    assert told == ["9 workers are slow: 60, 61, 62, 63, 64, 65, 66, 67 and others"]
    told = texts(watched.see(60, workers(*[20.0] * 69)))
    assert told == ["9 workers are not slow any more: 60, 61, 62, 63, 64, 65, 66, 67 and others"]
    assert len(watched.see(60, workers(*[20.0] * 60, *[1.0] * MOST_NAMED))) == MOST_NAMED


def test_a_job_that_waits_for_lost_workers_asks_for_them_and_judges_nobody() -> None:
    waits = replace(workers(20, 20, 1), training=False, waiting=True, lost=frozenset({3}))
    (asked,) = Watched(workers=4).see(60, waits)
    assert isinstance(asked, AskForWorkers)


def test_nobody_is_asked_for_in_the_place_of_workers_that_are_done() -> None:
    assert not Watched(workers=3).see(1000, replace(workers(20, 20), left=1))


class Job:
    """Shards with rows of some traffic, which a move takes along with what is moved; workers come when asked for."""

    def __init__(self, seed: int, shards: int, rows: int) -> None:
        self.random = random.Random(seed)
        self.rows = [self.random.paretovariate(1.2) * MB for _ in range(rows)]
        self.place = [self.random.randrange(shards) for _ in self.rows]
        #: Where each row has been.
        self.been = [{place} for place in self.place]
        self.shards, self.alive, self.coming = shards, 4, list[float]()
        #: How much each shard could take; some less than they get.
        self.most = [self.random.uniform(0.5, 4.0) * sum(self.rows) / shards for _ in range(shards)]

    def look(self, noise: float) -> JobLook:
        traffic = dict.fromkeys(range(self.shards), 0.0)
        for row, place in zip(self.rows, self.place, strict=True):
            traffic[place] += row
        shaken = {shard: each * self.random.uniform(1 - noise, 1 + noise) for shard, each in traffic.items()}
        # As long as a queue becomes where no more than ten pushes are under way.
        busy = {shard: each / self.most[shard] for shard, each in shaken.items()}
        queued = {shard: 10.0 if each >= 1.0 else min(10.0, each**2 / (1.0 - each)) for shard, each in busy.items()}
        return JobLook(speeds=dict.fromkeys(range(self.alive), 10.0), traffic=shaken, queued_pushes=queued)

    def take(self, decision: Decision, now: float) -> None:
        if isinstance(decision, Relieve):
            held = [at for at, place in enumerate(self.place) if place == decision.shard]
            for at in self.random.sample(held, round(decision.part * len(held))):
                assert decision.to not in self.been[at], "a row comes back to a shard that it was on"
                self.place[at] = decision.to
                self.been[at].add(decision.to)
        elif isinstance(decision, AskForWorkers):
            self.coming = [now + 40.0] * (decision.wanted - self.alive)


@examples(50)
@given(st.integers(0, 1 << 30), st.integers(2, 6), st.integers(1, 200), st.floats(0.0, 0.15))
def test_a_job_comes_to_rest(seed: int, shards: int, rows: int, noise: float) -> None:
    """Four hours of a job whose load does not change but for noise, in which two workers are lost."""
    job, policy = Job(seed, shards, rows), ElasticPolicy(ElasticSettings(rebalance=True, workers=4))
    moves: list[float] = []
    requests = 0
    for second in range(0, 4 * 3600, 5):
        now = float(second)
        if second == 3600:
            job.alive -= 2
        job.alive += sum(at <= now for at in job.coming)
        job.coming = [at for at in job.coming if at > now]
        for decision in policy.decide(job.look(noise), now):
            requests += isinstance(decision, AskForWorkers)
            if isinstance(decision, Relieve):
                assert decision.shard != decision.to
                assert 0.0 < decision.part < 1.0
                moves.append(now)
            job.take(decision, now)
    assert all(b - a >= SETTLE_SECONDS for a, b in pairwise(moves)), seed
    assert all(moves[at + MOVES_PER_HOUR] - moves[at] >= 3600.0 for at in range(len(moves) - MOVES_PER_HOUR)), seed
    assert not [at for at in moves if at > 3 * 3600.0], f"seed {seed}: it still moves after 3 hours"
    assert (job.alive, requests) == (4, 1), seed
