"""``--log-mb`` means what it says: the log takes that much, or the model is refused with what it would need."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from ps_protocol.errors import ConfigError, StorageFull
from ps_protocol.v1 import shard_pb2
from ps_server.cli.options.storage import LOG_BYTES, SnapshotRule, StorageOptions
from ps_server.log.durable import DurableLog
from ps_server.log.folder import DataFolder
from ps_server.log.snapshots import SnapshotWriter
from ps_server.shard.durability.snapshotter import Snapshotter
from tests.log.support import layout_of, update
from tests.shard.disks import shard_on
from tests.support.loops import LoopThread
from tests.support.shards import StubStream, TestShard, flat, gradients, simple_spec, start, wait_until, whole_map

BOUND = 4 << 20


def size_of(folder: Path) -> int:
    total = 0
    for path in list(folder.iterdir()):
        try:
            total += path.stat().st_size
        except FileNotFoundError:
            continue  # renamed meanwhile
    return total


def push_whole(stream: StubStream, payload: bytes) -> None:
    """A push in one message."""
    stream.sequence, stream.clock = stream.sequence + 1, stream.clock + 1
    place = {"sequence": stream.sequence, "phase": stream.phase, "clock": stream.clock}
    stream.send(push=shard_pb2.PushHeader(**place, payload=payload))
    stream.result()


def test_a_small_log_stays_within_its_bound_through_many_snapshots(tmp_path, monkeypatch):
    monkeypatch.setattr("ps_server.shard.times.SNAPSHOT_LOOK_SECONDS", 1.0)  # so that it comes to its bound
    rule = SnapshotRule(seconds=1e9, log_bytes=BOUND, strict=True)
    with shard_on(tmp_path, rule=rule) as shard:
        model, _ = start(shard, (15_000,))
        payload = flat(model.layout, *gradients(model, 1))
        stream, most, done = StubStream(shard), [0], threading.Event()

        def look() -> None:
            while not done.wait(0.002):
                most[0] = max(most[0], size_of(tmp_path / "shard-0" / "log"))

        watcher = threading.Thread(target=look)
        watcher.start()
        try:
            snapshotter = shard.storage._snapshotter
            # The watcher may be slow; the file that was seen last is still there.
            while snapshotter.count < 3 or most[0] <= BOUND // 2:
                push_whole(stream, payload)
        finally:
            done.set()
            watcher.join()
        wait_until(lambda: size_of(tmp_path / "shard-0" / "log") <= BOUND)
        assert BOUND // 2 < most[0] <= BOUND
        stream.end()


def test_a_model_whose_updates_do_not_fit_is_refused_with_the_least_that_will_do(tmp_path):
    rule = SnapshotRule(seconds=1e9, log_bytes=BOUND, strict=True)
    with shard_on(tmp_path, rule=rule) as shard:
        shard_map = whole_map(simple_spec((600_000,), lr=0.1))
        with pytest.raises(ConfigError, match=r"expected: --log-mb 15 or more.*actual: --log-mb 4; remedy: raise"):
            shard.place(shard_map)
    rule = SnapshotRule(seconds=1e9, log_bytes=15 << 20, strict=True)
    with shard_on(tmp_path, rule=rule) as shard:
        shard.place(shard_map)


def test_without_the_option_a_log_takes_what_the_largest_update_needs(tmp_path):
    folder = DataFolder.open(tmp_path, 0)
    log = DurableLog(folder, 0, None, sync=False)
    log.check_bound("model", 1 << 40)
    assert log.segment_bytes == 64 << 20
    log.close()
    folder.close()


@pytest.mark.parametrize(("log_mb", "expected"), [(None, (LOG_BYTES, False)), (4, (4 << 20, True))])
def test_the_option_is_a_bound_where_it_is_given(log_mb, expected, tmp_path):
    rule = StorageOptions(tmp_path, log_mb=log_mb).config().snapshots
    assert (rule.log_bytes, rule.strict) == expected


def write_updates(loop: LoopThread, log: DurableLog, count: int) -> None:
    """As pushes of a model are."""
    layout = layout_of((5_000,))
    for version in range(1, count + 1):
        loop.run(log.space(layout.region_bytes))
        loop.run(log.reserve(layout.region_bytes))
        log.append(update(layout, version))
        log.release(layout.region_bytes)


def test_a_push_that_no_snapshot_makes_room_for_is_refused_and_taken_when_one_does(tmp_path, monkeypatch):
    monkeypatch.setattr("ps_server.log.durable.PRESSED_SECONDS", 0.02)
    folder = DataFolder.open(tmp_path, 0)
    log = DurableLog(folder, 0, None, sync=False, bound_bytes=1 << 20)
    with LoopThread() as loop:
        with pytest.raises(StorageFull, match=r"has reached its limit.*expected: 1 MB.*--log-mb"):
            write_updates(loop, log, 100)
        assert log.pressed
        assert size_of(log.path) <= 1 << 20
        log.cut(log.number, 1 << 20)
        assert not log.pressed
        write_updates(loop, log, 1)
    log.close()
    folder.close()


def test_files_of_a_log_are_overwritten_and_no_others_made_once_it_has_all_its_space(tmp_path, monkeypatch):
    monkeypatch.setattr("ps_server.log.durable.PRESSED_SECONDS", 0.02)
    folder = DataFolder.open(tmp_path, 0)
    log = DurableLog(folder, 0, None, sync=False, bound_bytes=1 << 20)

    def files() -> set[int]:
        return {path.stat().st_ino for path in log.path.glob("*.log")}

    with LoopThread() as loop:
        with pytest.raises(StorageFull):
            write_updates(loop, log, 100)
        full = files()
        for _ in range(5):
            log.cut(log.number - 2, 1 << 20)
            with pytest.raises(StorageFull):
                write_updates(loop, log, 100)
            assert files() == full, "a new file is filled with zeros first, which takes as long as a snapshot"
    log.close()
    folder.close()


@contextmanager
def without_snapshots(monkeypatch) -> Iterator[None]:
    """Within the block each snapshot fails, as on a full disk."""

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("ps_server.shard.durability.snapshotter.SnapshotWriter", full)
        patched.setattr("ps_server.shard.times.FULL_RETRY_SECONDS", 0.01)
        yield


def fill(shard: TestShard, stream: StubStream) -> None:
    """Push until the log has reached its limit."""
    payload = flat(shard.model().layout, *gradients(shard.model(), 1))
    for _ in range(1000):
        result, _ = stream.exchange(payload)
        if result.outcome == shard_pb2.OUTCOME_REFUSED:
            assert "has reached its limit, and no snapshot frees space" in result.error.message
            return
    raise AssertionError("the log has no limit")


@pytest.mark.parametrize("gently", [True, False], ids=["stopped", "killed"])
def test_a_shard_that_ended_at_the_limit_of_its_log_takes_pushes_after_its_start(tmp_path, monkeypatch, killed, gently):
    monkeypatch.setattr("ps_server.log.durable.PRESSED_SECONDS", 0.2)
    rule = SnapshotRule(seconds=1e9, log_bytes=1 << 20, strict=True)
    with ExitStack() as first:
        with without_snapshots(monkeypatch):
            shard = first.enter_context(shard_on(tmp_path / "a", rule=rule))
            model, _ = start(shard, (5_000,))
            stream = StubStream(shard)
            fill(shard, stream)
            stream.end()
            again = killed(shard, rule=rule) if not gently else None
            if gently:
                first.close()
        with again or shard_on(tmp_path / "a", rule=rule) as shard:
            other = shard.place(model.layout.shard_map)
            assert other.tracker.version == model.tracker.version
            stream, payload = StubStream(shard), flat(model.layout, *gradients(model, 1))
            place = {"sequence": stream.sequence + 1, "clock": stream.clock + 1}
            wait_until(lambda: stream.exchange(payload, **place)[0].outcome == shard_pb2.OUTCOME_APPLIED)
            stream.end()


def applied(stream: StubStream, payload: bytes, count: int) -> None:
    for _ in range(count):
        assert stream.exchange(payload)[0].outcome == shard_pb2.OUTCOME_APPLIED


@pytest.mark.parametrize(
    "rule",
    [SnapshotRule(seconds=1e9, log_records=12), SnapshotRule(seconds=1e9, log_bytes=1 << 20)],
    ids=["records", "bytes"],
)
def test_what_a_start_replays_counts_towards_the_next_snapshot(tmp_path, killed, rule):
    with shard_on(tmp_path / "a", rule=rule) as shard:
        model, _ = start(shard, (5_000,))
        payload, stream = flat(model.layout, *gradients(model, 1)), StubStream(shard)
        applied(stream, payload, 8)
        log = shard.storage._durable
        unsaved = log.unsaved_records, log.unsaved_bytes
        with killed(shard, rule=rule) as again:
            again.place(model.layout.shard_map)
            found = again.storage._durable
            assert (found.unsaved_records, found.unsaved_bytes) == unsaved
            later = StubStream(again)
            applied(later, payload, 8)
            wait_until(lambda: again.storage.snapshotter.count == 1)
            later.end()
            assert found.number < 40
        stream.end()


def test_a_shard_that_begins_its_snapshots_anew_forgets_no_record_that_none_holds(tmp_path):
    """As a standby does whenever its stream was broken."""
    with shard_on(tmp_path, rule=SnapshotRule(seconds=1e9)) as shard:
        model, _ = start(shard)
        stream = StubStream(shard)
        applied(stream, flat(model.layout, *gradients(model, 1)), 3)
        storage, log = shard.storage, shard.storage._durable
        unsaved = log.unsaved_records
        shard.loop.run(storage.give_up_snapshots())

        async def begun_again() -> None:
            storage.take_snapshots(lambda: shard.registry.kept)

        shard.loop.run(begun_again())
        assert log.unsaved_records == unsaved > 0
        shard.loop.run(storage.snapshotter.take())
        assert log.unsaved_records == 0
        stream.end()


def test_a_snapshot_that_fails_is_removed_while_the_loop_goes_on(tmp_path, monkeypatch):
    """To remove a large file takes a file system seconds."""
    removing, go_on = threading.Event(), threading.Event()
    close = SnapshotWriter.close

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def slow(writer: SnapshotWriter) -> None:
        removing.set()
        assert go_on.wait(60)
        close(writer)

    with shard_on(tmp_path, rule=SnapshotRule(seconds=1e9)) as shard:
        model, _ = start(shard)
        stream = StubStream(shard)
        monkeypatch.setattr(SnapshotWriter, "write_block", full)
        monkeypatch.setattr(SnapshotWriter, "close", slow)
        taken = asyncio.run_coroutine_threadsafe(shard.storage.snapshotter.take(), shard.loop.loop)
        assert removing.wait(60)
        applied(stream, flat(model.layout, *gradients(model, 1)), 3)
        go_on.set()
        with pytest.raises(OSError, match="No space left on device"):
            taken.result(60)
        assert not list((tmp_path / "shard-0" / "snapshots").glob("*.part"))
        stream.end()


def test_pushes_that_find_a_full_disk_make_a_snapshot_due_whose_files_they_use(tmp_path, monkeypatch):
    monkeypatch.setattr("ps_server.log.segments.SEGMENT_BYTES", 1 << 17)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with shard_on(tmp_path, rule=SnapshotRule(seconds=1e9)) as shard:
        model, _ = start(shard, (5_000,))
        payload, stream = flat(model.layout, *gradients(model, 1)), StubStream(shard)
        applied(stream, payload, 20)
        before = shard.storage.snapshotter.count  # not 0 where pushes have outrun the making of files
        monkeypatch.setattr(os, "posix_fallocate", full)
        for _ in range(100):
            place = {"sequence": stream.sequence + 1, "clock": stream.clock + 1}
            wait_until(lambda place=place: stream.exchange(payload, **place)[0].outcome == shard_pb2.OUTCOME_APPLIED)
            stream.sequence, stream.clock = place["sequence"], place["clock"]
        assert shard.storage.snapshotter.count > before
        stream.end()


@pytest.mark.parametrize("in_time", [True, False])
def test_pushes_that_outrun_the_making_of_files_make_a_snapshot_due_whose_files_they_use(
    tmp_path, monkeypatch, in_time
):
    """As on a shard that was just added: its log has its first files only. Where the shard does not look ``in_time``,
    they wait already.
    """
    if not in_time:
        monkeypatch.setattr(Snapshotter, "_look", lambda *_: None)
    monkeypatch.setattr("ps_server.log.segments.SEGMENT_BYTES", 1 << 18)
    go, allocate = threading.Event(), os.posix_fallocate

    def slow(*place: int) -> None:
        assert go.wait(60)
        allocate(*place)

    with shard_on(tmp_path, rule=SnapshotRule(seconds=1e9)) as shard:
        model, _ = start(shard, (5_000,))
        payload, stream = flat(model.layout, *gradients(model, 1)), StubStream(shard)
        log = shard.storage._durable
        applied(stream, payload, 4)
        wait_until(lambda: len(log._segments.spare_bytes) == 1)
        monkeypatch.setattr(os, "posix_fallocate", slow)
        try:
            applied(stream, payload, 100)
        finally:
            go.set()
        assert shard.storage.snapshotter.count > 2
        # It grows all the same.
        wait_until(lambda: log._preparing.done() and log._segments.file_bytes >= 3 << 18)
        stream.end()


def test_a_push_that_waits_for_a_larger_file_makes_no_snapshot_due(tmp_path, monkeypatch):
    """No file that a snapshot frees would have room for it."""
    monkeypatch.setattr("ps_server.log.segments.SEGMENT_BYTES", 1 << 18)
    go, asked, allocate = threading.Event(), threading.Event(), os.posix_fallocate

    def slow(*place: int) -> None:
        asked.set()
        assert go.wait(60)
        allocate(*place)

    with shard_on(tmp_path, rule=SnapshotRule(seconds=1e9)) as shard:
        model, _ = start(shard, (5_000,))
        stream, log = StubStream(shard), shard.storage._durable
        applied(stream, flat(model.layout, *gradients(model, 1)), 1)
        wait_until(lambda: log._preparing is None or log._preparing.done())
        monkeypatch.setattr(os, "posix_fallocate", slow)
        reserving = asyncio.run_coroutine_threadsafe(log.reserve(1 << 20), shard.loop.loop)
        try:
            assert asked.wait(60)
            monkeypatch.setattr(Snapshotter, "_look", lambda *_: None)
            shard.storage.snapshotter._until_next_bytes = 0
            assert log.unsaved_records
            assert not shard.storage.snapshotter._outrun()
        finally:
            go.set()
        reserving.result(60)
        log.release(1 << 20)
        stream.end()


def test_what_the_log_will_have_written_until_the_next_look_counts(tmp_path, monkeypatch):
    now = [0.0]
    with shard_on(tmp_path, rule=SnapshotRule(seconds=1e9, log_bytes=1 << 30)) as shard:
        start(shard)
        log, snapshotter = shard.storage._durable, shard.storage.snapshotter
        shard.loop.run(shard.storage.give_up_snapshots())
        clock = SimpleNamespace(monotonic=lambda: now[0])
        monkeypatch.setattr("ps_server.shard.durability.snapshotter.time", clock)
        for _ in range(2):
            snapshotter._look(0.25)
        due_bytes = snapshotter._due_bytes
        log.written_bytes += 1 << 28
        now[0] += 0.26
        snapshotter._look(0.25)
        assert 0.9 * (1 << 28) < due_bytes - snapshotter._due_bytes <= 1 << 28
        now[0] += 0.26
        snapshotter._look(0.25)
        assert snapshotter._due_bytes == due_bytes
        log.written_bytes -= 1 << 28


def test_pressure_without_a_record_that_none_holds_frees_files_and_makes_no_snapshot(tmp_path):
    with shard_on(tmp_path, rule=SnapshotRule(seconds=1e9)) as shard:
        start(shard)
        log, snapshotter = shard.storage._durable, shard.storage.snapshotter
        shard.loop.run(snapshotter.take())
        assert (snapshotter.count, log.unsaved_records) == (1, 0)
        log.pressed = True
        wait_until(lambda: not log.pressed)
        assert snapshotter.count == 1
