"""Files that are replaced in one step: the old content or the new one, for whom it is meant, and on the disk."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from ps_protocol.errors import StorageFull
from ps_protocol.files import PUBLIC_MODE, full_disk, replace_file, replacing


@pytest.fixture(autouse=True)
def _open_umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


def mode_of(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_a_file_is_made_and_replaced_for_its_user_alone(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for data in (b"first", b"", b"second"):
        replace_file(path, data)
        assert (path.read_bytes(), mode_of(path), list(tmp_path.iterdir())) == (data, 0o600, [path])


def test_a_public_file_is_as_open_as_the_umask_allows(tmp_path: Path) -> None:
    replace_file(tmp_path / "file", b"data", PUBLIC_MODE)
    assert mode_of(tmp_path / "file") == 0o644


def test_what_is_being_written_replaces_nothing_before_its_end(tmp_path: Path) -> None:
    path = tmp_path / "file"
    replace_file(path, b"old")
    with replacing(path) as file:
        file.write(b"new")
        file.flush()
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new"


def test_a_write_that_raises_leaves_the_old_content_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "file"
    replace_file(path, b"old")

    def fails() -> None:
        with replacing(path) as file:
            file.write(b"new")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    assert (path.read_bytes(), list(tmp_path.iterdir())) == (b"old", [path])


@pytest.mark.parametrize("durable", [True, False])
def test_a_durable_file_is_synced_before_it_is_renamed_and_its_folder_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, durable: bool
) -> None:
    done: list[str] = []
    for name in ("pwrite", "fsync", "rename"):
        real = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *given, name=name, real=real: (done.append(name), real(*given))[1])
    replace_file(tmp_path / "file", b"data", durable=durable)
    assert done == (["pwrite", "fsync", "rename", "fsync"] if durable else ["pwrite", "rename"])


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_and_an_exhausted_quota_are_typed_errors(number: int) -> None:
    said = f"no room: {os.strerror(number)}; shard: 1; .*remedy: free some"
    with pytest.raises(StorageFull, match=said), full_disk("no room", shard="1", remedy="free some"):
        raise OSError(number, os.strerror(number))


def test_other_errors_of_a_disk_pass() -> None:
    with pytest.raises(PermissionError), full_disk("no room", remedy="free some"):
        raise PermissionError
