"""What ps-run shows: the lines of processes, the status of the job, and the summary at its end."""

import io
import time
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from ps_protocol.client.model_status import TableTotals
from ps_protocol.cluster.job_state import time_text
from ps_protocol.cluster.view import ClusterStatus, ClusterView, JobEvent, Member, MemberStats, MemberStatus, Role
from ps_protocol.model.spec import Consistency, Mode
from ps_server.cli.launcher.events import ProcessName, ProcessRole
from ps_server.cli.launcher.screen import Folders, Screen, silent_workers, summary
from ps_server.glance.terminal import elapsed_text, status_line, status_tables


def member(role: Role, index: int, incarnation: int = 1, gone: str = "", **stats) -> MemberStatus:
    return MemberStatus(Member(role, index, incarnation, ""), 0.1, MemberStats(**stats), gone=gone)


WORKER = member(
    Role.WORKER,
    0,
    steps=120,
    steps_per_second=4.25,
    samples=9000,
    samples_per_second=2310.4,
    staleness=2,
    transport="shm",
    metrics={"loss": 0.21},
)
SHARD = member(Role.SHARD, 0, versions={"net": 240}, steps_per_second=20.2, bytes_per_second=4.3e6)
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
    assert headline.rstrip() == "ssp(4) · training · 1 of 1 shards · 1 of 1 workers · model net · 1:15"
    assert worker.split() == ["worker", "0", "live", "120", "0", "4.25", "2310", "2", "loss", "0.21", "shm"]
    assert shard.split() == ["shard", "0", "live", "240", "20.2", "4.3M", "0B"]


def test_a_standby_stands_beside_its_shard_and_how_far_it_is_behind():
    status = replace(STATUS, members=(WORKER, SHARD, member(Role.STANDBY, 0)))
    assert shown(status, 100)[-1].split()[-1] == "follows"
    ahead = replace(SHARD, stats=replace(SHARD.stats, standby_lag=7))
    status = replace(status, members=(WORKER, ahead, member(Role.STANDBY, 0)))
    assert shown(status, 100)[-1].split()[-3:] == ["follows,", "7", "behind"]
    assert "standby 7 records behind" in status_line(status)


def test_of_several_models_each_has_its_version_below_the_shards():
    shards = [
        member(Role.SHARD, 0, versions={"generator": 120, "discriminator": 118}),
        member(Role.SHARD, 1, versions={"discriminator": 119}),
        member(Role.SHARD, 2, gone="left", versions={"generator": 7}),
    ]
    status = replace(STATUS, members=(WORKER, *shards))
    lines = [line.split() for line in shown(status, 80)]
    assert lines[3:5] == [["state", "pushes/s", "bytes/s", "holds"], ["shard", "0", "live", "0", "0", "0B"]]
    assert lines[-3:] == [["version"], ["model", "discriminator", "118–119"], ["model", "generator", "120"]]
    assert "shard 0 versions discriminator 118, generator 120" in status_line(status)
    assert "shard 1 version 119" in status_line(status)


def test_pushes_that_were_dropped_are_counted_where_there_are_some():
    status = replace(STATUS, members=(WORKER, replace(SHARD, stats=replace(SHARD.stats, dropped=3))))
    *_, titles, shard = shown(status, 100)
    assert titles.split() == ["state", "version", "pushes/s", "bytes/s", "holds", "dropped"]
    assert shard.split()[-1] == "3"
    assert "3 dropped" in status_line(status)


def test_pushes_that_wait_are_told_where_some_do_and_there_is_room():
    def waiting(pushes: float, width: int) -> tuple[str, str]:
        stats = replace(SHARD.stats, queued_pushes=pushes)
        *_, titles, shard = shown(replace(STATUS, members=(replace(SHARD, stats=stats),)), width)
        return titles, shard

    titles, shard = waiting(3.04, 100)
    assert titles.split() == ["state", "version", "pushes/s", "bytes/s", "holds", "queue"]
    assert shard.split()[-2:] == ["3.0", "(0B)"]
    assert "queue" not in waiting(0.04, 100)[0]
    assert "queue" not in waiting(3.0, 36)[0]
    long = replace(STATUS, members=(WORKER, replace(SHARD, stats=replace(SHARD.stats, queued_pushes=2.5))))
    assert "B/s 2.5 pushes wait" in status_line(long)
    assert "wait" not in status_line(STATUS)


