"""The folder of the socket for shared memory: of one process, gone with it, and removed for one that was killed."""

from __future__ import annotations

import os
import signal
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from ps_server.shard.transport import side_channels
from ps_server.shard.transport.side_channels import PREFIX, PrivateSocket
from tests.support.interpreters import run


@pytest.fixture(autouse=True)
def base(monkeypatch) -> Iterator[Path]:
    """A short path: a socket's has little room."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        monkeypatch.setattr(side_channels, "_BASES", (lambda: folder,))
        yield Path(folder)


def folders(base: Path) -> list[Path]:
    return sorted(base.glob(f"{PREFIX}*"))


def listening() -> PrivateSocket:
    found = PrivateSocket.listen()
    assert found
    return found


def test_it_can_be_connected_to_and_leaves_nothing(base):
    made = listening()
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(str(made.path))
    assert folders(base) == [made.path.parent]
    made.close()
    assert folders(base) == []


def test_for_other_users_it_may_be_connected_to_but_not_found(base):
    made = PrivateSocket.listen(for_others=True)
    assert made
    assert made.path.stat().st_mode & 0o777 == 0o666
    assert made.path.parent.stat().st_mode & 0o777 == 0o711
    made.close()


def test_a_folder_in_use_is_left_alone(base):
    first, second = listening(), listening()
    assert len(folders(base)) == 2
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(str(first.path))
    for each in (first, second):
        each.close()


KILLED = """
import os, sys
from ps_server.shard.transport import side_channels
side_channels._BASES = (lambda: sys.argv[1],)
made = side_channels.PrivateSocket.listen()
os.kill(os.getpid(), 9)
"""


def test_the_folder_of_a_process_that_was_killed_is_removed_by_the_next(base):
    assert run("-c", KILLED, str(base)).returncode == -signal.SIGKILL
    (left,) = folders(base)
    made = listening()
    assert folders(base) == [made.path.parent]
    assert made.path.parent != left
    made.close()


def test_what_is_not_ours_is_left_alone(base):
    link, other = base / f"{PREFIX}link", base / "other"
    other.mkdir()
    link.symlink_to(other)
    full = base / f"{PREFIX}full"
    full.mkdir()
    (full / "something").touch()
    listening().close()
    assert other.is_dir()
    assert link.is_symlink()
    assert (full / "something").exists()


def test_without_room_there_is_none(base, monkeypatch):
    monkeypatch.setattr(side_channels, "_BASES", (lambda: str(base / "missing"), lambda: str(base / ("x" * 200))))
    (base / ("x" * 200)).mkdir()
    assert PrivateSocket.listen() is None
    assert list((base / ("x" * 200)).iterdir()) == []


def test_the_second_place_is_used_where_the_first_has_no_room(base, monkeypatch):
    monkeypatch.setattr(side_channels, "_BASES", (lambda: os.fspath(base / "missing"), lambda: os.fspath(base)))
    made = listening()
    assert made.path.parent.parent == base
    made.close()
