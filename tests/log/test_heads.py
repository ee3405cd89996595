"""The head of a log is written behind its records: nothing waits for it but what rests on it."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from ps_server.log import head as heads
from ps_server.log import segments
from ps_server.log.durable import DurableLog
from ps_server.log.head import HeadFile
from tests.log.support import beginning, layout_of, opened, update
from tests.support.shards import wait_until

LAYOUT = layout_of((200,))


@pytest.fixture(autouse=True)
def small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "SEGMENT_BYTES", 4096)


@pytest.fixture
def busy_disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """No head reaches the disk in the helper thread before this is set."""
    free = threading.Event()

    def sync(path: Path) -> None:
        assert free.wait(60)

    monkeypatch.setattr(heads, "sync", sync)
    yield free
    free.set()


def write(log: DurableLog, first: int, last: int) -> None:
    for entry in [] if first > 1 else beginning(LAYOUT):
        log.append(entry)
    for version in range(first, last + 1):
        log.append(update(LAYOUT, version))


def live(log: DurableLog) -> list[int]:
    return [int(path.stem) for path in sorted(log.path.glob("[0-9]*.log"))]


def test_records_do_not_wait_until_the_disk_has_the_name_of_their_segment(tmp_path: Path, busy_disk: threading.Event):
    with opened(tmp_path) as (log, _):
        write(log, 1, 20)
        assert len(live(log)) > 3
        assert HeadFile(log.path).read().segment == 0
        busy_disk.set()
        log.settle()
        assert HeadFile(log.path).read().segment == live(log)[-1]


def test_a_shard_killed_before_the_head_names_its_segments_has_every_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with opened(tmp_path) as (log, _):
        write(log, 1, 4)
    with monkeypatch.context() as killed:
        killed.setattr(HeadFile, "write_later", lambda *_: None)
        with opened(tmp_path) as (log, _):
            write(log, 5, 20)
            named, number = HeadFile(log.path).read().segment, log.number
            assert named < live(log)[-1]
    with opened(tmp_path) as (log, found):
        assert found.number == number
        assert found.models["model"].tracker.version == 20
        write(log, 21, 22)


def test_no_segment_is_dropped_before_the_head_names_a_later_one(tmp_path: Path, busy_disk: threading.Event):
    """A start would miss it."""
    with opened(tmp_path) as (log, _):
        write(log, 1, 20)
        before, cutting = live(log), threading.Thread(target=log.cut, args=(log.number, 0))
        cutting.start()
        cutting.join(0.1)
        assert live(log) == before
        busy_disk.set()
        cutting.join(60)
        assert live(log) == before[-1:]
        assert HeadFile(log.path).read().segment == before[-1]


def test_a_snapshot_waits_until_the_disk_has_the_names_of_the_segments_that_it_needs(
    tmp_path: Path, busy_disk: threading.Event
):
    with opened(tmp_path) as (log, _):
        write(log, 1, 20)
        flushing = threading.Thread(target=log.flush, args=(10,))
        flushing.start()
        flushing.join(0.1)
        assert flushing.is_alive()
        busy_disk.set()
        flushing.join(60)
        assert HeadFile(log.path).read().segment == live(log)[-1]


def test_a_head_that_cannot_be_written_stops_the_log_at_its_next_segment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def broken(path: Path) -> None:
        raise OSError(5, "Input/output error")

    with opened(tmp_path, gently=True) as (log, _):
        write(log, 1, 4)
        log.settle()
        with monkeypatch.context() as failing:
            failing.setattr(heads, "sync", broken)
            version, segments_before = 5, len(live(log))
            while len(live(log)) == segments_before:
                log.append(update(LAYOUT, version))
                version += 1
            wait_until(log._head_file._last.done)
            with pytest.raises(OSError, match="Input/output error"):
                write(log, version, version + 40)
            with pytest.raises(OSError, match="Input/output error"):
                log.cut(log.number, 0)
            last = log.number
        # The disk is well again.
        log.cut(0, 0)
        assert HeadFile(log.path).read().segment > 1
        log.append(update(LAYOUT, log.number))
        assert log.number == last + 1


def test_a_log_with_fsync_has_the_name_of_a_segment_on_the_disk_before_its_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(HeadFile, "write_later", None)
    with opened(tmp_path, sync=True) as (log, _):
        write(log, 1, 20)
        assert HeadFile(log.path).read().segment == live(log)[-1]


def test_only_segments_with_records_that_a_snapshot_needs_are_flushed_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with opened(tmp_path) as (log, _):
        write(log, 1, 20)
        log.settle()
        firsts, flushed = live(log), list[int]()
        sync = os.fdatasync

        def noted(descriptor: int) -> None:
            flushed.append(int(Path(f"/proc/self/fd/{descriptor}").readlink().stem))
            sync(descriptor)

        monkeypatch.setattr(os, "fdatasync", noted)
        log.flush(firsts[-2])
        assert flushed == firsts[-2:]
        flushed.clear()
        log.flush(firsts[-1] - 1)
        assert flushed == firsts[-1:]
