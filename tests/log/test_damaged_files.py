"""Every file of a data directory that is read back is believed only as it was written."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch

from ps_protocol.errors import DamagedData
from ps_protocol.sealed import load, seal
from ps_server.log import segments
from ps_server.log.folder import DataFolder
from ps_server.log.record import HEADER_BYTES, decode_header
from tests.log.support import go_on, layout_of, opened, write_log, write_snapshot
from tests.support.seeds import seeded

SMALL = ((3, 2), (5,))
VERSION = torch.__version__
FILES = ("shard.json", "snapshots/*/manifest.json")


@pytest.fixture(autouse=True)
def small_segments(monkeypatch):
    monkeypatch.setattr(segments, "SEGMENT_BYTES", 1 << 14)


@pytest.fixture
def shard(tmp_path) -> Path:
    """A shard's folder with a snapshot at record 6 and records up to 9."""
    layout = layout_of(*SMALL)
    write_log(tmp_path, layout, 4)
    write_snapshot(tmp_path)
    go_on(tmp_path, layout, 5, 7)
    return tmp_path / "shard-0"


def one(shard: Path, pattern: str) -> Path:
    (path,) = shard.glob(pattern)
    return path


@pytest.mark.parametrize("pattern", FILES)
def test_a_flipped_bit_anywhere_in_a_json_file_is_found_and_the_file_is_named(shard, pattern):
    path, chance = one(shard, pattern), seeded()
    whole = path.read_bytes()
    for at in chance.sample(range(len(whole)), min(80, len(whole))):
        damaged = bytearray(whole)
        damaged[at] ^= 1 << chance.randrange(8)
        path.write_bytes(damaged)
        with pytest.raises(DamagedData, match=str(path)), opened(shard.parent):
            pytest.fail(f"byte {at} was changed")
        assert path.read_bytes() == damaged


