"""Owns the coordinator's journal: rows in one SQLite file, of which each commit is on disk when it returns."""

from __future__ import annotations

import sqlite3
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from ps_protocol.errors import ConfigError, DamagedData, Unavailable
from ps_protocol.files import make_private_file, make_private_folder, open_private
from ps_protocol.logs import EventLogger
from ps_server.coordinator.persistence.lineage import WITNESS_NAME, Lineage, Witness, WitnessRecord, digest_of, sum_of

logger = EventLogger(__name__)

FILE_NAME = "coordinator.sqlite"

FORMAT = 6
"""Format of the rows; stored as SQLite's user_version. Files of another format are refused."""

CHECKPOINT_PAGES = 256
"""Pages of 4 KB at which the write-ahead log is copied to the main file, in which SQLite detects damage."""

_LINEAGE = "journal"

_SQLITE_ERRORS = (sqlite3.Error, UnicodeDecodeError)
"""The second is raised in place of the first where SQLite's message quotes damaged text."""

#: "psco"; SQLite stores it in the header of the file, where it identifies the program.
_APPLICATION_ID = 0x7073636F

_SCHEMA = f"""
BEGIN IMMEDIATE;
CREATE TABLE kept (key TEXT PRIMARY KEY, value BLOB NOT NULL, crc INTEGER NOT NULL) WITHOUT ROWID;
PRAGMA application_id = {_APPLICATION_ID};
PRAGMA user_version = {FORMAT};
COMMIT;
"""


