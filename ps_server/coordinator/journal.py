"""Owns the coordinator's journal: rows in one SQLite file, of which each commit is on disk when it returns."""

from __future__ import annotations

import sqlite3
import zlib
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from ps_protocol.errors import ConfigError, DamagedData, Unavailable
from ps_server.private_files import make_private_file, make_private_folder

FILE_NAME = "coordinator.sqlite"

FORMAT = 1
"""Version of what the rows mean; kept as SQLite's user_version. An older program refuses a newer file."""

#: "psco"; SQLite keeps it in the file's header and tells by it whose the file is.
_APPLICATION_ID = 0x7073636F

_SCHEMA = f"""
BEGIN IMMEDIATE;
CREATE TABLE kept (key TEXT PRIMARY KEY, value BLOB NOT NULL, crc INTEGER NOT NULL) WITHOUT ROWID;
PRAGMA application_id = {_APPLICATION_ID};
PRAGMA user_version = {FORMAT};
COMMIT;
"""


class Journal:
    """Used by the driver, from the thread that opened it. One process at a time has it open.

    A write is whole or not at all, and survives ``kill -9`` and loss of power: write-ahead log, synchronous=FULL.
    Rows that are replaced take no new room, and the write-ahead log is reused from about 4 MB on.
    """

    def __init__(self, path: Path, connection: sqlite3.Connection) -> None:
        """``Journal.open`` is the way in."""
        self.path = path
        self._connection = connection

    @classmethod
    def open(cls, folder: Path) -> Journal:
        """The journal in ``folder``; both are made where they are missing.

        Raises ConfigError when the folder cannot be written to, another process has the journal open, or it is of a
        newer program; DamagedData when the file is not a whole journal. None of these changes the file.
        """
        path = folder / FILE_NAME
        try:
            make_private_folder(folder)
            # SQLite gives its other files the mode of this one.
            make_private_file(path)
            connection = sqlite3.connect(path, timeout=0, isolation_level=None)
        except (OSError, sqlite3.Error) as error:
            raise _cannot_write(path, error) from error
        try:
            _prepare(connection, path)
        except sqlite3.Error as error:
            connection.close()
            raise _open_error(path, error) from error
        except BaseException:
            connection.close()
            raise
        return cls(path, connection)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let the file go. Repeatable."""
        self._connection.close()

    def read(self) -> dict[str, bytes]:
        """All rows. Raises DamagedData for one that is not what was written."""
        rows = {}
        try:
            for key, value, crc in self._connection.execute("SELECT key, value, crc FROM kept"):
                if crc != _checksum(key, value):
                    raise _damaged(self.path, f"checksum of row '{key}'")
                rows[key] = value
        except sqlite3.Error as error:
            raise _open_error(self.path, error) from error
        return rows

    def write(self, rows: Mapping[str, bytes | None]) -> None:
        """Replace these rows, remove those that are None, and return when that is on disk.

        Raises Unavailable, with nothing changed, when it cannot be written; that may be tried again.
        """
        gone = [(key,) for key, value in rows.items() if value is None]
        kept = [(key, value, _checksum(key, value)) for key, value in rows.items() if value is not None]
        try:
            self._connection.execute("BEGIN IMMEDIATE")
            self._connection.executemany("DELETE FROM kept WHERE key = ?", gone)
            self._connection.executemany("INSERT OR REPLACE INTO kept VALUES (?, ?, ?)", kept)
            self._connection.execute("COMMIT")
        except sqlite3.Error as error:
            # A full disk may have ended the transaction already.
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
            raise Unavailable(
                f"the coordinator cannot write its journal {self.path}: {error}",
                remedy="make room on its disk; it goes on by itself",
            ) from error


def _prepare(connection: sqlite3.Connection, path: Path) -> None:
    """Lock, check, and where it is new, set up. The order matters: nothing is written before all checks have passed."""
    connection.execute("PRAGMA locking_mode = EXCLUSIVE")
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    application = connection.execute("PRAGMA application_id").fetchone()[0]
    empty = connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0] == 0
    if not (empty and version == application == 0):
        if application != _APPLICATION_ID:
            raise _damaged(path, f"a SQLite file of another program, application_id {application}")
        if version > FORMAT:
            raise ConfigError(
                f"the journal {path} was written by a newer torch-ps",
                expected=f"format {FORMAT} or older",
                actual=f"format {version}",
                remedy="start the newer torch-ps, or give another --data-dir",
            )
        if (found := connection.execute("PRAGMA quick_check(1)").fetchone()[0]) != "ok":
            raise _damaged(path, found)
        empty = False
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")
    if empty:
        connection.executescript(_SCHEMA)
    # A write that changes nothing takes the lock of a file that was only read so far, and shows whether it can be had.
    connection.execute("BEGIN EXCLUSIVE")
    connection.execute("COMMIT")


def _checksum(key: str, value: bytes) -> int:
    return zlib.crc32(value, zlib.crc32(key.encode()))


def _open_error(path: Path, error: sqlite3.Error) -> ConfigError | DamagedData:
    # The low byte is the primary code; the rest refines it.
    match getattr(error, "sqlite_errorcode", 0) & 0xFF:
        case sqlite3.SQLITE_BUSY | sqlite3.SQLITE_LOCKED:
            return ConfigError(
                f"the journal {path} is in use by another process",
                remedy="end the other coordinator, or give another --data-dir",
            )
        case sqlite3.SQLITE_CORRUPT | sqlite3.SQLITE_NOTADB | sqlite3.SQLITE_ERROR:
            return _damaged(path, str(error))
        case _:
            return _cannot_write(path, error)


def _cannot_write(path: Path, error: Exception) -> ConfigError:
    return ConfigError(
        f"cannot keep a journal at {path}: {error}",
        remedy="give as --data-dir a folder that this user may write to",
    )


def _damaged(path: Path, actual: str) -> DamagedData:
    return DamagedData(
        f"{path} is not a whole journal of a coordinator",
        actual=actual,
        remedy="bring back a copy of the file, or move it away and begin a new job",
    )
