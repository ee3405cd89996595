"""The history in a file: it comes back as it was, and a damaged file is said and left out. Below 2 s of CPU."""

from __future__ import annotations

import hashlib
import json
import math
import random
from array import array
from pathlib import Path
from typing import Any

import pytest

from ps_protocol.cluster.history import CheckpointFacts, Curves
from ps_protocol.cluster.view import JobEvent, Role
from ps_protocol.errors import DamagedData
from ps_server.coordinator.driver import Driver
from ps_server.coordinator.event_log import EVENTS, EventLog
from ps_server.coordinator.history.curve_book import NAMES, POINTS, CurveBook, Spread
from ps_server.coordinator.history.history_file import FILE, HistoryFile, SavedHistory, decode, encode
from ps_server.coordinator.history.recorder import JobRecorder
from ps_server.coordinator.settings import ClusterSettings
from ps_server.coordinator.times import SAVE_SECONDS
from tests.coordinator.history.test_recorder import Recorded
from tests.support.loops import LoopThread
from tests.support.seeds import drawn_seed


def filled(points: int, names: int = 2) -> CurveBook:
    book = CurveBook(1.0)
    for at in range(points):
        values = {}
        for name in range(names):
            values[f"n{name}", bool(name)] = Spread()
            values[f"n{name}", bool(name)].take(at + name, at, at + 2 * name)
        book.add(float(at), values)
    return book


def same(one: Curves, other: Curves) -> bool:
    """NaN is the same as NaN."""
    return encode(SavedHistory(0.0, one)) == encode(SavedHistory(0.0, other))


@pytest.mark.parametrize("points", [0, 1, 5, POINTS - 1, POINTS, POINTS + 1, 3 * POINTS])
def test_what_is_written_comes_back(points):
    saved = SavedHistory(
        12.5,
        filled(points).curves(),
        (JobEvent(7, 1.0, "worker 0 joined"), JobEvent(8, 2.0, "lost \u202e", warning=True)),
        (CheckpointFacts("/kept/checkpoint-00000001", 10, 0.5, 3.0),),
    )
    found = decode(encode(saved), "it")
    assert (found.began_seconds, found.events, found.checkpoints) == (12.5, saved.events, saved.checkpoints)
    assert same(found.curves, saved.curves)


@pytest.mark.parametrize("points", [1, 5, POINTS - 2, POINTS - 1, POINTS, POINTS + 1, 3 * POINTS])
def test_a_book_goes_on_after_a_gap_and_keeps_its_size(points):
    before = filled(points).curves()
    book = CurveBook(1.0)
    book.restore(before)
    later = before.times[-1] + 1000.0
    for at in range(2 * POINTS):
        spread = Spread()
        spread.take(1.0, 1.0, 1.0)
        book.add(later + at, {("n0", False): spread})
        curves = book.curves()
        assert len(curves.times) <= POINTS
        assert {len(lane) for each in curves.curves for lane in (each.mean, each.low, each.high)} == {len(curves.times)}
        assert list(curves.times) == sorted(curves.times)
    assert curves.generation > before.generation


def test_the_gap_has_no_values():
    book = CurveBook(1.0)
    book.restore(filled(5).curves())
    spread = Spread()
    spread.take(9.0, 9.0, 9.0)
    book.add(100.0, {("n0", False): spread})
    (first, _) = book.curves().curves
    assert math.isnan(first.mean[-2])
    assert first.mean[-1] == 9.0
    assert list(first.mean[:5]) == [0.0, 1.0, 2.0, 3.0, 4.0]


def test_events_of_this_process_come_after_those_before_and_are_numbered_on():
    log = EventLog(lambda: 5.0)
    log.add("the coordinator continues")
    log.restore([JobEvent(40, 1.0, "one"), JobEvent(41, 2.0, "two")])
    log.add("next")
    assert [(each.number, each.text) for each in log.all] == [
        (40, "one"),
        (41, "two"),
        (42, "the coordinator continues"),
        (43, "next"),
    ]
    for _ in range(EVENTS):
        log.add("more")
    assert len(log.all) == EVENTS


def test_every_flip_of_a_bit_is_noticed():
    data = encode(SavedHistory(1.0, filled(3).curves(), (JobEvent(1, 1.0, "x"),)))
    seed = drawn_seed()
    chance = random.Random(seed)
    for _ in range(300):
        at = chance.randrange(len(data))
        hurt = data[:at] + bytes([data[at] ^ 1 << chance.randrange(8)]) + data[at + 1 :]
        with pytest.raises(DamagedData):
            decode(hurt, f"seed {seed}, byte {at}")
    for length in (0, 1, 64, 65, len(data) - 1):
        with pytest.raises(DamagedData):
            decode(data[:length], "a cut file")