def test_a_loop_without_a_sharded_loader_shows_its_steps_and_no_samples():
    status = replace(STATUS, members=(replace(WORKER, stats=replace(WORKER.stats, samples_per_second=0.0)), SHARD))
    _, titles, *_ = shown(status, 100)
    assert "steps/s" in titles
    assert "samples/s" not in titles
    assert "samples/s" not in status_line(status)


METRICS = {"loss": 0.1, **{f"accuracy of class {number}": 0.5 for number in range(10)}}
WHY = "RuntimeError: CUDA out of memory. " + "Tried to allocate 20.00 MiB. " * 8
FAILED = ClusterStatus(
    replace(STATUS.view, expected_shards=2, expected_workers=12),
    (
        *(member(Role.WORKER, rank, steps=10_000_000, steps_per_second=123.4, metrics=METRICS) for rank in range(10)),
        member(Role.WORKER, 10, gone=f"left: {WHY}", steps=12, steps_per_second=3.0),
        member(Role.WORKER, 11, gone="left", steps=500),
        SHARD,
        member(Role.SHARD, 1, gone="its lease of 5 s ended", versions={"net": 99}, steps_per_second=7.5),
    ),
)


@pytest.mark.parametrize("width", [40, 60, 80, 100, 160])
def test_with_failures_every_name_and_state_is_whole_and_errors_stand_below(width):
    lines = shown(FAILED, width)
    assert all(len(line) <= width for line in lines)
    rows = [line.split() for line in lines]
    assert all(["worker", f"{rank}", "live", "10000000"] in [row[:4] for row in rows] for rank in range(10))
    assert ["worker", "10", "failed", "12"] in [row[:4] for row in rows]
    assert ["worker", "11", "left", "500"] in [row[:4] for row in rows]
    assert ["shard", "1", "lost", "99"] in [row[:4] for row in rows]
    below = " ".join(" ".join(row) for row in rows)
    assert f"worker 10 failed: {' '.join(WHY.split())}" in below
    assert "shard 1 lost: its lease of 5 s ended" in below
    assert "worker 11 left:" not in below


def test_a_shard_that_is_not_ready_says_what_it_is_busy_with():
    doing = "model 'net': is restored from /shared/run7/step-100, 120 MB read"
    status = replace(STATUS, members=(member(Role.SHARD, 0, activity=doing), member(Role.SHARD, 1)))
    text = " ".join(line.strip() for line in shown(status, 80))
    assert f"shard 0 busy: {doing}" in text
    assert "shard 1  live" in text
    assert doing in status_line(status)


def test_members_that_were_lost_alike_share_a_line():
    lost = [member(Role.WORKER, rank, gone="its lease of 5 s ended") for rank in range(3)]
    *_, note = shown(replace(STATUS, members=(*lost, SHARD)), 100)
    assert note.rstrip() == "worker 0, worker 1, worker 2 lost: its lease of 5 s ended"


def test_what_has_ended_has_no_rates():
    lost = next(line for line in shown(FAILED, 200) if line.startswith("shard 1"))
    assert lost.split() == ["shard", "1", "lost", "99", "–", "–", "0B"]
    assert "7.5" not in status_line(FAILED)


@pytest.mark.parametrize("width", [80, 160])
def test_long_reports_are_shortened_before_steps_and_states_are_missed(width):
    row = shown(FAILED, width)[2]
    assert row.startswith("worker 0   live  ")
    assert row.rstrip().endswith("…")
    assert "loss 0.1" in row


