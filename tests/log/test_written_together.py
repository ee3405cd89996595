"""Records that are written together: one wait for the disk, and what a loss of power may leave of them."""

from __future__ import annotations

import errno
import os

import pytest

from ps_protocol.errors import DamagedData
from ps_server.log import durable
from ps_server.log import segments as segment_files
from ps_server.log.record import HEADER_BYTES, decode_header
from tests.log.support import beginning, layout_of, opened, segments, served_by_version, update

LAYOUT = layout_of((3, 2), (5,))


def write(root, *groups, sync=True):
    """A log of the updates of ``groups`` of versions, each written together."""
    with opened(root, sync=sync) as (log, _):
        for entry in beginning(LAYOUT):
            log.append(entry)
        for group in groups:
            log.append_all([update(LAYOUT, version) for version in group])


def offsets(path):
    data, found = memoryview(path.read_bytes()), [0]
    while (header := decode_header(data[found[-1] :])) is not None:
        found.append(found[-1] + header.record_bytes)
    return found


def lose(path, at):
    """A block of the record at ``at`` did not come to the disk."""
    with path.open("r+b") as file:
        os.pwrite(file.fileno(), bytes(32), at + HEADER_BYTES + 8)


def number_in(root):
    with opened(root) as (_, found):
        return found.number


def test_the_disk_is_waited_for_once_and_every_record_comes_back(tmp_path, monkeypatch):
    waits, fdatasync = [], os.fdatasync
    monkeypatch.setattr(os, "fdatasync", lambda descriptor: waits.append(descriptor) or fdatasync(descriptor))
    with opened(tmp_path, sync=True) as (log, _):
        for entry in beginning(LAYOUT):
            log.append(entry)
        told, before = [], len(waits)
        log.on_append = lambda: told.append(log.whole)
        log.append_all([update(LAYOUT, version) for version in (1, 2, 3)])
        assert (log.number, log.whole, len(waits) - before, told) == (5, 5, 1, [5])
    with opened(tmp_path) as (_, found):
        model = found.models["model"]
        assert (found.number, model.tracker.version) == (5, 3)
        assert bytes(model.replica.region.bytes) == served_by_version(LAYOUT, 3)[3]


def test_records_that_do_not_fit_into_a_segment_together_go_on_in_the_next(tmp_path, monkeypatch):
    monkeypatch.setattr(segment_files, "SEGMENT_BYTES", 1 << 10)
    write(tmp_path, range(1, 20))
    assert len(segments(tmp_path)) > 1
    with opened(tmp_path) as (_, found):
        assert bytes(found.models["model"].replica.region.bytes) == served_by_version(LAYOUT, 19)[19]


def test_after_a_loss_of_power_none_of_them_counts_from_the_first_that_is_not_whole(tmp_path, monkeypatch, caplog):
    write(tmp_path, (1,), (2, 3, 4))
    (path,) = segments(tmp_path)
    lose(path, offsets(path)[4])  # of version 3
    with pytest.raises(DamagedData, match="record 5"):  # the machine ran on: that is no torn end
        number_in(tmp_path)
    monkeypatch.setattr("ps_server.log.head.boot_id", lambda: "another")
    assert number_in(tmp_path) == 4
    assert "record 5 is not whole and is cut off" in caplog.text
    # Nothing is left of those behind it that the next start could take for damage, or for records.
    assert number_in(tmp_path) == 4
    with opened(tmp_path, sync=True) as (log, found):
        log.append(update(LAYOUT, found.models["model"].tracker.version + 1))
    with opened(tmp_path) as (_, found):
        assert bytes(found.models["model"].replica.region.bytes) == served_by_version(LAYOUT, 3)[3]


def test_a_record_before_them_that_is_damaged_is_damage_after_a_loss_of_power_too(tmp_path, monkeypatch):
    write(tmp_path, (1,), (2, 3, 4))
    (path,) = segments(tmp_path)
    lose(path, offsets(path)[2])  # of version 1, which was on the disk before the others were written
    monkeypatch.setattr("ps_server.log.head.boot_id", lambda: "another")
    with pytest.raises(DamagedData, match=r"record 3 is damaged, and record \d follows"):
        number_in(tmp_path)


def test_where_they_cannot_be_written_none_counts_and_the_next_takes_their_place(tmp_path, monkeypatch):
    write_at = durable.write_at

    def fails(descriptor, pieces, offset):
        write_at(descriptor, pieces[:1], offset)
        raise OSError(errno.EIO, "Input/output error")

    with opened(tmp_path, sync=True) as (log, _):
        for entry in beginning(LAYOUT):
            log.append(entry)
        monkeypatch.setattr(durable, "write_at", fails)
        with pytest.raises(OSError, match="Input/output"):
            log.append_all([update(LAYOUT, version) for version in (1, 2)])
        assert (log.number, log.whole) == (2, 2)
        monkeypatch.setattr(durable, "write_at", write_at)
        log.append_all([update(LAYOUT, version) for version in (1, 2)])
    with opened(tmp_path) as (_, found):
        assert bytes(found.models["model"].replica.region.bytes) == served_by_version(LAYOUT, 2)[2]
