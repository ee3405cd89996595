"""psctl top and psctl report: what they show, how they end."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from rich.console import Console

from ps_protocol.client.coordinator import CoordinatorClient
from ps_protocol.cluster.history import Curve, Curves, JobHistory
from ps_protocol.cluster.view import TOOK_OVER, JoinRequest, LogCounts, Member, MemberStats, Role
from ps_protocol.cluster.weights import WeightsReader
from ps_server.cli.psctl import main
from ps_server.coordinator.settings import ClusterSettings
from ps_server.glance.job import glance_of
from ps_server.glance.terminal import NO_LIMIT, glance_view, short, spark
from tests.glance.jobs import entry, history, publication, shard, worker
from tests.support.coordinators import running_coordinator


@pytest.fixture(scope="module")
def job() -> Iterator[tuple[CoordinatorClient, Member]]:
    """A coordinator with one shard and one worker that have reported."""
    settings = ClusterSettings(expected_workers=1, lease_seconds=600, heartbeat_seconds=300)
    with running_coordinator(settings) as coordinator, CoordinatorClient(coordinator.address) as client:
        shard_member = client.join(JoinRequest(Role.SHARD, 0, "127.0.0.1:4444"), "s").member
        worker_member = client.join(JoinRequest(Role.WORKER, 0), "w").member
        client.heartbeat(shard_member, MemberStats(versions={"m": 23}, held_bytes=5000))
        client.heartbeat(worker_member, MemberStats(steps=12, steps_per_second=3.5, metrics={"loss": 0.25}))
        yield client, worker_member


def psctl_says(*arguments: str) -> Result:
    return CliRunner().invoke(main.main, arguments, env={"PS_COORDINATOR": None, "COLUMNS": "120"})


def shown(job: JobHistory, height: int = NO_LIMIT, width: int = 140) -> str:
    console = Console(width=width, highlight=False, markup=False)
    with console.capture() as capture:
        console.print(glance_view(glance_of(job), job.curves, width, height))
    return capture.get()


def test_without_a_terminal_one_table_is_printed_per_interval(job: tuple[CoordinatorClient, Member]) -> None:
    done = psctl_says("top", "--coordinator", job[0].address, "--count", "2", "--interval", "0.1")
    assert done.exit_code == 0, done.output
    assert done.output.count("async · training · 1 of 1 shards · 1 of 1 workers") == 2
    assert done.output.count("worker 0  live") == 2
    assert "loss" in done.output
    assert "\x1b" not in done.output


def test_the_first_look_fails_where_nobody_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ps_protocol.times.CONNECT_SECONDS", 0.3)
    done = psctl_says("top", "--coordinator", "127.0.0.1:1")
    assert done.exit_code == 1
    assert "127.0.0.1:1" in done.output


def test_top_says_when_the_coordinator_does_not_answer_and_goes_on(
    job: tuple[CoordinatorClient, Member], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CoordinatorClient, "connect", lambda self, seconds: None)
    done = psctl_says("top", "--coordinator", "127.0.0.1:1", "--count", "2", "--interval", "0.1")
    assert done.exit_code == 0
    assert done.output.count("does not answer") == 2


def test_in_a_terminal_q_ends_it(job: tuple[CoordinatorClient, Member]) -> None:
    terminal, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "ps_server.cli.psctl.main", "top", "--coordinator", job[0].address],
        **dict.fromkeys(("stdin", "stdout", "stderr"), theirs),
        env={**os.environ, "TERM": "xterm", "COLUMNS": "120", "LINES": "30"},
        start_new_session=True,
    )
    os.close(theirs)
    seen, deadline = b"", time.monotonic() + 120
    try:
        while b"worker 0" not in seen:
            assert time.monotonic() < deadline, seen
            if select.select([terminal], [], [], 1.0)[0]:
                seen += os.read(terminal, 65536)
        os.write(terminal, b"q")
        with suppress(OSError):  # the other end is closed
            while piece := os.read(terminal, 65536):
                seen += piece
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
        os.close(terminal)
    assert b"\x1b[?1049h" in seen  # a screen of its own,
    assert b"\x1b[?1049l" in seen  # and the terminal as it was


def test_alerts_stragglers_and_waits_are_named() -> None:
    found = shown(
        history(
            worker(0, steps_per_second=9.0),
            worker(1, steps_per_second=1.0, metrics={"loss": 0.5}),
            worker(2, gone="lease ended"),
            shard(0),
            wait_shares={0: {"bound": 0.5}},
        )
    )
    assert "! worker 2 is lost: lease ended" in found
    assert "live, straggler" in found
    assert "50% the staleness bound: worker 1" in found


TITLES = {
    *("state", "step", "behind", "steps/s", "samples/s", "staleness", "waits", "reported", "over", "note"),
    *("version", "pushes/s", "bytes/s", "holds", "dropped", "queue", "streams", "log", "standby", "address"),
}


def full() -> JobHistory:
    """A job in which every column has something."""
    reports = {"loss": 0.123456, "accuracy": 0.98765}
    rates = {"steps_per_second": 12345.6, "samples_per_second": 1e6, "metrics": reports}
    shards = [
        shard(
            number,
            versions={"embedding": 123456},
            streams={"shm": 2, "bulk": 2},
            log=LogCounts(9, 8, 7, 1.0),
            dropped=12,
            queued_pushes=3.0,
            activity="placing model embedding" if number else "",
        )
        for number in range(2)
    ]
    workers = [worker(rank, steps=123456, staleness=2, transport="shm", **rates) for rank in range(2)]
    return history(
        *workers,
        worker(2, gone="left: RuntimeError: " + "x" * 100),
        *shards,
        entry(Role.STANDBY, 0, "left: " + TOOK_OVER, incarnation=9, ended_at=5.0),
        expected_shards=2,
        wait_shares={0: {"bound": 0.5}},
    )


@pytest.mark.parametrize("width", [40, 60, 80, 100, 140, NO_LIMIT])
def test_a_narrow_terminal_gets_fewer_columns_with_whole_titles(width: int) -> None:
    lines = shown(full(), width=width).splitlines()
    heads = [line.split() for line in lines if line.split()[:1] == ["state"]]
    assert len(heads) == 2
    assert set().union(*heads) <= TITLES
    assert all(len(line.rstrip()) <= width for line in lines)
    (first,) = [line.split() for line in lines if line.startswith("worker 0")]
    assert first[2:4] == ["live,", "straggler"] or first[2] == "live"
    assert "123456" in first
    if width >= 80:
        assert {"steps/s", "pushes/s", "standby"} <= set().union(*heads)
    if width == NO_LIMIT:
        assert set().union(*heads) == TITLES


def test_a_file_gets_every_column(job: tuple[CoordinatorClient, Member]) -> None:
    at = ("--coordinator", job[0].address, "--count", "1")
    done = CliRunner().invoke(main.main, ["top", *at], env={"PS_COORDINATOR": None, "COLUMNS": "20"})
    assert done.exit_code == 0, done.output
    assert "          state  step  behind  steps/s  staleness  reported" in done.output
    assert "…" not in done.output
    assert max(map(len, done.output.splitlines())) < 200


def test_the_queue_of_a_shard_is_shown_where_pushes_wait() -> None:
    found = shown(history(worker(0), shard(0, queued_pushes=3.0, queued_bytes=6e6), shard(1)))
    assert "queue" in found
    assert "3.0 (6.0MB)" in found
    assert "queue" not in shown(history(worker(0), shard(0), shard(1, queued_pushes=0.01)))


def test_many_workers_are_cut_to_the_terminal_those_that_matter_first() -> None:
    workers = [worker(rank, steps_per_second=5.0) for rank in range(200)]
    workers[150] = worker(150, gone="lease ended")
    workers[151] = worker(151, steps_per_second=0.5)
    found = shown(history(*workers, shard(0)), height=30)
    assert "worker 150  lost" in found
    assert "worker 151  live, straggler" in found
    assert "more workers" in found
    assert len(found.splitlines()) <= 30
    assert "more workers" not in shown(history(*workers, shard(0)))


def test_names_from_outside_do_not_reach_the_terminal_as_they_are() -> None:
    found = shown(history(worker(0, metrics={"\x1b[2Jloss": 1.0}, transport="\x1b]0;x"), shard(0)))
    assert "\x1b" not in found


def published(readers: int = 0, **more: Any) -> JobHistory:
    late = [
        WeightsReader(str(at), "h\x1b[2J" + "o" * 10_000, at, 3, 5_000_000, 2_000_000, 0.0) for at in range(readers)
    ]
    return history(worker(0), shard(0), publications=(publication("policy", *late, **more), publication("value")))


def test_published_weights_are_shown_with_the_readers_that_are_furthest_behind() -> None:
    sums = {"delta_bytes": 9_000_000, "full_bytes": 4_000_000, "saved_bytes": 36_000_000}
    found = shown(published(20, reader_count=10_000, relayed_readers=50, **sums))
    (line,) = [line for line in found.splitlines() if line.startswith("weights policy")]
    assert line.split()[2:] == [
        "7",
        "70",
        "1:30",
        "5000",
        "10000",
        "50",
        "4",
        "9.0MB",
        "/",
        "4.0MB,",
        "saved",
        "36.0MB",
    ]
    assert sum(line.startswith("reader ") for line in found.splitlines()) == 4
    assert "and 9996 more readers" in found
    assert "\x1b" not in found


def test_readers_that_have_the_newest_version_take_no_line() -> None:
    found = shown(history(worker(0), shard(0), publications=(publication("policy", reader_count=3),)))
    assert "weights policy" in found
    assert "more readers" not in found


@pytest.mark.parametrize("width", [40, 80, NO_LIMIT])
def test_published_weights_fit_a_narrow_terminal(width: int) -> None:
    lines = shown(published(20), width=width).splitlines()
    assert any("weights policy" in line and " 7" in line for line in lines)
    assert all(len(line.rstrip()) <= min(width, 300) for line in lines)


def test_of_many_names_the_first_are_shown() -> None:
    names = tuple(publication(f"name{at:02}") for at in range(64))
    found = shown(history(worker(0), shard(0), publications=names), height=40)
    assert "weights name07" in found
    assert "and 56 more names" in found
    assert len(found.splitlines()) <= 40


@pytest.mark.parametrize(
    ("values", "bars"),
    [([], ""), ([float("nan")], ""), ([1.0, 1.0], "▁▁"), ([0.0, 7.0], "▁█"), ([0.0, float("nan"), 7.0], "▁ █")],
)
def test_sparks(values: list[float], bars: str) -> None:
    assert spark(values) == bars


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (float("nan"), "–"),
        (0.25, "0.25"),
        (12345.0, "12.3k"),
        (1.5e6, "1.5M"),
        (2e9, "2.0G"),
        (9.9e14, "990.0T"),
        (-1e15, "-1e+15"),
        (1.234e300, "1.23e+300"),
    ],
)
def test_short_numbers(value: float, text: str) -> None:
    assert short(value) == text


def test_curves_stand_beside_their_totals() -> None:
    values = [0.5, 1.0]
    curves = Curves([1.0, 2.0], (Curve("steps/s", False, values, values, values),))
    (line,) = [
        line for line in shown(history(worker(0, steps_per_second=2.0), curves=curves)).splitlines() if "▁█" in line
    ]
    assert line.split() == ["steps/s", "2", "▁█"]


def test_a_report_is_one_file(job: tuple[CoordinatorClient, Member], tmp_path: Path) -> None:
    file = tmp_path / "job.html"
    done = psctl_says("report", "--coordinator", job[0].address, "-o", str(file), "--title", "<run> 7")
    assert done.exit_code == 0, done.output
    text = file.read_text()
    assert "<title>&lt;run&gt; 7</title>" in text
    assert "worker 0" in text
    assert 'src="' not in text
    assert list(tmp_path.iterdir()) == [file]


def test_a_report_that_cannot_be_written_says_so(job: tuple[CoordinatorClient, Member], tmp_path: Path) -> None:
    done = psctl_says("report", "--coordinator", job[0].address, "-o", str(tmp_path / "none" / "job.html"))
    assert done.exit_code == 2
    assert "cannot write" in done.output


def test_a_report_without_its_libraries_names_the_command_that_installs_them(
    job: tuple[CoordinatorClient, Member], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ps_server.page.needs.find_spec", lambda name: None)
    done = psctl_says("report", "--coordinator", job[0].address)
    assert done.exit_code == 2
    assert "pip install 'torch-ps[page]'" in done.output
