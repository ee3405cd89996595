"""The job at a glance: who is slow, who is missing, what each waits for, what is held."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from ps_protocol.cluster.history import JobHistory
from ps_protocol.cluster.view import Divergence, LogCounts, Member, Role, TableCounts
from ps_protocol.cluster.weights import WeightsReader
from ps_protocol.model.spec import Consistency, Mode
from ps_server.glance.job import glance_of
from ps_server.glance.publications import READERS
from tests.glance.jobs import entry, history, publication, shard, worker

SYNC, SSP = Consistency(Mode.SYNC), Consistency(Mode.SSP, staleness=4)


def stragglers(job: JobHistory) -> list[str]:
    return [each.name for each in glance_of(job).workers if each.straggler]


def alerts(job: JobHistory) -> list[str]:
    return [alert.text for alert in glance_of(job).alerts]


def test_the_totals_are_those_of_live_members() -> None:
    job = history(
        worker(0, steps_per_second=2.0, samples_per_second=20.0, metrics={"loss": 1.0}),
        worker(1, steps_per_second=3.0, samples_per_second=30.0, metrics={"loss": 3.0}),
        worker(2, gone="left", steps_per_second=0.0, metrics={"loss": 100.0}),
        shard(0, bytes_per_second=7.0),
        expected_workers=3,
    )
    glance = glance_of(job)
    assert (glance.steps_per_second, glance.samples_per_second, glance.bytes_per_second) == (5.0, 50.0, 7.0)
    assert glance.reported == {"loss": 2.0}
    assert (glance.live_workers, glance.expected_workers, glance.live_shards, glance.expected_shards) == (2, 3, 1, 1)
    assert (glance.state, glance.mode, glance.elapsed_seconds) == ("training", "async", 10.0)
    assert glance.alerts == ()


def test_a_model_that_diverges_is_one_alert_with_the_staleness_and_the_remedy() -> None:
    of_shard = Divergence(
        Member(Role.SHARD, 1, 3), "gradient norm of model 'm'", 812.0, 6.1, 1000.0, 7.25, 15.0, "/c/checkpoint-3", 1200
    )
    of_worker = Divergence(Member(Role.WORKER, 2, 3), "loss", math.inf, 0.5, 1000.0, 7.25, 15.0)
    job = history(worker(0), shard(0))
    told = replace(job, status=replace(job.status, divergences=(of_shard, of_worker)))
    (text,) = alerts(told)
    assert text == (
        "the model diverges: gradient norm of model 'm' of shard 1 is 812, at most 6.1 before, and 1 more number; "
        "staleness is 7.2, of 99 % at most 15: lower the learning rate or momentum, or use psctl mode sync, or ssp; "
        "psctl restore step=1200 goes back to before"
    )
    ssp = history(worker(0), shard(0), consistency=SSP)
    (text,) = alerts(replace(ssp, status=replace(ssp.status, divergences=(of_worker,))))
    assert text.startswith("the model diverges: loss of worker 2 is inf, at most 0.5 before; staleness is 7.2")
    assert text.endswith("or use psctl mode sync, or ssp with a smaller bound")
    assert alerts(replace(told, status=replace(told.status, view=replace(told.status.view, finished=True)))) == []


def test_workers_are_behind_the_first_one() -> None:
    job = history(worker(0, phase=1, clock=7), worker(1, phase=1, clock=5), worker(2, phase=0, clock=90), shard(0))
    assert [each.behind for each in glance_of(job).workers] == [0, 2, 7]


@pytest.mark.parametrize(
    ("speeds", "found"),
    [((10.0, 9.0, 8.0), []), ((10.0, 9.0, 3.0), ["worker 2"]), ((1.0, 9.0), ["worker 0"]), ((5.0,), [])],
)
def test_in_async_the_straggler_is_much_slower_than_the_others(speeds: tuple[float, ...], found: list[str]) -> None:
    joined = worker(9, steps_per_second=0.0, clock=0)
    job = history(*(worker(rank, steps_per_second=speed) for rank, speed in enumerate(speeds)), joined, shard(0))
    assert stragglers(job) == found


@pytest.mark.parametrize(
    ("speeds", "shares", "found"),
    [
        ((1.0, 1.0, 1.0), {0: 0.3, 1: 0.0, 2: 0.3}, ["worker 1"]),
        ((1.0, 1.0, 1.0), {0: 0.1, 1: 0.0, 2: 0.1}, []),
        ((1.0, 1.0, 0.5), {}, ["worker 2"]),
    ],
)
def test_in_ssp_the_straggler_holds_the_others_at_the_bound_or_is_much_slower(
    speeds: tuple[float, ...], shares: dict[int, float], found: list[str]
) -> None:
    waits = {rank: {"bound": share, "pull": 0.5} for rank, share in shares.items()}
    workers = (worker(rank, steps_per_second=speed) for rank, speed in enumerate(speeds))
    assert stragglers(history(*workers, shard(0), consistency=SSP, wait_shares=waits)) == found


def test_positions_are_compared_as_of_now() -> None:
    """A worker whose last heartbeat is older has gone on since."""
    early = worker(0, heard=1.0, clock=100, steps_per_second=10.0)
    late = worker(1, heard=0.0, clock=110, steps_per_second=10.0)
    assert [each.behind for each in glance_of(history(early, late, shard(0))).workers] == [0, 0]


@pytest.mark.parametrize(
    ("shares", "found"),
    [
        ({0: 0.7, 1: 0.6, 2: 0.05}, ["worker 2"]),
        ({0: 0.1, 1: 0.1, 2: 0.0}, []),
        ({0: 0.5, 1: 0.5, 2: 0.4}, []),
        ({}, []),
    ],
)
def test_in_sync_the_straggler_does_not_wait_while_the_others_do(shares: dict[int, float], found: list[str]) -> None:
    waits = {rank: {"round": share} for rank, share in shares.items()}
    job = history(*(worker(rank) for rank in range(3)), shard(0), consistency=SYNC, wait_shares=waits)
    assert stragglers(job) == found


def test_a_worker_says_what_it_waits_for_and_for_whom() -> None:
    waits = {
        0: {"round": 0.6, "pull": 0.1},
        1: {"round": 0.3, "pull": 0.5},
        2: {"round": 0.3, "reconnect": 0.6},
        3: {"pull": 0.001},
    }
    job = history(*(worker(rank) for rank in range(4)), shard(0), consistency=SYNC, wait_shares=waits)
    found = {each.index: (each.waits_for, each.wait_share) for each in glance_of(job).workers}
    assert found[0] == ("the round: worker 3", pytest.approx(0.7))
    assert found[1][0] == "parameters"
    assert found[2][0] == "a lost connection"
    assert found[3][0] == ""


@pytest.mark.parametrize(
    ("members", "more", "expected"),
    [
        ((worker(0),), {"expected_shards": 2}, ["shard 0 is missing", "shard 1 is missing"]),
        ((worker(0), shard(0, gone="lease ended")), {}, ["shard 0 is lost: lease ended"]),
        ((worker(0), shard(0, gone="left: stopped")), {}, ["shard 0 is missing"]),
        ((worker(0), shard(0, heard=6.0)), {}, ["shard 0 has sent no heartbeat for 6 s"]),
        (
            (*(worker(rank, heard=9.0) for rank in range(5)), shard(0)),
            {},
            ["5 workers have sent no heartbeat for long: worker 0, worker 1, worker 2 and others"],
        ),
        (
            (*(worker(rank, gone="lease ended") for rank in range(4)), worker(4), shard(0)),
            {},
            ["4 workers are lost or failed: worker 0, worker 1, worker 2 and others"],
        ),
        ((worker(0, heard=9.0), shard(0)), {}, ["worker 0 has sent no heartbeat for 9 s"]),
        ((worker(0, gone="left: ValueError: x"), shard(0)), {}, ["worker 0 is failed: ValueError: x"]),
        ((worker(0), shard(0)), {"expected_workers": 2}, ["1 of 2 workers are there"]),
        ((worker(0, metrics={"loss": math.nan}), shard(0)), {}, ["worker 0 reports loss = nan"]),
        ((worker(0), shard(0)), {"expected_shards": 2, "spare": frozenset([1])}, []),
        ((worker(0, heard=99.0),), {"finished": True}, []),
        ((worker(0, heard=99.0),), {"started": False}, []),
        ((worker(0, gone="left"), shard(0)), {"expected_workers": 1}, []),
        ((worker(0, gone="left: stopped"), shard(0)), {}, ["no worker is there"]),
        ((shard(0),), {}, []),
    ],
)
def test_alerts(members: tuple[Any, ...], more: dict[str, Any], expected: list[str]) -> None:
    assert alerts(history(*members, **more)) == expected


@pytest.mark.parametrize(("heartbeat", "lease"), [(5.0, 20.0), (1.0, 60.0)])
def test_a_member_is_not_silent_before_three_heartbeats_and_a_quarter_of_its_lease(
    heartbeat: float, lease: float
) -> None:
    assert alerts(history(worker(0), shard(0, heard=14.0), heartbeat_seconds=heartbeat, lease_seconds=lease)) == []


def test_shards_with_their_standby_log_and_streams() -> None:
    job = history(
        shard(0, versions={"net": 5}, streams={"shm": 2}, held_bytes=100, standby_lag=3, log=LogCounts(9, 8, 7, 1.0)),
        shard(1, gone="lease ended"),
        entry(Role.STANDBY, 0, incarnation=5),
        worker(0),
        expected_shards=3,
    )
    first, second, third = glance_of(job).shards
    assert (first.state, first.versions, first.streams, first.held_bytes) == ("live", {"net": 5}, {"shm": 2}, 100)
    assert (first.standby, first.standby_lag, first.log) == ("follows", 3, LogCounts(9, 8, 7, 1.0))
    assert (second.state, second.standby) == ("lost", "")
    assert (third.name, third.state) == ("shard 2", "missing")


def test_tables_are_sums_over_live_shards() -> None:
    parts = TableCounts("net", "ads", 5, 1, 640, 7, 1, 1)
    job = history(
        shard(0, tables=(parts,)),
        shard(1, tables=(parts, TableCounts("net", "users", 1, 0, 64, 1, 0, 0))),
        table_growth={("net", "ads"): 2.5},
    )
    ads, users = glance_of(job).tables
    assert (ads.table, ads.rows, ads.waiting, ads.size_bytes, ads.inserted, ads.growth, ads.shards) == (
        *("ads", 10, 2, 1280, 14, 2.5),
        2,
    )
    assert (users.rows, users.growth) == (1, 0.0)


def test_the_newest_life_of_a_place_is_shown() -> None:
    job = history(worker(0, incarnation=9, steps=3), worker(0, incarnation=2, gone="lease ended", steps=70), shard(0))
    (only,) = glance_of(job).workers
    assert (only.steps, only.state) == (3, "live")


def test_evaluators_are_no_workers() -> None:
    job = history(worker(0), entry(Role.EVALUATOR, 0, metrics={"auc": 0.5}), shard(0), expected_workers=1)
    glance = glance_of(job)
    assert [(each.name, each.evaluator) for each in glance.workers] == [("worker 0", False), ("evaluator 0", True)]
    assert glance.reported == {}
    assert glance.alerts == ()


def test_published_weights_have_their_newest_version_and_readers_those_furthest_behind_first() -> None:
    readers = [WeightsReader(str(at), "host", at // 2, 7 - at % 5, 10, 20, 0.0, 30, at) for at in range(80)]
    job = history(
        publications=(
            publication("policy", *readers, relayed_readers=9, delta_bytes=800, full_bytes=1600, saved_bytes=2400),
            publication("value", versions=()),
        )
    )
    policy, value = glance_of(job).publications
    assert (policy.version, policy.step, policy.at_seconds, policy.size_bytes) == (7, 70, 920.0, 5000)
    assert (policy.readers, policy.relayed, policy.behind) == (80, 9, 4)
    assert (policy.delta_bytes, policy.full_bytes, policy.saved_bytes) == (800, 1600, 2400)
    assert (value.version, value.readers, value.behind) == (0, 0, 0)
    shown = glance_of(job).readers
    assert len(shown) == READERS
    assert {each.serves % 5 for each in shown if each.behind == 4} == {4}
    assert [each.behind for each in shown] == sorted((each.behind for each in shown), reverse=True)
    assert len({(each.publication, each.name) for each in shown}) == READERS
