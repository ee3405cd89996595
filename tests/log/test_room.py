"""Room in the log ahead of records: what fits, and who waits for more. One second, in process."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from pathlib import Path

import pytest

from ps_protocol.errors import StorageFull
from ps_server.log import segments
from ps_server.log.durable import DurableLog, fits
from ps_server.log.segments import SegmentFolder
from tests.log.support import beginning, layout_of, opened, update
from tests.support.loops import LoopThread
from tests.support.seeds import seeded
from tests.support.shards import wait_until

UNIT = 1 << 18
_ALLOCATE = os.posix_fallocate


@pytest.fixture(autouse=True)
def small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "SEGMENT_BYTES", UNIT)


def always_fits(records: list[int], left: int, spares: list[int]) -> bool:
    """Tries every order, and every choice of a spare segment."""
    for place, size in enumerate(records):
        others = records[:place] + records[place + 1 :]
        if size <= left:
            ways = [(left - size, spares)]
        else:
            ways = [(spare - size, spares[:at] + spares[at + 1 :]) for at, spare in enumerate(spares) if spare >= size]
        if not ways or not all(always_fits(others, *way) for way in ways):
            return False
    return True


def test_what_is_said_to_fit_does_in_every_order():
    chance, said = seeded(), 0
    for _ in range(2000):
        records = [chance.randrange(1, 9) for _ in range(chance.randrange(1, 5))]
        left, spares = chance.randrange(12), [chance.randrange(1, 18) for _ in range(chance.randrange(4))]
        if fits(records, left, spares):
            said += 1
            assert always_fits(records, left, spares), (records, left, spares)
    assert said > 200


@pytest.mark.parametrize(
    ("records", "left", "spares", "expected"),
    [
        ([8], 8, [], True),
        ([8], 7, [], False),
        ([8], 0, [8], True),
        ([8], 7, [7, 7], False),
        ([8, 8], 0, [16], True),
        ([8, 8], 0, [8], False),
        ([8, 8], 0, [8, 8], True),
        ([8, 1], 8, [], False),
    ],
)
def test_a_segment_that_holds_one_record_counts(records: list[int], left: int, spares: list[int], expected: bool):
    assert fits(records, left, spares) is expected


def test_a_smaller_record_does_not_wait_for_the_room_of_a_larger_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """As a push does not while room is made for what comes in a move."""
    go, asked = threading.Event(), threading.Event()

    def slow(descriptor: int, begin: int, nbytes: int) -> None:
        if begin + nbytes > UNIT:
            asked.set()
            assert go.wait(60)
        _ALLOCATE(descriptor, begin, nbytes)

    monkeypatch.setattr(os, "posix_fallocate", slow)
    with opened(tmp_path, gently=True) as (log, _), LoopThread() as loop:
        loop.run(log.reserve(100))
        log.release(100)

        async def both() -> None:
            larger = asyncio.create_task(log.reserve(10 * UNIT))
            assert await asyncio.to_thread(asked.wait, 60)
            await log.reserve(100)
            assert not larger.done()
            go.set()
            await larger

        try:
            loop.run(both())
        finally:
            go.set()
        assert list(log._reserved.values()) == [1, 1]


def _prepared(log: DurableLog) -> None:
    """A file that is made ahead is there, or has found the disk full: who comes next would wait for it, too."""
    wait_until(lambda: log._preparing is None or log._preparing.done())


def test_a_full_disk_refuses_what_needs_a_larger_file_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with opened(tmp_path, gently=True) as (log, _), LoopThread() as loop:
        loop.run(log.reserve(100))
        log.release(100)

        with monkeypatch.context() as limited:
            limited.setattr(os, "posix_fallocate", _full)
            with pytest.raises(StorageFull, match="has no room for its log"):
                loop.run(log.reserve(10 * UNIT))
            assert log._reserved == {}
            loop.run(log.reserve(100))
            _prepared(log)
        log.append(update(layout_of((10,)), 1))
        loop.run(log.reserve(10 * UNIT))


def test_a_file_that_was_promised_outlives_a_snapshot_while_larger_ones_are_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Segments get larger, for a larger record is to come; what a smaller one was promised is not deleted."""
    with opened(tmp_path, gently=True) as (log, _), LoopThread() as loop:
        loop.run(log.reserve(100))  # promised the only spare file, of one unit
        with monkeypatch.context() as limited:
            limited.setattr(os, "posix_fallocate", _full)
            with pytest.raises(StorageFull):
                loop.run(log.reserve(10 * UNIT))  # from now on files of 20 units are made
            assert log.segment_bytes > 2 * UNIT
            log.cut(0, 0)
            log.append(update(layout_of((10,)), 1))  # needs no room on the disk
            _prepared(log)
        log.release(100)
        spare = set(log.path.glob("spare-*"))
        loop.run(log.reserve(10 * UNIT))
        log.cut(0, 0)
        assert all(path.stat().st_size > 2 * UNIT for path in log.path.glob("spare-*")), spare