@pytest.mark.parametrize("width", [32, 40, 79])
def test_a_narrow_terminal_gets_a_table_that_fits(width):
    lines = shown(STATUS, width)
    assert len(lines) == 5
    assert all(len(line) <= width for line in lines)
    assert "120" in lines[2]


def test_tables_stand_last_and_whether_all_their_shards_have_told():
    *_, titles, whole, part = shown(STATUS, 100, EMB, replace(EMB, table="ids", answered=1))
    assert titles.split() == ["rows", "bytes", "updates", "waiting", "expired", "evicted", "model"]
    assert whole.split() == ["table", "emb", "1000", "72.0k", "90", "7", "15", "5", "net"]
    assert part.startswith("table ids (1 of 2 shards) ")
    assert shown(STATUS, 36, EMB)[-1].split() == ["table", "emb", "1000", "72.0k", "90"]


def test_the_log_line_holds_the_same_numbers():
    assert status_line(STATUS, [EMB]).endswith("B/s | table emb 1000 rows 72.0kB")
    assert status_line(STATUS) == (
        "ssp(4) | training | worker 0 step 120 4.25 steps/s 2310 samples/s stale 2 loss 0.21 | "
        "shard 0 version 240 20.2 pushes/s 4.3MB/s"
    )


def test_a_restarted_worker_is_shown_once_and_a_gone_one_as_such():
    old, new = member(Role.WORKER, 0, 1, "lease ended", steps=9), member(Role.WORKER, 0, 2, steps=3)
    assert "step 3 " in status_line(replace(STATUS, members=(new, old)))
    assert "step 9" not in status_line(replace(STATUS, members=(new, old)))
    alone = status_line(replace(STATUS, members=(old,)))
    assert alone.endswith("stale 0 lost: lease ended | shard 0 missing")


def test_a_shard_is_missing_once_the_job_has_started():
    begun = replace(STATUS, members=(WORKER,))
    assert any(line.split() == ["shard", "0", "missing", "–", "–", "0B"] for line in shown(begun, 80))
    waiting = replace(begun, view=replace(STATUS.view, started=False))
    assert not any("missing" in line for line in [*shown(waiting, 80), status_line(waiting)])


@pytest.mark.parametrize(("seconds", "text"), [(0.9, "0:00"), (61, "1:01"), (3725, "1:02:05")])
def test_elapsed_time_has_hours_only_when_there_are_some(seconds, text):
    assert elapsed_text(seconds) == text


NOON = time.mktime((2026, 11, 22, 12, 0, 0, 0, 0, -1))


def test_without_a_terminal_progress_is_one_line_and_nothing_while_nothing_moves():
    out, err = io.StringIO(), io.StringIO()
    screen = Screen(out, err, clock=lambda: NOON)
    screen.progress(STATUS, 2.0)
    screen.progress(STATUS, 4.0)
    screen.show(ProcessName(ProcessRole.WORKER, 0), ["[not markup]"])
    screen.close()
    assert err.getvalue() == f"ps-run      | 2026-11-22 12:00:00 {status_line(STATUS)}\n"
    assert out.getvalue() == "worker 0    | [not markup]\n"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("no_color", [False, True])
def test_a_terminal_gets_coloured_prefixes_unless_no_color_is_set(monkeypatch, no_color):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    if no_color:
        monkeypatch.setenv("NO_COLOR", "1")
    out = Terminal()
    Screen(out, io.StringIO()).show(ProcessName(ProcessRole.WORKER, 0), ["hello"])
    assert "hello" in out.getvalue()
    assert ("\x1b[36mworker 0" in out.getvalue()) is not no_color


def advanced(steps: int, **changes) -> ClusterStatus:
    """The same job some steps later."""
    worker = replace(WORKER, stats=replace(WORKER.stats, steps=120 + steps, **changes))
    return replace(STATUS, members=(worker, SHARD))