def signed(**changes: Any) -> bytes:
    """A file whose digest is right and whose contents are not."""
    said = json.loads(encode(SavedHistory(1.0, filled(3).curves(), (JobEvent(1, 1.0, "x"),))).partition(b"\n")[2])
    text = json.dumps(said | changes).encode()
    return hashlib.sha256(text).hexdigest().encode() + b"\n" + text


ONE = "AAAAAAAA8D8="
EVENT = {"number": 1, "at_seconds": 1.0, "text": "x", "warning": False}


@pytest.mark.parametrize(
    "changes",
    [
        {"version": 2},
        {"began": "nan"},
        {"began": None},
        {"point_seconds": 0},
        {"times": "!"},
        {"times": "AAAA"},
        {"times": ONE},
        {"curves": [["n", False, ONE, ONE]]},
        {"curves": [["n" * 501, False, *["AAAAAAAAAAAAAAAAAADwPwAAAAAAAABA"] * 3]]},
        {"curves": [["n", False, "", "", ""]] * (NAMES + 1)},
        {"curves": {}},
        {"events": [EVENT] * (EVENTS + 1)},
        {"events": [EVENT | {"text": "x" * 501}]},
        {"events": [EVENT | {"at_seconds": math.inf}]},
        {"events": ["x"]},
        {"checkpoints": [{}]},
    ],
    ids=str,
)
def test_contents_that_no_coordinator_wrote_are_refused(changes):
    assert decode(signed(), "it").events
    with pytest.raises(DamagedData):
        decode(signed(**changes), "it")


def test_times_that_fall_are_refused():
    falling = Curves(array("d", [2.0, 1.0]), (), 1.0, 0)
    with pytest.raises(DamagedData, match="times"):
        decode(encode(SavedHistory(1.0, falling)), "it")


def recorder_in(folder: Path, now: list[float]) -> JobRecorder:
    driver = Driver(ClusterSettings(), clock=lambda: now[0])
    return JobRecorder(driver, {}, clock=lambda: now[0], file=HistoryFile(folder))


def test_a_recorder_goes_on_where_the_one_before_ended(tmp_path):
    with LoopThread() as loop:

        async def live() -> None:
            job = Recorded()
            job.recorder = JobRecorder(job.driver, {}, clock=lambda: job.now, file=HistoryFile(tmp_path))
            worker = job.join(Role.WORKER, 0)
            for _ in range(5):
                job.beat(worker, metrics={"loss": 0.5})
                job.recorder.observe()
                job.now += 1
            job.recorder.saved("/kept/1", 10, 0.1)
            await job.recorder.save()

        loop.run(live())

        async def again() -> None:
            found = recorder_in(tmp_path, [2000.0]).history()
            assert found.began_seconds == 1000.0
            assert [each.folder for each in found.checkpoints] == ["/kept/1"]
            assert "worker 0 joined" in " ".join(event.text for event in found.events)
            (loss,) = [each for each in found.curves.curves if each.name == "loss"]
            assert list(loss.mean[:4]) == [0.5] * 4

        loop.run(again())
    assert [path.name for path in tmp_path.iterdir()] == [FILE]
    assert (tmp_path / FILE).stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("contents", [b"", b"nonsense", b"x" * (9 << 20)])
def test_a_damaged_file_is_said_and_the_history_begins_again(tmp_path, caplog, contents):
    (tmp_path / FILE).write_bytes(contents)
    with LoopThread() as loop:

        async def run() -> None:
            recorder = recorder_in(tmp_path, [50.0])
            assert recorder.history().began_seconds == 50.0
            await recorder.save()
            assert HistoryFile(tmp_path).read() is not None

        loop.run(run())
    assert "is left out, and begins again" in caplog.text
    assert FILE in caplog.text


def test_a_folder_that_cannot_be_written_is_said_once(tmp_path, caplog):
    folder = tmp_path / "gone"
    with LoopThread() as loop:

        async def run() -> None:
            recorder = recorder_in(folder, [50.0])
            await recorder.save()
            await recorder.save()

        loop.run(run())
    assert caplog.text.count("the history cannot be kept in") == 1


def test_it_is_written_once_in_a_while_and_not_with_every_look(tmp_path, monkeypatch):
    written = []
    monkeypatch.setattr(HistoryFile, "write", lambda self, saved: written.append(now[0]))
    now = [1000.0]
    with LoopThread() as loop:

        async def run() -> None:
            recorder = recorder_in(tmp_path, now)
            for _ in range(150):
                await recorder.look()
                now[0] += 1.0

        loop.run(run())
    assert written == [1000.0 + SAVE_SECONDS, 1000.0 + 2 * SAVE_SECONDS]


def test_a_file_of_the_most_that_is_kept_is_below_a_megabyte():
    saved = SavedHistory(0.0, filled(POINTS - 1, NAMES).curves(), (JobEvent(1, 1.0, "x" * 100),) * EVENTS)
    assert len(encode(saved)) < 1_000_000
