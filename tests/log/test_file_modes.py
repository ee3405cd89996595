"""What servers keep on disk is for their own user: folders 0700, files 0600."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ps_server.checkpoint.directory import begin
from ps_server.checkpoint.files import make_folder, write_file
from ps_server.cli.launcher.job_folder import JobFolder
from ps_server.coordinator.persistence.journal import Journal
from ps_server.log import segments
from ps_server.log.folder import DataFolder
from tests.log.support import layout_of, write_log, write_snapshot


@pytest.fixture(autouse=True)
def open_umask(monkeypatch):
    monkeypatch.setattr(segments, "SEGMENT_BYTES", 1 << 14)
    before = os.umask(0o022)
    yield
    os.umask(before)


def modes(root: Path) -> dict[str, int]:
    """The modes of all below ``root`` that are not as they should be."""
    wanted = {path: 0o700 if path.is_dir() else 0o600 for path in [root, *root.rglob("*")]}
    return {str(path): path.stat().st_mode & 0o777 for path in wanted if path.stat().st_mode & 0o777 != wanted[path]}


def test_a_shards_data_directory_with_log_and_snapshot_is_for_its_user_alone(tmp_path):
    root = tmp_path / "new" / "data"
    write_log(root, layout_of((3, 2)), 3)
    write_snapshot(root)
    write_snapshot(root)  # now with a spare file
    folder = DataFolder.open(root, 0)
    folder.begin_copy()
    folder.close()
    assert modes(tmp_path / "new") == {}


def test_a_journal_and_a_job_folder_are_for_their_user_alone(tmp_path):
    folder = JobFolder(tmp_path / "job")
    with Journal.open(tmp_path / "job") as journal:
        journal.write({"key": b"value"})
        assert modes(tmp_path / "job") == {}
    os.close(folder.lock)


@pytest.mark.parametrize(("group", "folder_mode", "file_mode"), [(0o755, 0o750, 0o640), (0o700, 0o700, 0o600)])
def test_a_checkpoint_is_open_to_the_group_where_its_directory_is_and_to_nobody_else(
    tmp_path, group, folder_mode, file_mode
):
    tmp_path.chmod(group)
    folder = begin(tmp_path)
    make_folder(folder / "model")
    write_file(folder / "model" / "file", b"data")
    found = [path.stat().st_mode & 0o777 for path in (folder, folder / "model", folder / "model" / "file")]
    assert found == [folder_mode, folder_mode, file_mode]


def test_a_checkpoint_directory_that_is_made_is_for_its_user_alone(tmp_path):
    tmp_path.chmod(0o700)
    folder = begin(tmp_path / "new")
    assert modes(folder.parent) == {}
