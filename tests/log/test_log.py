"""The log on disk: what comes back, where a torn end is cut, and what is refused."""

from __future__ import annotations

import errno
import os
import shutil
import threading

import pytest

from ps_protocol.errors import ConfigError, DamagedData, StorageFull
from ps_server.log import reader
from ps_server.log import segments as segment_files
from ps_server.log.durable import DurableLog
from ps_server.log.folder import DataFolder
from ps_server.log.reader import LogReader
from ps_server.log.record import HEADER_BYTES, Header, decode_header, encode_record
from ps_server.log.recovery import recover
from ps_server.log.scan import Scan
from ps_server.log.segments import SegmentFolder
from tests.checkpoint.faults import counted, dies_at
from tests.log.support import (
    beginning,
    layout_of,
    opened,
    segments,
    served_by_version,
    update,
    write_log,
    write_snapshot,
)
from tests.support.length import choose
from tests.support.loops import LoopThread
from tests.support.seeds import seeded

SMALL = ((3, 2), (5,))


@pytest.fixture(autouse=True)
def small_segments(monkeypatch):
    monkeypatch.setattr(segment_files, "SEGMENT_BYTES", 1 << 14)


def offsets(path):
    """Where each record of a segment begins, and where the last ends."""
    data, found = memoryview(path.read_bytes()), [0]
    while (header := decode_header(data[found[-1] :])) is not None:
        found.append(found[-1] + header.record_bytes)
    return found


def test_what_was_appended_comes_back_in_order_and_the_parameters_bit_for_bit(tmp_path):
    layout = layout_of(*SMALL)
    served = write_log(tmp_path, layout, 7)
    with opened(tmp_path) as (log, found):
        model = found.models["model"]
        assert bytes(model.replica.region.bytes) == served[7]
        assert (found.number, model.tracker.version, model.initialised) == (9, 7, True)
        assert [s.last_sequence for s in model.tracker.clocks()] == [7]
        assert log.append(update(layout, 8)) == 10
    with opened(tmp_path) as (_, found):
        assert bytes(found.models["model"].replica.region.bytes) == served_by_version(layout, 8)[8]


def test_an_update_is_logged_with_its_missing_slices_its_options_its_scale_and_its_buffers(tmp_path):
    layout = layout_of(*SMALL, buffer_shapes=((4,),))
    entries = [
        update(layout, 1, frozenset({1}), scale=0.5, buffer_weight=1.0),
        update(layout, 2, frozenset({0}), buffer_weight=0.25),
        update(layout, 3, frozenset({0, 1})),
    ]
    from ps_server.state.replica import Replica

    replica = Replica(layout)
    with opened(tmp_path) as (log, _):
        for entry in beginning(layout):
            log.append(entry)
        replica.load(beginning(layout)[1].region, None)
        for entry in entries:
            log.append(entry)
            replica.apply(entry.step)
    with opened(tmp_path) as (_, found):
        assert bytes(found.models["model"].replica.region.bytes) == bytes(replica.region.bytes)


def test_a_record_cut_anywhere_is_no_record_and_all_before_it_are(tmp_path):
    layout, chance = layout_of(*SMALL), seeded()
    served = write_log(tmp_path / "whole", layout, 3)
    (path,) = segments(tmp_path / "whole")
    *_, last, end = offsets(path)
    header = decode_header(memoryview(path.read_bytes())[last:])
    # What is cut is zeros afterwards, as the padding at the end of a payload is before: there a cut changes nothing.
    whole = len(path.read_bytes()[: last + HEADER_BYTES + header.message_bytes + header.payload_bytes].rstrip(b"\0"))
    for cut in {
        last,
        whole - 1,
        whole,
        last + 1,
        last + HEADER_BYTES,
        end - 1,
        *chance.sample(range(last, end - 1), 20),
    }:
        shutil.rmtree(tmp_path / "torn", ignore_errors=True)
        shutil.copytree(tmp_path / "whole", tmp_path / "torn")
        data = path.read_bytes()
        segments(tmp_path / "torn")[0].write_bytes(data[:cut] + bytes(len(data) - cut))
        with opened(tmp_path / "torn") as (log, found):
            expected = served[3] if cut >= whole else served[2]
            assert bytes(found.models["model"].replica.region.bytes) == expected
            log.append(update(layout, found.models["model"].tracker.version + 1))
        with opened(tmp_path / "torn") as (_, found):
            assert bytes(found.models["model"].replica.region.bytes) in (served[3], served_by_version(layout, 4)[4])


