"""What people see: tables that fit, one line for logs, whole lines from pipes."""

import io
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from ps_protocol.model import Consistency, Mode
from ps_protocol.view import ClusterStatus, ClusterView, Member, MemberStats, MemberStatus, Role
from ps_server.launcher.events import Part, ProcessName
from ps_server.launcher.lines import MAX_LINE_BYTES, LineSplitter
from ps_server.launcher.screen import Screen
from ps_server.launcher.status_text import TableTotals, elapsed_text, status_line, status_tables


def member(role: Role, index: int, incarnation: int = 1, gone: str = "", **stats) -> MemberStatus:
    return MemberStatus(Member(role, index, incarnation, ""), 0.1, MemberStats(**stats), gone=gone)


WORKER = member(Role.WORKER, 0, steps=120, samples_per_second=2310.4, staleness=2, metrics={"loss": 0.21})
SHARD = member(Role.SHARD, 0, version=240, steps_per_second=20.2, bytes_per_second=4.3e6)
STATUS = ClusterStatus(
    ClusterView(1, (WORKER.member, SHARD.member), Consistency(Mode.SSP, 4), {"net": 1}, 1, 1, started=True),
    (WORKER, SHARD),
)


EMB = TableTotals(
    "net",
    "emb",
    rows=1000,
    waiting=7,
    size_bytes=72_000,
    updates=90,
    inserted=1020,
    expired=15,
    evicted=5,
    shards=2,
    answered=2,
)


def shown(status: ClusterStatus, width: int, *tables: TableTotals) -> list[str]:
    console = Console(file=io.StringIO(), width=width, no_color=True)
    console.print(status_tables(status, width, 75, tables))
    return console.file.getvalue().splitlines()


def test_a_wide_table_shows_mode_time_and_every_members_numbers():
    headline, _, worker, _, shard = shown(STATUS, 100)
    assert headline.rstrip() == "ssp(4) · training · 1 of 1 shards · 1 of 1 workers · models net · 1:15"
    assert worker.split() == ["worker", "0", "120", "2310", "0.0", "2", "live", "loss", "0.21"]
    assert shard.split() == ["shard", "0", "240", "20.2", "4.3", "live"]


def test_a_standby_stands_below_the_shards():
    *_, shard, standby = shown(replace(STATUS, members=(member(Role.STANDBY, 0), *STATUS.members)), 100)
    assert shard.split()[:2] == ["shard", "0"]
    assert standby.split()[:2] == ["standby", "0"]


@pytest.mark.parametrize("width", [32, 40, 79])
def test_a_narrow_terminal_gets_a_table_that_fits(width):
    lines = shown(STATUS, width)
    assert len(lines) == 5
    assert all(len(line) <= width for line in lines)
    assert "120" in lines[2]


def test_tables_stand_last_and_whether_all_their_shards_have_told():
    *_, titles, whole, part = shown(STATUS, 100, EMB, replace(EMB, table="ids", answered=1))
    assert titles.split() == ["rows", "MB", "updates", "waiting", "expired", "evicted", "model"]
    assert whole.split() == ["table", "emb", "1000", "0.1", "90", "7", "15", "5", "net"]
    assert part.startswith("table ids (1 of 2 shards) ")
    assert shown(STATUS, 40, EMB)[-1].split() == ["table", "emb", "1000", "0.1", "90"]


def test_the_log_line_holds_the_same_numbers():
    assert status_line(STATUS, [EMB]).endswith(" MB/s | table emb 1000 rows 0.1 MB")
    assert status_line(STATUS) == (
        "ssp(4) | worker 0 step 120 2310 samples/s stale 2 loss 0.21 | shard 0 version 240 20 pushes/s 4.3 MB/s"
    )


def test_a_restarted_worker_is_shown_once_and_a_gone_one_as_such():
    old, new = member(Role.WORKER, 0, 1, "lease ended", steps=9), member(Role.WORKER, 0, 2, steps=3)
    assert "step 3 " in status_line(replace(STATUS, members=(new, old)))
    assert "step 9" not in status_line(replace(STATUS, members=(new, old)))
    assert status_line(replace(STATUS, members=(old,))).endswith("stale 0 lease ended")


@pytest.mark.parametrize(("seconds", "text"), [(0.9, "0:00"), (61, "1:01"), (3725, "1:02:05")])
def test_elapsed_time_has_hours_only_when_there_are_some(seconds, text):
    assert elapsed_text(seconds) == text


def test_without_a_terminal_progress_is_one_line_and_nothing_while_nothing_moves():
    out, err = io.StringIO(), io.StringIO()
    screen = Screen(out, err)
    screen.progress(STATUS, 2.0)
    screen.progress(STATUS, 4.0)
    screen.show(ProcessName(Part.WORKER, 0), ["[not markup]"])
    screen.close()
    assert err.getvalue() == f"ps-run      | 2 s  {status_line(STATUS)}\n"
    assert out.getvalue() == "worker 0    | [not markup]\n"


@given(st.lists(st.binary(max_size=20)))
def test_lines_are_whole_however_the_pipe_cuts_them(pieces):
    splitter = LineSplitter()
    lines = [line for piece in pieces for line in splitter.feed(piece)] + splitter.flush()
    expected = b"".join(pieces).split(b"\n")
    if not expected[-1]:
        expected.pop()
    assert lines == [e.rstrip(b"\r").rpartition(b"\r")[2].decode("utf-8", "replace") for e in expected]


def test_a_line_without_end_is_cut_rather_than_kept_for_ever():
    splitter = LineSplitter()
    assert splitter.feed(b"x" * (MAX_LINE_BYTES + 1)) == ["x" * (MAX_LINE_BYTES + 1)]
    assert splitter.flush() == []