def test_a_push_takes_a_file_that_a_snapshot_frees_while_another_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    go, asked = threading.Event(), threading.Event()

    def slow(descriptor: int, begin: int, nbytes: int) -> None:
        asked.set()
        assert go.wait(60)
        _ALLOCATE(descriptor, begin, nbytes)

    size = UNIT - (1 << 17)  # one record a file
    with opened(tmp_path, gently=True) as (log, _), LoopThread() as loop:
        layout = layout_of((size // 4,))
        for entry in beginning(layout):
            log.append(entry)
        for version in range(1, 4):
            loop.run(log.reserve(size))
            log.append(update(layout, version))
            log.release(size)
        wait_until(lambda: log._preparing is None or log._preparing.done())
        monkeypatch.setattr(os, "posix_fallocate", slow)

        async def waiting() -> None:
            reserved = 0
            while log.reserve_now(size):
                reserved += 1
            push = asyncio.create_task(log.reserve(size))
            assert await asyncio.to_thread(asked.wait, 60)
            assert not push.done()
            await asyncio.to_thread(log.cut, log.number, 1 << 30)
            await push
            assert not go.is_set()
            go.set()
            for _ in range(reserved + 1):
                log.release(size)

        try:
            loop.run(waiting())
        finally:
            go.set()


def test_what_is_left_over_at_the_ends_of_segments_counts_as_taken(tmp_path: Path):
    size = UNIT - (1 << 17)
    with opened(tmp_path, gently=True) as (log, _):
        layout = layout_of((size // 4,))
        for entry in beginning(layout):
            log.append(entry)
        assert log.unsaved_room_bytes >= log.unsaved_bytes
        for version in range(1, 5):
            log.append(update(layout, version))
        ends = log._segments.file_bytes - log.prepared_bytes
        assert log.unsaved_room_bytes == ends > log.unsaved_bytes + UNIT // 2


def _full(*_: int) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


class LockThenTaken:
    """A lock; after it was given back the first time, the helper that makes room takes every spare segment."""

    def __init__(self, segments: SegmentFolder) -> None:
        self._lock, self._segments, self._taken = segments._lock, segments, False

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()
        if not self._taken:
            self._taken = True
            self._segments.take_unneeded(0, 1, lambda sizes: True)


def test_a_segment_that_the_writer_begins_is_not_taken_away_by_the_helper_at_the_same_time(tmp_path: Path) -> None:
    segments = SegmentFolder(tmp_path / "log", sync=False)
    segments.prepare(UNIT)
    segments._lock = LockThenTaken(segments)  # type: ignore[assignment]
    descriptor, size = segments.begin(1, UNIT, UNIT)
    os.close(descriptor)
    assert size == UNIT
    assert [segment.first for segment in segments.live()] == [1]


def test_a_segment_that_becomes_the_live_one_counts_at_every_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = SegmentFolder(tmp_path, sync=False)
    folder.prepare(65536)
    found: list[int] = []
    reader = threading.Thread(target=lambda: found.append(folder.file_bytes))
    rename = Path.rename

    def renamed(path: Path, target: Path) -> Path:
        reader.start()
        reader.join(0.05)  # it may wait for the new name
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", renamed)
    os.close(folder.begin(1, 65536, 65536)[0])
    reader.join()
    assert found == [65536]


def test_a_log_that_has_all_it_may_take_does_not_grow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "SEGMENT_BYTES", UNIT)
    with LoopThread() as loop, opened(tmp_path) as (log, _):

        async def grown(most_bytes: int) -> int:
            log.grow(most_bytes)
            await asyncio.gather(*([log._preparing] if log._preparing else []))
            return log._segments.file_bytes

        before = log._segments.file_bytes
        assert loop.run(grown(before + log.segment_bytes - 1)) == before
        assert loop.run(grown(before + log.segment_bytes)) == before + log.segment_bytes