def test_a_torn_end_is_said(tmp_path, caplog):
    write_log(tmp_path, layout_of(*SMALL), 3)
    (path,) = segments(tmp_path)
    *_, last, end = offsets(path)
    with path.open("r+b") as file:
        os.pwrite(file.fileno(), bytes(end - last - HEADER_BYTES), last + HEADER_BYTES)
    with opened(tmp_path):
        assert f"record 5 is not whole and is cut off: {path} at byte {last}; its end was never written" in caplog.text


@pytest.mark.parametrize("place", ["header", "body"])
def test_a_damaged_record_with_others_behind_it_stops_the_shard_naming_segment_and_offset(tmp_path, place):
    write_log(tmp_path, layout_of(*SMALL), 5)
    (path,) = segments(tmp_path)
    third = offsets(path)[2]
    at = third + (8 if place == "header" else HEADER_BYTES + 3)
    before = path.read_bytes()
    with path.open("r+b") as file:
        os.pwrite(file.fileno(), bytes([before[at] ^ 1]), at)
    damaged = path.read_bytes()
    with (
        pytest.raises(DamagedData, match=f"{path} at byte {third}: record 3 is damaged, and record 4 follows"),
        opened(tmp_path),
    ):
        pass
    assert path.read_bytes() == damaged


def test_a_missing_segment_stops_the_shard(tmp_path, monkeypatch):
    monkeypatch.setattr(segment_files, "SEGMENT_BYTES", 4096)
    layout = layout_of((200,))
    write_log(tmp_path, layout, 12)
    _, second, *rest = segments(tmp_path)
    assert rest
    second.unlink()
    with pytest.raises(DamagedData, match="is damaged, and later ones are there"), opened(tmp_path):
        pass


def test_a_log_whose_beginning_is_missing_stops_the_shard(tmp_path, monkeypatch):
    monkeypatch.setattr(segment_files, "SEGMENT_BYTES", 4096)
    write_log(tmp_path, layout_of((200,)), 12)
    segments(tmp_path)[0].unlink()
    with pytest.raises(DamagedData, match="record 1 and those after it are missing"), opened(tmp_path):
        pass


def test_what_an_earlier_life_left_behind_a_cut_is_not_taken_for_new_records(tmp_path):
    layout = layout_of(*SMALL)
    served = write_log(tmp_path, layout, 5)
    (path,) = segments(tmp_path)
    before, starts = path.read_bytes(), offsets(path)
    # Record 5 is torn; a new life writes another one in its place; then what followed the old one appears again.
    path.write_bytes(before[: starts[4]] + bytes(len(before) - starts[4]))
    with opened(tmp_path) as (log, found):
        assert bytes(found.models["model"].replica.region.bytes) == served[2]
        log.append(update(layout, 3))
    data = path.read_bytes()
    path.write_bytes(data[: starts[5]] + before[starts[5] :])
    with opened(tmp_path) as (_, found):
        assert found.number == 5
        assert bytes(found.models["model"].replica.region.bytes) == served[3]


def test_recycled_segments_are_overwritten_and_nothing_old_is_taken_for_new(tmp_path, monkeypatch):
    monkeypatch.setattr(segment_files, "SEGMENT_BYTES", 4096)
    layout, folder = layout_of((200,)), tmp_path / "shard-0" / "log"
    with opened(tmp_path) as (log, _):
        files = set()
        for version in range(1, 41):
            log.append(update(layout, version))
            if version % 5 == 0:
                log.cut(version - 2, 0)
                files |= {path.stat().st_ino for path in folder.iterdir()}
        assert len(list(folder.iterdir())) <= 6
        assert len(files) <= 12
    segments = SegmentFolder(folder, sync=False).live()
    scan = Scan(segments, segments[0].first - 1)
    assert [record.number for record in scan] == list(range(segments[0].first, 41))


def test_a_full_disk_refuses_the_reservation_and_takes_it_again_when_there_is_room(tmp_path, monkeypatch):
    full = True
    fallocate = os.posix_fallocate

    def limited(descriptor, offset, size):
        if full:
            raise OSError(errno.ENOSPC, "No space left on device")
        fallocate(descriptor, offset, size)

    monkeypatch.setattr(os, "posix_fallocate", limited)
    layout = layout_of(*SMALL)
    with opened(tmp_path) as (log, _), LoopThread() as loop:
        with pytest.raises(StorageFull, match=r"shard 0 has no room for its log.*free some space"):
            loop.run(log.reserve(100))
        assert [path.name for path in (tmp_path / "shard-0" / "log").iterdir()] == ["head.json"]
        full = False
        loop.run(log.reserve(100))
        assert log.append(beginning(layout)[0]) == 1
        log.release(100)


