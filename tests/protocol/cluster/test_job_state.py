"""In what state a job is: it trains, or it is stalled, and what it waits for; whether it is healthy."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from rich.console import Console

from ps_protocol.client.coordinator import CoordinatorClient
from ps_protocol.cluster.history import JobHistory
from ps_protocol.cluster.job_state import (
    ailments,
    duration_text,
    expiring,
    headline,
    job_state,
    note_of,
    state_of,
    time_text,
)
from ps_protocol.cluster.view import TOOK_OVER, ClusterStatus, JoinRequest, MemberStatus, Role
from ps_protocol.model.spec import Consistency, Mode
from ps_server.cli.psctl import main
from ps_server.coordinator.settings import ClusterSettings
from ps_server.glance.job import glance_of
from ps_server.glance.terminal import status_line, status_tables
from ps_server.page.messages import parts_of
from tests.glance.jobs import entry, history, shard, worker
from tests.support.coordinators import TestCoordinator, running_coordinator

LOST = {"gone": "its lease of 20 s ended", "ended_at": 998.0}


@pytest.mark.parametrize(
    ("members", "more", "expected"),
    [
        ((worker(0), shard(0)), {}, "training"),
        ((worker(0), shard(0)), {"started": False}, "waiting for members"),
        ((worker(0, gone="left"), shard(0, **LOST)), {"finished": True}, "finished"),
        ((worker(0), shard(0, **LOST)), {}, "stalled: shard 0 lost for 12 s"),
        ((worker(0), shard(0, gone="left: stopped", ended_at=1000.0)), {}, "stalled: shard 0 stopped for 10 s"),
        ((worker(0), shard(0, gone="left: OSError: x", ended_at=1000.0)), {}, "stalled: shard 0 failed for 10 s"),
        ((worker(0), shard(0), shard(1, **LOST)), {"spare": frozenset({1})}, "training"),
        ((worker(0), shard(0)), {"expected_shards": 2}, "stalled: shard 1 missing"),
        ((worker(0, **LOST), shard(0)), {}, "stalled: no worker"),
        ((worker(0, **LOST), shard(0, **LOST)), {}, "stalled: shard 0 lost for 12 s; no worker"),
        ((shard(0),), {}, "waiting for members"),
        (
            (worker(0), *(shard(number, **LOST) for number in range(5))),
            {},
            "stalled: shard 0 lost for 12 s; shard 1 lost for 12 s; shard 2 lost for 12 s; 2 more shards",
        ),
        ((worker(0), shard(0, **LOST), shard(0, incarnation=2)), {}, "training"),
    ],
)
def test_a_job_is_stalled_while_a_shard_it_needs_or_every_worker_is_gone(
    members: tuple[MemberStatus, ...], more: dict[str, Any], expected: str
) -> None:
    job = history(*members, **{"expected_shards": len({m.member.index for m in members if is_shard(m)}) or 1, **more})
    assert str(job_state(job.status)) == expected


def is_shard(each: MemberStatus) -> bool:
    return each.member.role is Role.SHARD


def stalled() -> JobHistory:
    """Two workers wait for a lost shard; one of them was slower than the other before."""
    waits = {0: {"reconnect": 0.9}, 1: {"reconnect": 0.5, "round": 0.3}}
    return history(
        worker(0, steps_per_second=0.1), worker(1, steps_per_second=5.0), shard(0, **LOST), wait_shares=waits
    )


def test_every_view_says_that_a_job_is_stalled() -> None:
    job, state = stalled(), "stalled: shard 0 lost for 12 s"
    glance = glance_of(job)
    assert glance.state == state
    assert parts_of(glance)["head"]["state"] == state
    assert f" · {state} · " in glance.headline == headline(job.status)
    assert status_line(job.status).startswith(f"async | {state} | worker 0 ")
    assert ailments(job.status)[0] == state


def test_in_a_stalled_job_nobody_is_called_a_straggler() -> None:
    assert not glance_of(stalled()).straggler
    assert not any(each.straggler for each in glance_of(stalled()).workers)


@pytest.mark.parametrize("mode", [Mode.ASYNC, Mode.SSP])
def test_a_worker_that_waits_for_a_shard_is_no_straggler_before_the_shard_counts_as_lost(mode: Mode) -> None:
    workers = (worker(0, steps_per_second=0.1), worker(1, steps_per_second=5.0))
    waits = {0: {"reconnect": 0.5}}
    assert glance_of(history(*workers, shard(0), consistency=Consistency(mode))).straggler == "worker 0"
    assert not glance_of(history(*workers, shard(0), consistency=Consistency(mode), wait_shares=waits)).straggler


@pytest.mark.parametrize(
    ("seconds", "text"), [(-3.0, "0 s"), (12.9, "12 s"), (119.0, "119 s"), (150.0, "2 min"), (7300.0, "2 h")]
)
def test_how_long_in_words(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text


@pytest.fixture
def coordinator() -> Iterator[TestCoordinator]:
    with running_coordinator(ClusterSettings(lease_seconds=600)) as started:
        yield started


def psctl(coordinator: TestCoordinator, *arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(main.main, ["--coordinator", coordinator.address, *arguments], env={"COLUMNS": "120"})
    return done.exit_code, done.output


def test_a_standby_that_took_over_is_no_failure_and_there_is_none_now() -> None:
    before = (shard(0, gone="its lease of 20 s ended", ended_at=990.0), shard(0, incarnation=3))
    took_over = entry(Role.STANDBY, 0, f"left: {TOOK_OVER}", incarnation=2, ended_at=991.0)
    job = history(worker(0), *before, took_over, expected_shards=1)
    words = f"took over at {time_text(991.0)}; no standby now"
    assert (state_of(took_over), note_of(took_over)) == ("took over", words)
    assert ailments(job.status) == []
    assert glance_of(job).shards[0].standby == f"took over at {time_text(991.0)}; none now"
    assert glance_of(job).alerts == ()
    lines = shown(job.status).splitlines()
    assert any(line.split()[:4] == ["standby", "0", "took", "over"] for line in lines)
    assert f"standby 0 {words}" in lines
    again = entry(Role.STANDBY, 0, incarnation=4)
    job = history(worker(0), *before, took_over, again, expected_shards=1)
    assert glance_of(job).shards[0].standby == "follows"
    assert "took over" not in shown(job.status)


def test_a_standby_that_was_lost_is_unhealthy() -> None:
    job = history(worker(0), shard(0), entry(Role.STANDBY, 0, incarnation=2, **LOST))
    assert ailments(job.status) == ["standby 0 lost: its lease of 20 s ended"]


def shown(status: ClusterStatus) -> str:
    console = Console(width=120, highlight=False, markup=False)
    with console.capture() as capture:
        console.print(status_tables(status, 120))
    return "\n".join(line.rstrip() for line in capture.get().splitlines())


def test_since_when_a_shard_is_lost_outlives_the_coordinator(tmp_path: Path) -> None:
    with running_coordinator(ClusterSettings(lease_seconds=600), tmp_path) as coordinator:
        with CoordinatorClient(coordinator.address) as client:
            client.leave(client.join(JoinRequest(Role.SHARD, 0, "127.0.0.1:1"), "s").member, "stopped")
            (before,) = client.get_status().members
        coordinator.stop()
        coordinator.start()
        with CoordinatorClient(coordinator.address) as client:
            status = client.get_status()
    (after,) = status.members
    assert 0.0 < after.ended_at == before.ended_at <= status.at_seconds


def test_certificates_that_expire_are_named_in_every_view_and_one_that_has_expired_is_unhealthy() -> None:
    job = history(worker(0, certificate_ends=1310.0), shard(0, certificate_ends=1130.0), *map(worker, range(1, 9)))
    text = f"the certificate of shard 0 expires in 2 min, {time_text(1130.0)}; those of worker 0 follow"
    assert expiring(job.status) == text
    assert text in [alert.text for alert in glance_of(job).alerts]
    assert text in status_line(job.status)
    assert text in shown(job.status)
    assert ailments(job.status) == []
    late = history(*(worker(rank, certificate_ends=1000.0 + rank) for rank in range(9)), shard(0))
    follow = "those of worker 1, worker 2 and 6 more follow"
    assert ailments(late.status) == [f"the certificate of worker 0 expired 10 s ago, {time_text(1000.0)}; {follow}"]
    coordinator = replace(history(worker(0), shard(0)).status, certificate_ends=1011.0 + 86400 * 36)
    assert expiring(coordinator).startswith("the certificate of the coordinator expires in 36 days, ")
    assert expiring(history(worker(0, gone="left", certificate_ends=1.0), shard(0)).status) == ""


def test_a_stalled_job_is_unhealthy_and_is_waited_for(coordinator: TestCoordinator) -> None:
    with CoordinatorClient(coordinator.address) as client:
        shard_member = client.join(JoinRequest(Role.SHARD, 0, "127.0.0.1:1"), "s").member
        worker_member = client.join(JoinRequest(Role.WORKER, 0), "w").member
        assert psctl(coordinator, "wait", "--for", "training") == (0, "")
        client.leave(shard_member, "OSError: disk")
        code, said = psctl(coordinator, "status", "--check")
        assert code == 3
        assert re.match(r"async · stalled: shard 0 failed for \d+ s · ", said)
        assert "not healthy: stalled: shard 0 failed for " in said
        code, said = psctl(coordinator, "wait", "--for", "training", "--timeout", "0")
        assert (code, said[:50]) == (1, "not 'training' after 0 s: async · stalled: shard 0")
        client.join(JoinRequest(Role.SHARD, 0, "127.0.0.1:1"), "s2")
        assert psctl(coordinator, "status", "--check")[0] == 0
        client.leave(worker_member, "OSError: no")
        code, said = psctl(coordinator, "status", "--check")
        assert code == 3
        assert "not healthy: stalled: no worker" in said