class Journal:
    """The rows of one coordinator. The driver uses it, in the thread that opened it; one process has it open at a time.

    A write is atomic, and survives ``kill -9`` and loss of power: write-ahead log, synchronous=FULL. Replacing rows
    takes no more space. SQLite drops the end of a damaged write-ahead log without an error; so a journal counts its
    commits; the witness beside it and the marks of members reveal missing ones.
    """

    def __init__(self, path: Path, connection: sqlite3.Connection, rows: Mapping[str, bytes], loss: bool) -> None:
        """Use ``Journal.open`` instead. ``loss``: whether to accept missing commits."""
        self.path = path
        self._connection = connection
        self._witness = Witness(path.with_name(WITNESS_NAME))
        self._lineage = Lineage.decode(rows[_LINEAGE]) if _LINEAGE in rows else Lineage.new()
        self._digests = {key: digest_of(key, value) for key, value in rows.items() if key != _LINEAGE}
        self._begun = False
        self._accepts_loss = loss

    @classmethod
    def open(cls, folder: Path, *, accept_older: bool = False) -> Journal:
        """The journal in ``folder``; both are created if missing.

        ``accept_older``: continue although commits are missing. Raises ConfigError when the folder cannot be written
        to, another process has the journal open, or it has another format; DamagedData when the files are not a whole
        journal, or one that ends before its last commit. None of these changes the files.
        """
        path = folder / FILE_NAME
        try:
            noted = None if accept_older else Witness(folder / WITNESS_NAME).read()
            make_private_folder(folder)
            _check_there(path, noted)
            # SQLite's other files get the mode of this one.
            make_private_file(path)
            connection = sqlite3.connect(path, timeout=0, isolation_level=None)
        except (OSError, sqlite3.Error) as error:
            raise _cannot_write(path, error) from error
        try:
            _prepare(connection, path)
            with _write_ahead_log_kept(connection, path):
                rows = _read(connection, path)
                journal = cls(path, connection, rows, accept_older)
                journal._check(noted)
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        except _SQLITE_ERRORS as error:
            connection.close()
            raise _open_error(path, error) from error
        except BaseException:
            connection.close()
            raise
        return journal

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the files, with all rows in the main one. Repeatable."""
        with suppress(sqlite3.Error):
            self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        self._connection.close()
        with suppress(OSError):
            self._witness.close()

    def read(self) -> dict[str, bytes]:
        """All rows. Raises DamagedData for a row with a wrong checksum."""
        try:
            rows = _read(self._connection, self.path)
        except _SQLITE_ERRORS as error:
            raise _open_error(self.path, error) from error
        rows.pop(_LINEAGE, None)
        return rows

    def write(self, rows: Mapping[str, bytes | None]) -> None:
        """Replace these rows, remove those that are None, and return when that is on disk.

        Raises Unavailable, without any change, if they cannot be written; the call may be retried.
        """
        lineage = self._lineage if self._begun else self._lineage.begin(accepts_loss=self._accepts_loss)
        digests = {key: digest_of(key, value) for key, value in rows.items() if value is not None}
        replaced = {key: self._digests[key] for key in rows.keys() & self._digests.keys()}
        lineage = lineage.next(lineage.digest + sum_of(digests) - sum_of(replaced))
        gone = [(key,) for key, value in rows.items() if value is None]
        kept = [(key, value, _checksum(key, value)) for key, value in rows.items() if value is not None]
        about = lineage.encode()
        kept.append((_LINEAGE, about, _checksum(_LINEAGE, about)))
        try:
            self._connection.execute("BEGIN IMMEDIATE")
            self._connection.executemany("DELETE FROM kept WHERE key = ?", gone)
            self._connection.executemany("INSERT OR REPLACE INTO kept VALUES (?, ?, ?)", kept)
            self._connection.execute("COMMIT")
        except _SQLITE_ERRORS as error:
            # A full disk may have ended the transaction already.
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
            raise Unavailable(
                f"the coordinator cannot write its journal {self.path}: {error}",
                remedy="make room on its disk; it continues by itself",
            ) from error
        first, self._begun = not self._begun, True
        self._lineage = lineage
        self._digests.update(digests)
        for (key,) in gone:
            self._digests.pop(key, None)
        self._note(first)

    @property
    def mark(self) -> bytes:
        """The mark of the last commit, for members; opaque to them."""
        return self._lineage.mark()

    def check_mark(self, mark: bytes) -> None:
        """Raises DamagedData when ``mark``, which a member received, proves that commits are missing here.

        A mark of another journal, or with a wrong signature, proves nothing.
        """
        known = self._lineage.read_mark(mark) if mark else None
        if known is not None and self._lineage.lacks(known) and not self._accepts_loss:
            raise _older(self.path, self._lineage.commit, known.number, "a member received the mark of commit")

    def _check(self, noted: WitnessRecord | None) -> None:
        """Raises DamagedData if rows or the last commits are missing."""
        if self._lineage.digest != sum_of(self._digests):
            raise _damaged(self.path, "a row is missing, or one is too many")
        if noted is None:
            if self._lineage.commit and not self._accepts_loss:
                logger.warning(
                    "recovery.cut", "%s is missing, which knows the last commit: made again", self._witness.path
                )
            return
        if noted.journal != self._lineage.journal:
            raise _damaged(self.path, f"another journal than the one that {self._witness.path} belongs to")
        if self._lineage.lacks(noted.commit):
            text = f"{self._witness.path.name} names commit"
            raise _older(self.path, self._lineage.commit, noted.commit.number, text)

    def _note(self, first: bool) -> None:
        """Note the last commit in the witness file. If that fails, only members can detect a loss."""
        witnessed = WitnessRecord(self._lineage.journal, self._lineage.newest)
        try:
            if first and self._accepts_loss:
                self._witness.replace(witnessed)
            else:
                self._witness.note(witnessed)
        except OSError as error:
            logger.warning("journal.failed", "cannot note the last commit in %s: %s", self._witness.path, error)


def _read(connection: sqlite3.Connection, path: Path) -> dict[str, bytes]:
    rows = {}
    for key, value, crc in connection.execute("SELECT key, value, crc FROM kept"):
        if crc != _checksum(key, value):
            raise _damaged(path, f"checksum of row '{key}'")
        rows[key] = value
    if rows and _LINEAGE not in rows:
        raise _damaged(path, f"row '{_LINEAGE}' is missing")
    try:
        Lineage.decode(rows[_LINEAGE]) if _LINEAGE in rows else None
    except (ValueError, LookupError, TypeError) as error:
        raise _damaged(path, f"row '{_LINEAGE}' cannot be read") from error
    return rows


def _check_there(path: Path, noted: WitnessRecord | None) -> None:
    """Check before SQLite opens the files: it would remove a write-ahead log without a main file, and start empty."""
    size = path.stat().st_size if path.exists() else 0
    if size == 0 and (noted is not None or _write_ahead_log(path)):
        raise _damaged(path, f"{size} bytes, with what belongs to it beside it")


def _write_ahead_log(path: Path) -> bytes:
    file = path.with_name(path.name + "-wal")
    return file.read_bytes() if file.exists() else b""


@contextmanager
def _write_ahead_log_kept(connection: sqlite3.Connection, path: Path) -> Iterator[None]:
    """If the journal is refused, keep its write-ahead log unchanged, which SQLite removes when it closes."""
    found = _write_ahead_log(path)
    try:
        yield
    except DamagedData:
        connection.close()
        if found:
            with open_private(path.with_name(path.name + "-wal")) as file:
                file.write(found)
        raise


def _prepare(connection: sqlite3.Connection, path: Path) -> None:
    """Lock, check, and set up a new journal. Nothing is written before all checks have passed."""
    connection.execute("PRAGMA locking_mode = EXCLUSIVE")
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    application = connection.execute("PRAGMA application_id").fetchone()[0]
    empty = connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0] == 0
    if not (empty and version == application == 0):
        if application != _APPLICATION_ID:
            raise _damaged(path, f"a SQLite file of another program, application_id {application}")
        if version != FORMAT:
            raise ConfigError(
                f"the journal {path} has a format that this version of torch-ps does not read",
                expected=f"format {FORMAT}",
                actual=f"format {version}",
                remedy="start the version that wrote it, or give another --data-dir",
            )
        if (found := connection.execute("PRAGMA quick_check(1)").fetchone()[0]) != "ok":
            raise _damaged(path, found)
        empty = False
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute(f"PRAGMA wal_autocheckpoint = {CHECKPOINT_PAGES}")
    if empty:
        connection.executescript(_SCHEMA)
    # A write without changes takes the lock of a file that was only read so far, or fails.
    connection.execute("BEGIN EXCLUSIVE")
    connection.execute("COMMIT")


def _checksum(key: str, value: bytes) -> int:
    return zlib.crc32(value, zlib.crc32(key.encode()))


def _open_error(path: Path, error: sqlite3.Error | UnicodeDecodeError) -> ConfigError | DamagedData:
    if isinstance(error, UnicodeDecodeError):
        return _damaged(path, str(error))
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
        remedy=f"bring back the newest copy of the folder {path.parent}, or begin a new job in another --data-dir; "
        "--restore takes the values of a checkpoint",
    )


def _older(path: Path, commit: int, known: int, who: str) -> DamagedData:
    return DamagedData(
        f"the journal {path} is older than what was on disk before: it lacks {max(1, known - commit)} or more commits",
        expected=f"commit {known}: {who} {known}",
        actual=f"ends with commit {commit}"
        if commit < known
        else f"has a different history, and ends with commit {commit}",
        remedy=f"its write-ahead log {path.name}-wal was damaged, cut or removed, or an older copy was brought back: "
        f"bring back the newest copy of the folder {path.parent}; or begin a new job in another --data-dir, where "
        "--restore takes a checkpoint's values; or give --accept-older-journal, and what is missing is forgotten",
    )
