"""A data directory belongs to one job at a time."""

import os
import subprocess
import sys

import pytest

from ps_protocol.errors import ConfigError
from ps_server.cli.launcher.job_folder import JobFolder
from ps_server.coordinator.persistence.journal import FILE_NAME


def test_it_is_made_and_knows_whether_a_job_was_there_before(tmp_path):
    folder = JobFolder(tmp_path / "new" / "folder")
    assert not folder.used_before
    os.close(folder.lock)
    (folder.path / FILE_NAME).touch()
    again = JobFolder(folder.path)
    assert again.used_before
    os.close(again.lock)


def test_a_second_job_is_refused_while_a_server_of_the_first_lives(tmp_path):
    folder = JobFolder(tmp_path)
    wait = [sys.executable, "-c", "import sys; sys.stdin.read()"]
    with subprocess.Popen(wait, stdin=subprocess.PIPE, pass_fds=[folder.lock]) as server:
        os.close(folder.lock)  # as when ps-run was killed
        with pytest.raises(ConfigError, match="in use by another ps-run") as refused:
            JobFolder(tmp_path, wait_seconds=0)
        assert str(tmp_path) in str(refused.value)
        server.communicate()
    os.close(JobFolder(tmp_path, wait_seconds=0).lock)


def test_the_end_of_the_last_server_is_waited_for(tmp_path):
    folder = JobFolder(tmp_path)
    asks = [sys.executable, "-c", "import os, select, sys; select.select([], [], [], 0.3)"]
    with subprocess.Popen(asks, pass_fds=[folder.lock]):
        os.close(folder.lock)
        os.close(JobFolder(tmp_path, wait_seconds=30).lock)


def test_a_place_that_cannot_be_a_folder_is_refused_by_name(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be written"):
        JobFolder(tmp_path / "file" / "folder")