def test_without_a_terminal_steps_are_told_once_a_minute_and_changes_at_once():
    err = io.StringIO()
    screen = Screen(io.StringIO(), err, clock=lambda: NOON)
    lost = replace(SHARD, gone="its lease ended", ended_at=1.0)
    for second in range(0, 200, 2):
        status = advanced(second)
        if 100 <= second < 110:  # the shard is lost, and comes back; each second of it is no change
            view = replace(STATUS.view, members=(WORKER.member,))
            status = replace(status, view=view, members=(*status.members[:1], lost), at_seconds=float(second))
        if second >= 150:
            status = replace(status, view=replace(STATUS.view, consistency=Consistency(Mode.SYNC)))
        screen.progress(status, float(second))
    told = [line.split(" | ")[1:4] for line in err.getvalue().splitlines()]
    steps = [int(worker.split()[3]) - 120 for *_, worker in told]
    assert steps == [0, 60, 100, 110, 150]
    assert told[2][1] == "stalled: shard 0 lost for 99 s"
    assert [state for _, state, _ in told[3:]] == ["training", "training"]


def test_the_last_three_decisions_are_below_the_tables_with_their_times():
    at = 1.7e9
    decided = tuple(JobEvent(number, at, f"decision {number}\x1b", number == 4) for number in range(5))
    rows = shown(replace(STATUS, decisions=decided), 120)
    assert [row.rstrip() for row in rows[-3:]] == [f"{time_text(at)} decision {number}\\x1b" for number in (2, 3, 4)]
    assert rows[:-3] == shown(STATUS, 120)
    long = replace(decided[0], text="why " * 40 + "end")
    assert shown(replace(STATUS, decisions=(long,)), 80)[-1].rstrip().endswith("end")


def worker(rank: int, incarnation: int = 1, **stats: int) -> MemberStatus:
    return MemberStatus(Member(Role.WORKER, rank, incarnation), 0.1, MemberStats(**stats), gone="left")


def status(*members: MemberStatus) -> ClusterStatus:
    return ClusterStatus(ClusterView(), members)


def test_a_job_that_ended_well_says_steps_samples_and_time():
    done = status(worker(0, steps=500, samples=8000), worker(1, steps=485, samples=7760))
    assert summary(0, 31.4, done, [], Folders()) == ["finished in 0:31: 985 steps by 2 workers, 15760 samples"]


def test_what_is_not_known_or_not_counted_is_left_out():
    assert summary(0, 5, None, [], Folders()) == ["finished in 0:05"]
    assert summary(0, 5, status(worker(0, steps=3)), [], Folders()) == ["finished in 0:05: 3 steps by 1 worker"]


def test_failures_are_counted_and_what_is_left_of_the_job_has_its_place():
    failures = [
        "worker 1 exited with code 7",
        "shard 0 was killed by signal 9 (SIGKILL)",
        "worker 1 exited with code 7",
    ]
    folders = Folders(Path("/saved/checkpoint-00000003"), state=Path("state"), logs=Path("logs"))
    assert summary(7, 61, None, failures, folders) == [
        "ended with exit code 7 after 1:01",
        "failures: worker 1 exited with code 7 (2 times); shard 0 was killed by signal 9 (SIGKILL)",
        "checkpoint: /saved/checkpoint-00000003",
        "state: state; the same command continues from it",
        "logs: logs",
    ]


def test_a_checkpoint_that_is_not_the_last_is_called_older():
    saved = Path("/saved/checkpoint-00000003")
    (said,) = summary(74, 61, None, [], Folders(saved, unsaved=True))[1:]
    assert said == f"the last checkpoint was not written; the newest one is older: {saved}"
    (said,) = summary(74, 61, None, [], Folders(unsaved=True))[1:]
    assert said == "the last checkpoint was not written; there is none"


def test_workers_that_never_connected_are_named():
    (said,) = silent_workers(status(worker(1)), 3)
    assert said == "worker 0, worker 2 ended without having connected: does the script call ps_worker.connect()?"
    assert silent_workers(status(worker(0), worker(1)), 2) == []


def test_nothing_is_said_of_workers_where_it_cannot_be_known():
    assert silent_workers(None, 2) == []
    assert silent_workers(status(*(worker(rank) for rank in range(32))), 64) == []
