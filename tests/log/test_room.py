"""Room in the log ahead of records: which fits, which is made, enlarged and filled. Two seconds, in process."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from ps_protocol.errors import StorageFull
from ps_server.log import durable
from ps_server.log.room import fits
from ps_server.log.segments import SegmentFolder
from tests.log.support import beginning, layout_of, opened, update
from tests.support.loops import LoopThread
from tests.support.seeds import seeded

UNIT = 1 << 18
_ALLOCATE = os.posix_fallocate


@pytest.fixture(autouse=True)
def small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(durable, "SEGMENT_BYTES", UNIT)


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


def spares(folder: SegmentFolder) -> dict[int, int]:
    """Sizes by inode."""
    return {path.stat().st_ino: path.stat().st_size for path in folder.folder.glob("spare-*.log")}


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[SegmentFolder]:
    made = SegmentFolder(tmp_path / "log", sync=True)
    yield made
    made.stop()


def test_a_segment_that_has_become_too_small_is_enlarged(folder: SegmentFolder):
    folder.prepare(4 * UNIT)
    (inode,) = spares(folder)
    assert folder.added_bytes(6 * UNIT) == 2 * UNIT
    folder.prepare(6 * UNIT)
    assert spares(folder) == {inode: 6 * UNIT}
    assert folder.spare_bytes == (6 * UNIT,)
    assert folder.added_bytes(6 * UNIT) == 6 * UNIT
    folder.prepare(6 * UNIT)
    assert len(spares(folder)) == 2


def test_a_full_disk_leaves_a_segment_as_large_as_it_was(folder: SegmentFolder, monkeypatch: pytest.MonkeyPatch):
    folder.prepare(UNIT)

    def half(descriptor: int, begin: int, nbytes: int) -> None:
        _ALLOCATE(descriptor, begin, nbytes // 2)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", half)
    with pytest.raises(OSError, match="No space left"):
        folder.prepare(3 * UNIT)
    assert [*spares(folder).values()] == [UNIT] == [*folder.spare_bytes]
    descriptor, size = folder.begin(1, UNIT, 3 * UNIT)
    os.close(descriptor)
    assert size == UNIT


@pytest.mark.parametrize("full", [False, True])
def test_a_segment_that_is_begun_while_it_is_enlarged_keeps_its_records(
    folder: SegmentFolder, monkeypatch: pytest.MonkeyPatch, full: bool
):
    folder.prepare(UNIT)
    begun = list[tuple[int, int]]()

    def overtaken(descriptor: int, begin: int, nbytes: int) -> None:
        if not begun:
            begun.append(folder.begin(1, UNIT, 3 * UNIT))
            os.pwrite(begun[0][0], b"r" * UNIT, 0)
            _ALLOCATE(descriptor, begin, nbytes)
            if full:
                raise OSError(errno.ENOSPC, "No space left on device")
        else:
            _ALLOCATE(descriptor, begin, nbytes)

    monkeypatch.setattr(os, "posix_fallocate", overtaken)
    if full:
        with pytest.raises(OSError, match="No space left"):
            folder.prepare(3 * UNIT)
    else:
        folder.prepare(3 * UNIT)
    descriptor, size = begun[0]
    folder.fill()
    assert size == UNIT
    assert os.pread(descriptor, UNIT, 0) == b"r" * UNIT
    os.close(descriptor)
    assert folder.spare_bytes == (() if full else (3 * UNIT,)), "another was made"
    assert folder.live()[0].size_bytes >= UNIT


def test_a_segment_is_filled_where_it_was_not_and_nobody_waits_for_it(folder: SegmentFolder):
    folder.prepare(2 * UNIT)
    (path,) = folder.folder.glob("spare-*.log")
    assert not folder.is_filled
    folder.fill()
    assert folder.is_filled
    with path.open("r+b") as file:
        file.write(b"r" * 2 * UNIT)
    folder.prepare(3 * UNIT)
    assert not folder.is_filled
    folder.fill()
    assert path.read_bytes() == b"r" * 2 * UNIT + bytes(UNIT), "what was filled is not filled again"


def test_the_largest_segment_that_is_filled_is_begun(folder: SegmentFolder):
    for size in (UNIT, 2 * UNIT):
        folder.prepare(size)
        folder.fill()
        folder._spare = {path.rename(path.with_name(f"spare-{size}.log")): n for path, n in folder._spare.items()}
    folder.prepare(2 * UNIT)
    folder.fill()
    folder.prepare(4 * UNIT)
    sizes = list[int]()
    for first in (1, 2):
        descriptor, size = folder.begin(first, 10, UNIT)
        os.close(descriptor)
        sizes.append(size)
    assert sizes == [2 * UNIT, 4 * UNIT]


def test_zeros_are_never_written_over_records(folder: SegmentFolder, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("ps_server.log.segments._ZEROS", memoryview(bytes(4096)))
    monkeypatch.setattr("ps_server.log.segments._REST_SECONDS", 0.0)
    folder._sync, begun, piece = False, threading.Event(), folder._fill_piece

    def noted(path: Path) -> int:
        descriptor = piece(path)
        begun.set()
        return descriptor

    monkeypatch.setattr(folder, "_fill_piece", noted)
    for number in range(1, 11):
        begun.clear()
        folder.prepare(UNIT)
        filling = threading.Thread(target=folder.fill)
        filling.start()
        assert begun.wait(60)
        descriptor, _ = folder.begin(number, UNIT, UNIT)
        os.pwrite(descriptor, b"r" * UNIT, 0)
        filling.join(60)
        assert os.pread(descriptor, UNIT, 0) == b"r" * UNIT
        os.close(descriptor)


def test_filling_ends_when_it_is_stopped_and_where_it_fails(folder: SegmentFolder, monkeypatch: pytest.MonkeyPatch):
    folder.prepare(UNIT)
    with monkeypatch.context() as broken:
        broken.setattr(os, "pwrite", lambda *_: (_ for _ in ()).throw(OSError(errno.EIO, "Input/output error")))
        folder.fill()
    assert folder.is_filled, "the record that is written there is told"
    folder.prepare(UNIT)
    folder.stop()
    folder.fill()
    assert not folder.is_filled


def test_a_segment_whose_enlarging_was_killed_is_used_as_it_is(tmp_path: Path):
    with opened(tmp_path) as (log, _), LoopThread() as loop:
        loop.run(log.reserve(100))
        (path,) = log.path.glob("spare-*.log")
    os.truncate(path, UNIT + 4096)
    layout = layout_of((10_000,))
    with opened(tmp_path) as (log, _), LoopThread() as loop:
        assert log._segments.spare_bytes == (UNIT + 4096,)
        for entry in [*beginning(layout), *(update(layout, version) for version in range(1, 28))]:
            loop.run(log.reserve(layout.region_bytes))
            log.append(entry)
            log.release(layout.region_bytes)
    with opened(tmp_path) as (_, found):
        assert found.number == 29


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


def test_a_log_whose_records_grow_enlarges_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """As those of a shard do that gets slices in many batches: it had made new files at each size."""
    made = {"new": 0, "enlarged": 0, "bytes": 0}

    def counted(descriptor: int, begin: int, nbytes: int) -> None:
        if Path(f"/proc/self/fd/{descriptor}").readlink().parent == log.path:
            made["enlarged" if begin else "new"] += 1
            made["bytes"] += nbytes
        _ALLOCATE(descriptor, begin, nbytes)

    monkeypatch.setattr(os, "posix_fallocate", counted)
    with opened(tmp_path, gently=True) as (log, _), LoopThread() as loop:
        for batch in range(1, 21):
            layout = layout_of((batch * UNIT // 32,))
            for _ in range(4):
                loop.run(log.reserve(layout.region_bytes))
                log.append(update(layout, 1))
                log.release(layout.region_bytes)
            log.cut(log.number - 1, 40 * UNIT)
        largest = log.segment_bytes
    assert largest == 6 * UNIT
    assert made["enlarged"] > 10
    assert made["new"] <= 6
    assert made["bytes"] <= 6 * largest


def test_a_full_disk_refuses_what_needs_a_larger_file_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with opened(tmp_path, gently=True) as (log, _), LoopThread() as loop:
        loop.run(log.reserve(100))
        log.release(100)

        def full(*_: int) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        with monkeypatch.context() as limited:
            limited.setattr(os, "posix_fallocate", full)
            with pytest.raises(StorageFull, match="has no room for its log"):
                loop.run(log.reserve(10 * UNIT))
            assert log._reserved == {}
            loop.run(log.reserve(100))
        log.append(update(layout_of((10,)), 1))
        loop.run(log.reserve(10 * UNIT))