def test_what_is_reserved_fits_whatever_its_sizes(tmp_path, monkeypatch):
    monkeypatch.setattr(segment_files, "SEGMENT_BYTES", 1 << 18)
    chance, prepare = seeded(), SegmentFolder.prepare

    def ahead(folder, size):
        # Not by the one that appends; the thread that makes room ahead may be at it meanwhile.
        assert threading.current_thread() is not threading.main_thread(), "there was no room"
        prepare(folder, size)

    monkeypatch.setattr(SegmentFolder, "prepare", ahead)
    with opened(tmp_path) as (log, _), LoopThread() as loop:
        written = 0
        for _ in range(30):
            sizes = [chance.randrange(1, 1 << 18) for _ in range(chance.randrange(1, 6))]
            layouts = [layout_of((size // 4 + 1,)) for size in sizes]
            for layout in layouts:
                loop.run(log.reserve(layout.region_bytes))
            for layout in layouts:
                written = log.append(update(layout, 1))
                log.release(layout.region_bytes)
        assert written == log.number


def test_a_header_is_read_only_as_it_was_written():
    header = Header(7, 2, 10, 100, 12345)
    encoded = bytearray(header.encode())
    assert decode_header(memoryview(encoded)) == header
    for at in range(HEADER_BYTES):
        changed = bytearray(encoded)
        changed[at] ^= 0x40
        assert decode_header(memoryview(changed)) is None
    assert decode_header(memoryview(encoded)[:-1]) is None


def test_a_record_is_padded_to_where_the_next_may_begin():
    for size in (0, 1, 50, 64, 200):
        pieces = encode_record(1, 1, b"m" * 3, [memoryview(bytes(size))])
        assert sum(map(len, pieces)) % 64 == 0


# The data directory


def test_a_directory_is_used_by_one_process_at_a_time(tmp_path):
    folder = DataFolder.open(tmp_path, 0)
    with pytest.raises(ConfigError, match="in use by another process"):
        DataFolder.open(tmp_path, 0)
    DataFolder.open(tmp_path, 1).close()
    folder.close()
    DataFolder.open(tmp_path, 0).close()


def test_a_directory_of_another_shard_is_refused(tmp_path):
    DataFolder.open(tmp_path, 0).close()
    (tmp_path / "shard-0").rename(tmp_path / "shard-1")
    with pytest.raises(
        DamagedData, match="holds the data of another shard; shard: 1; expected: shard 1; actual: shard 0"
    ):
        DataFolder.open(tmp_path, 1)


def test_a_directory_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be written: Not a directory; remedy: give --data-dir a folder"):
        DataFolder.open(tmp_path / "file", 0)


def test_each_process_is_a_life_of_its_own_and_knows_who_wrote_last(tmp_path):
    folder = DataFolder.open(tmp_path, 0)
    assert (folder.identity.life, folder.identity.incarnation) == (1, 0)
    folder.belongs_to(77)
    folder.close()
    folder = DataFolder.open(tmp_path, 0)
    assert (folder.identity.life, folder.identity.incarnation) == (2, 77)
    assert recover(folder, log_goes_on=True).models == {}
    assert DurableLog(folder, 0, None, sync=True).waits
    folder.close()


def test_a_reader_from_the_beginning_is_not_misled_by_the_first_record_being_written_while_it_looks(
    tmp_path, monkeypatch
):
    layout = layout_of(*SMALL)
    with opened(tmp_path) as (log, _):
        look = reader.live_segments

        def looked_late(folder):
            seen = look(folder)
            for entry in beginning(layout):
                log.append(entry)
            return seen

        monkeypatch.setattr(reader, "live_segments", looked_late)
        assert LogReader(log, 0).is_behind(0)


def test_a_snapshot_of_the_same_record_as_the_one_before_replaces_it_whenever_its_process_dies(tmp_path):
    """One that a start makes: the one before was whole at the last record, and begun some records earlier."""
    layout = layout_of(*SMALL)
    served = write_log(tmp_path / "first", layout, 5)[-1]
    write_snapshot(tmp_path / "first")

    def again(name):
        return shutil.copytree(tmp_path / "first", tmp_path / name)

    counted_at = again("counted")
    total = counted(lambda: write_snapshot(counted_at))
    assert total > 20
    for number in range(0, total, choose(1, 2)):
        root = again(str(number))
        with dies_at(number):
            write_snapshot(root)
        with opened(root) as (_, found):
            assert bytes(found.models["model"].replica.region.bytes) == served
        write_snapshot(root)
        left = {path.name for path in (root / "shard-0" / "snapshots").iterdir()} - {"spare.bin"}
        assert [name[:20] for name in left] == [f"{7:020}"], "what was not finished stays on the disk"