@pytest.mark.parametrize("pattern", FILES)
def test_a_json_file_that_was_cut_is_found(shard, pattern):
    path = one(shard, pattern)
    whole = path.read_bytes()
    for size in (0, 1, 20, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(DamagedData, match=str(path)), opened(shard.parent):
            pytest.fail(f"it was cut to {size} bytes")


def test_a_directory_with_a_log_and_without_its_identity_is_refused(shard):
    (shard / "shard.json").unlink()
    with pytest.raises(DamagedData, match=f"{shard / 'shard.json'} is missing"), opened(shard.parent):
        pass
    shutil.rmtree(shard / "log")
    with pytest.raises(DamagedData, match=f"{shard / 'shard.json'} is missing"), opened(shard.parent):
        pass


@pytest.mark.parametrize("pattern", FILES)
def test_a_file_that_lost_its_checksum_is_refused(shard, pattern):
    path = one(shard, pattern)
    body = json.loads(path.read_bytes())
    path.write_text(json.dumps({**body, "format": 1}))
    with pytest.raises(DamagedData, match=f"{path}.*checksum"), opened(shard.parent):
        pass
    del body["checksum"]
    path.write_text(json.dumps(body))
    with pytest.raises(DamagedData, match=f"{path}.*checksum"), opened(shard.parent):
        pass


# Where the log ends


def newest_segment(shard: Path) -> Path:
    return max(shard.glob("log/[0-9]*.log"))


@pytest.fixture
def longer(tmp_path, monkeypatch) -> Path:
    """A shard's folder with a snapshot at record 6, and records after it in several segments."""
    monkeypatch.setattr(segments, "SEGMENT_BYTES", 4096)
    layout = layout_of((200,))
    write_log(tmp_path, layout, 4)
    write_snapshot(tmp_path)
    go_on(tmp_path, layout, 5, 12)
    assert len(list((tmp_path / "shard-0" / "log").glob("[0-9]*.log"))) > 2
    return tmp_path / "shard-0"


def test_a_missing_newest_segment_stops_the_shard(longer):
    path = newest_segment(longer)
    path.unlink()
    with pytest.raises(DamagedData, match=f"{path} of the log is missing"), opened(longer.parent):
        pass


def test_all_segments_missing_stop_the_shard(longer):
    for path in longer.glob("log/[0-9]*.log"):
        path.unlink()
    with pytest.raises(DamagedData, match="of the log is missing"), opened(longer.parent):
        pass


def test_a_missing_folder_of_the_log_stops_the_shard(longer):
    shutil.rmtree(longer / "log")
    with pytest.raises(DamagedData, match=r"log/head\.json"), opened(longer.parent):
        pass


def test_a_newest_segment_that_was_cut_stops_the_shard_wherever_it_was_cut(longer):
    path = newest_segment(longer)
    whole = path.read_bytes()
    for size in (0, 1, 100, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(DamagedData, match=f"{path} of the log is cut at byte {size}"), opened(longer.parent):
            pass


def test_a_missing_snapshot_stops_the_shard(longer):
    (manifest,) = longer.glob("snapshots/*/manifest.json")
    manifest.unlink()
    with pytest.raises(DamagedData, match=f"{manifest} is damaged: the file is missing"), opened(longer.parent):
        pass
    shutil.rmtree(longer / "snapshots")
    with pytest.raises(DamagedData, match=f"{manifest} is damaged: the file is missing"), opened(longer.parent):
        pass


def test_a_log_that_was_closed_must_end_where_it_did(shard):
    with opened(shard.parent, gently=True) as (log, _):
        assert log.number == 9
    path = newest_segment(shard)
    *_, last, end = record_offsets(path)
    with path.open("r+b") as file:
        os.pwrite(file.fileno(), bytes(end - last), last)
    shorter = "ends at record 8, and was longer before; expected: record 9"
    with pytest.raises(DamagedData, match=shorter), opened(shard.parent):
        pass


def record_offsets(path: Path) -> list[int]:
    """Where each record of a segment begins, and where the last ends."""
    data, found = memoryview(path.read_bytes()), [0]
    while (header := decode_header(data[found[-1] :])) is not None:
        found.append(found[-1] + header.record_bytes)
    return found


def test_a_flipped_bit_in_the_last_record_stops_the_shard_naming_segment_and_byte(shard):
    path, chance = newest_segment(shard), seeded()
    *_, last, end = record_offsets(path)
    whole = path.read_bytes()
    header = decode_header(memoryview(whole)[last:])
    body_end = last + HEADER_BYTES + header.message_bytes + header.payload_bytes
    said = f"{path} at byte {last}: record 9 was written whole, and is not what was written"
    for at in {last, last + HEADER_BYTES, body_end - 1, *(chance.randrange(last, body_end) for _ in range(20))}:
        damaged = bytearray(whole)
        damaged[at] ^= 1 << chance.randrange(8)
        path.write_bytes(damaged)
        with pytest.raises(DamagedData, match=said), opened(shard.parent):
            pytest.fail(f"byte {at} was changed")
    # What follows the payload says that it is whole; the record is.
    for at in chance.sample(range(body_end, end), 5):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with opened(shard.parent) as (_, found):
            assert found.number == 9


def test_after_a_start_of_the_machine_a_damaged_last_record_is_cut_off_and_said_to_be_either(
    shard, monkeypatch, caplog
):
    path = newest_segment(shard)
    *_, last, _ = record_offsets(path)
    flip(path, last + HEADER_BYTES + 5)
    monkeypatch.setattr("ps_server.log.head.boot_id", lambda: "another")
    with opened(shard.parent) as (_, found):
        assert (found.number, found.promised) == (8, False)
    assert f"{path} at byte {last}; it was never finished, or damaged later: which, is unknown" in caplog.text
    # Nothing is left of it that the next start could take for damage.
    with opened(shard.parent) as (_, found):
        assert (found.number, found.promised) == (8, True)


def test_what_the_log_promises_depends_on_who_wrote_it_and_on_the_machine(shard, monkeypatch):
    with opened(shard.parent, sync=True) as (_, found):
        assert found.promised
    monkeypatch.setattr("ps_server.log.head.boot_id", lambda: "another")
    with opened(shard.parent) as (_, found):
        assert found.promised  # by fsync
    monkeypatch.setattr("ps_server.log.head.boot_id", lambda: "")
    with opened(shard.parent) as (_, found):
        assert not found.promised


def test_a_flipped_bit_in_the_head_is_found(shard):
    path, chance = shard / "log" / "head.json", seeded()
    whole = path.read_bytes()
    for at in chance.sample(range(len(whole)), 40):
        path.write_bytes(whole)
        flip(path, at, chance.randrange(8))
        with pytest.raises(DamagedData, match=str(path)), opened(shard.parent):
            pytest.fail(f"byte {at} was changed")


def flip(path: Path, at: int, bit: int = 0) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1 << bit
    path.write_bytes(data)


# Which torch


def test_a_replay_under_another_torch_is_warned_of_naming_both_versions(shard, monkeypatch, caplog):
    with opened(shard.parent):
        assert "torch" not in caplog.text
    monkeypatch.setattr("torch.__version__", "9.9.9")
    with opened(shard.parent) as (_, found):
        assert found.number == 9
    assert f"the last 3 records were applied with torch {VERSION} and are replayed with torch 9.9.9" in caplog.text
    assert json.loads(one(shard, "snapshots/*/manifest.json").read_bytes())["torch"] == VERSION
    # From now on these are the bits that were served.
    caplog.clear()
    with opened(shard.parent):
        assert "torch" not in caplog.text


def test_another_torch_is_not_spoken_of_where_nothing_is_replayed(shard, monkeypatch, caplog):
    write_snapshot(shard.parent)
    monkeypatch.setattr("torch.__version__", "9.9.9")
    with opened(shard.parent):
        assert "torch" not in caplog.text


@pytest.mark.parametrize(("pattern", "known"), [*zip(FILES, (4, 5), strict=True), ("log/head.json", 1)])
def test_a_file_of_another_format_is_refused_and_stays_as_it_is(shard, pattern, known):
    path = one(shard, pattern)
    body = load(path, known, dict, "")
    for other in (3 if known > 1 else 0, 99):
        path.write_bytes(before := seal(other, body))
        said = f"{path} has a format that this .* does not read; expected: format {known}; actual: format {other}"
        with pytest.raises(DamagedData, match=said), opened(shard.parent):
            pass
        assert path.read_bytes() == before


def test_after_a_start_of_the_machine_a_log_without_fsync_may_end_before_its_head(shard, monkeypatch, caplog):
    with opened(shard.parent, gently=True):
        pass
    path = newest_segment(shard)
    *_, last, end = record_offsets(path)
    with path.open("r+b") as file:
        os.pwrite(file.fileno(), bytes(end - last), last)
    monkeypatch.setattr("ps_server.log.head.boot_id", lambda: "another")
    with opened(shard.parent) as (_, found):
        assert (found.number, found.promised) == (8, False)
    assert "ends at record 8, and was longer before" in caplog.text
    assert "there is no --fsync: this may be what that took" in caplog.text


def test_what_a_copy_replaces_is_not_missed(shard):
    folder = DataFolder.open(shard.parent, 0)
    assert folder.identity.log
    assert folder.identity.snapshot == 6
    folder.begin_copy()
    assert (folder.identity.log, folder.identity.snapshot) == (False, 0)
    folder.belongs_to(9)
    folder.close()
    with opened(shard.parent) as (_, found):
        assert found.number == 0


def test_the_system_need_not_tell_when_the_machine_was_started(shard, monkeypatch):
    monkeypatch.setattr("ps_protocol.wire.shared_memory._BOOT_ID", shard / "missing")
    with opened(shard.parent):
        pass
    with opened(shard.parent) as (_, found):
        assert (found.number, found.promised) == (9, False)
