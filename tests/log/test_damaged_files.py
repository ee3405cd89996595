"""Every file of a data directory that is read back is believed only as it was written; older ones are still read."""

from __future__ import annotations

import json
import shutil
import tarfile
from pathlib import Path

import pytest

from ps_protocol.errors import DamagedData
from ps_server.log import durable
from tests.log.support import go_on, layout_of, opened, seeded, served_by_version, write_log, write_snapshot

SMALL = ((3, 2), (5,))
FILES = ("shard.json", "snapshots/*/manifest.json")


@pytest.fixture(autouse=True)
def small_segments(monkeypatch):
    monkeypatch.setattr(durable, "SEGMENT_BYTES", 1 << 14)


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


# Before the files had checksums


def test_a_directory_as_the_first_formats_were_written_is_read_and_gets_checksums(tmp_path):
    with tarfile.open(Path(__file__).with_name("directory_of_format_1.tar.xz")) as archive:
        archive.extractall(tmp_path, filter="data")
    shard, layout = tmp_path / "shard-0", layout_of(*SMALL)
    with opened(tmp_path) as (_, found):
        assert bytes(found.models["model"].replica.region.bytes) == served_by_version(layout, 7)[7]
    write_snapshot(tmp_path)
    for pattern in FILES:
        assert one(shard, pattern).read_bytes().startswith(b'{"checksum": "')
    go_on(tmp_path, layout, 8, 9)
    with opened(tmp_path) as (_, found):
        assert bytes(found.models["model"].replica.region.bytes) == served_by_version(layout, 9)[9]


@pytest.mark.parametrize("pattern", FILES)
def test_a_file_that_lost_its_checksum_is_not_taken_for_an_old_one(shard, pattern):
    path = one(shard, pattern)
    body = json.loads(path.read_bytes())
    path.write_text(json.dumps({**body, "format": 1}))
    with pytest.raises(DamagedData, match=f"{path}.*checksum"), opened(shard.parent):
        pass
    del body["checksum"]
    path.write_text(json.dumps(body))
    with pytest.raises(DamagedData, match=f"{path}.*checksum"), opened(shard.parent):
        pass
