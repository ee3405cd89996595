"""The file: what is refused, what survives, and how large it grows."""

import os
import random
import resource
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from ps_protocol.errors import ConfigError, DamagedData, PsError, Unavailable
from ps_server.coordinator.persistence.journal import FILE_NAME, FORMAT, Journal

ROWS: dict[str, bytes | None] = {"a": b"first", "b": b"", "map/é": bytes(range(256))}


def written(folder: Path) -> Path:
    with Journal.open(folder) as journal:
        journal.write(ROWS)
        return journal.path


@contextmanager
def changed(path: Path) -> Iterator[sqlite3.Connection]:
    connection = sqlite3.connect(path)
    with connection:
        yield connection
    connection.close()


def test_rows_are_there_again_after_closing_replacing_and_removing(tmp_path: Path) -> None:
    with Journal.open(tmp_path / "new" / "folder") as journal:
        assert journal.read() == {}
        journal.write(ROWS)
        journal.write({"a": b"second", "b": None, "never": None})
    with Journal.open(tmp_path / "new" / "folder") as journal:
        assert journal.read() == {"a": b"second", "map/é": bytes(range(256))}


@pytest.mark.parametrize("moment", ["after the last write", "in the middle of one"])
def test_what_was_written_survives_a_kill_and_half_a_write_does_not(tmp_path: Path, moment: str) -> None:
    script = (
        "import os, pathlib, signal, sys\n"
        "from ps_server.coordinator.persistence.journal import Journal\n"
        "journal = Journal.open(pathlib.Path(sys.argv[1]))\n"
        "journal.write({'a': b'1', 'b': b'1'})\n"
        "if sys.argv[2] == 'in the middle of one':\n"
        "    journal._connection.execute('BEGIN')\n"
        "    journal._connection.execute('DELETE FROM kept WHERE key = ?', ('a',))\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    child = subprocess.run([sys.executable, "-c", script, str(tmp_path), moment], timeout=60)
    assert child.returncode == -9
    with Journal.open(tmp_path) as journal:
        assert journal.read() == {"a": b"1", "b": b"1"}


def test_an_empty_file_that_a_kill_left_behind_is_a_new_journal(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).touch()
    written(tmp_path)


def of_format(version: int, path: Path) -> None:
    with changed(path) as connection:
        connection.execute(f"PRAGMA user_version = {version}")


def of_another_program(path: Path) -> None:
    path.unlink()
    with changed(path) as connection:
        connection.execute("CREATE TABLE notes (text)")


def no_database(path: Path) -> None:
    path.write_bytes(b"not a database, but a long enough text to be taken for one" * 100)


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-4096])


def scribbled_over(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[4096 + 8 : 4096 + 64] = random.Random(7).randbytes(56)
    path.write_bytes(data)


def one_bit_flipped(path: Path) -> None:
    data = path.read_bytes()
    assert data.count(b"first") == 1
    path.write_bytes(data.replace(b"first", b"fIrst"))


@pytest.mark.parametrize(
    ("harm", "error", "named"),
    [
        (partial(of_format, FORMAT + 1), ConfigError, f"expected: format {FORMAT}; actual: format {FORMAT + 1}"),
        (partial(of_format, FORMAT - 1), ConfigError, f"expected: format {FORMAT}; actual: format {FORMAT - 1}"),
        (of_another_program, DamagedData, "another program"),
        (no_database, DamagedData, "not a database"),
        (cut_short, DamagedData, "not a whole journal"),
        (scribbled_over, DamagedData, "not a whole journal"),
        (one_bit_flipped, DamagedData, "checksum of row 'a'"),
    ],
)
def test_a_file_that_is_not_ours_or_not_whole_is_one_error_with_a_remedy_and_stays_as_it_is(
    tmp_path: Path, harm: Callable[[Path], None], error: type[PsError], named: str
) -> None:
    path = written(tmp_path)
    harm(path)
    before = path.read_bytes()
    with pytest.raises(error, match=named) as caught, Journal.open(tmp_path) as journal:
        journal.read()
    assert str(path) in str(caught.value)
    assert caught.value.remedy
    assert path.read_bytes() == before


def test_a_journal_in_use_is_refused_naming_the_file_and_left_to_its_owner(tmp_path: Path) -> None:
    with Journal.open(tmp_path) as owner:
        script = (
            "import pathlib, sys\n"
            "from ps_server.coordinator.persistence.journal import Journal\n"
            "Journal.open(pathlib.Path(sys.argv[1]))\n"
        )
        command = [sys.executable, "-c", script, str(tmp_path)]
        child = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert f"{owner.path} is in use by another process" in child.stderr
        with pytest.raises(ConfigError, match=r"in use by another process.*another --data-dir"):
            Journal.open(tmp_path)
        owner.write(ROWS)
    assert written(tmp_path)


def unwritable(tmp_path: Path) -> Path:
    folder = tmp_path / "sealed"
    folder.mkdir(mode=0o500)
    # Permissions do not bind the superuser; nobody makes files in /proc.
    return Path("/proc/self/task") if os.access(folder, os.W_OK) else folder


def test_a_folder_that_cannot_be_written_to_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot keep a journal.*this user may write to"):
        Journal.open(unwritable(tmp_path))
    file = tmp_path / "file"
    file.write_text("kept")
    with pytest.raises(ConfigError, match="cannot keep a journal"):
        Journal.open(file)
    assert file.read_text() == "kept"


@contextmanager
def no_room_above(nbytes: int) -> Iterator[None]:
    """No file of this process may grow above ``nbytes``."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_disk_that_refuses_leaves_the_rows_as_they_were_until_it_has_room_again(tmp_path: Path) -> None:
    with Journal.open(tmp_path) as journal:
        journal.write(ROWS)
        before = journal.read()
        room = max(file.stat().st_size for file in tmp_path.iterdir())
        with no_room_above(room), pytest.raises(Unavailable, match=r"cannot write its journal.*make room"):
            journal.write({"a": b"x" * 100_000, "b": None})
        assert journal.read() == before
        journal.write({"a": b"x" * 100_000, "b": None})
    with Journal.open(tmp_path) as journal:
        assert journal.read()["a"] == b"x" * 100_000


def test_rows_written_again_and_again_take_no_more_room(tmp_path: Path) -> None:
    with Journal.open(tmp_path) as journal:
        for number in range(5000):
            journal.write({f"place/worker/{number % 7}": b"%d" % number * 40, f"place/worker/{(number + 1) % 7}": None})
        assert sum(file.stat().st_size for file in tmp_path.iterdir()) < 6 << 20
    assert journal.path.stat().st_size < 64 << 10
