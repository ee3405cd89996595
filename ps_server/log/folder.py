"""Owns the data directory of one shard: its lock, its identity, and the folders in it."""

from __future__ import annotations

import fcntl
import os
import shutil
import threading
import uuid
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

from ps_protocol.errors import ConfigError, DamagedData
from ps_protocol.files import FILE_MODE, FOLDER_MODE, full_disk, make_private_folder, replace_file, sync
from ps_protocol.logs import EventLogger
from ps_protocol.records import fields_of, from_plain
from ps_protocol.sealed import load, seal

logger = EventLogger(__name__)

FORMAT = 4
"""Of the whole directory."""

_IDENTITY = "shard.json"

#: See Identity.copy.
SETTING_ASIDE, COPYING = "setting aside", "copying"


@dataclass(frozen=True, slots=True)
class FolderIdentity:
    """The content of ``shard.json``: whose directory it is, and what must be in it."""

    shard: int
    #: Rises each time a process opens the directory.
    life: int = 0
    #: The incarnation that wrote here last; 0 before the first.
    incarnation: int = 0
    #: Random name of this directory, for as long as it exists.
    directory: str = ""
    #: Progress of a copy of another directory's state: SETTING_ASIDE, COPYING, or empty when none is under way.
    copy: str = ""
    #: A log has been begun here, so there is one.
    log: bool = False
    #: The newest snapshot, named by the record at which it was whole; 0: there is none.
    snapshot: int = 0


class DataFolder:
    """The data directory of one shard. One process owns its lock, from ``open`` to ``close`` or to its own end."""

    def __init__(self, path: Path, lock: int, identity: FolderIdentity) -> None:
        self.path = path
        self._lock = lock
        #: The log's writer and the one of snapshots note what they have made.
        self._noting = threading.Lock()
        self.identity = identity

    @classmethod
    def open(cls, root: Path, shard: int) -> Self:
        """The folder of shard ``shard`` in ``root``, made where it is missing.

        Raises ConfigError when it cannot be written or another process uses it, DamagedData when it is of another shard
        of a newer version, or damaged.
        """
        path = root / f"shard-{shard}"
        make_writable(path)
        lock = os.open(path / "LOCK", os.O_RDWR | os.O_CREAT, FILE_MODE)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(lock)
            raise ConfigError(
                f"the data directory {path} is in use by another process",
                remedy=f"stop the other ps-server --shard {shard}, or give this one another --data-dir",
            ) from error
        try:
            known = _read(path / _IDENTITY, shard)
            known = replace(known, life=known.life + 1, directory=known.directory or uuid.uuid4().hex)
            folder = cls(path, lock, known)
            folder._end_copy()
            folder._write()
        except BaseException:
            os.close(lock)
            raise
        return folder

    @property
    def _aside(self) -> Path:
        return self.path / "set-aside"

    @property
    def log(self) -> Path:
        """Folder of the segments."""
        return self.path / "log"

    @property
    def snapshots(self) -> Path:
        """Folder of the snapshots."""
        return self.path / "snapshots"

    def belongs_to(self, incarnation: int) -> None:
        """Note that ``incarnation`` writes here from now on. Raises OSError."""
        self._note(incarnation=incarnation, copy="")

    def holds_log(self) -> None:
        """Note that a log must be here from now on. Raises OSError."""
        self._note(log=True)

    def holds_snapshot(self, through: int) -> None:
        """Note that this snapshot, or a newer one, must be here from now on. Raises OSError."""
        self._note(snapshot=through)

    def _note(self, **fields: Any) -> None:
        with self._noting:
            noted = replace(self.identity, **fields)
            if noted != self.identity:
                self.identity = noted
                self._write()

    def begin_copy(self) -> None:
        """Set the content aside: a copy of another directory follows, which is whole when ``belongs_to`` is called.

        It replaces what was set aside before. Raises OSError.
        """
        holds = [*self.log.glob("[0-9]*.log"), *self.snapshots.glob("[0-9]*")]
        if holds and not self.identity.copy:
            shutil.rmtree(self._aside, ignore_errors=True)
            self._aside.mkdir(FOLDER_MODE)
            self.identity = replace(self.identity, copy=SETTING_ASIDE)
            self._write()
        self._end_copy()
        self.identity = replace(self.identity, incarnation=0, copy=COPYING)
        self._write()

    def _end_copy(self) -> None:
        """Empty the directory after a copy that did not complete."""
        parts = [part for part in (self.log, self.snapshots) if part.exists()]
        if self.identity.copy == SETTING_ASIDE:
            for part in parts:
                part.rename(self._aside / part.name)
            sync(self.path)
            logger.warning("recovery.cut", "what %s held is set aside in %s", self.path, self._aside)
        elif self.identity.copy == COPYING:
            for part in parts:
                shutil.rmtree(part)
        if self.identity.copy:
            self.identity = replace(self.identity, incarnation=0, copy="", log=False, snapshot=0)

    def close(self) -> None:
        """Let other processes use it. Repeatable."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _write(self) -> None:
        replace_file(self.path / _IDENTITY, seal(FORMAT, fields_of(self.identity)))


def log_room(shard: int, folder: Path) -> AbstractContextManager[None]:
    """A context that raises StorageFull when the disk is full; in it, files are written to ``folder``."""
    return full_disk(
        f"shard {shard} has no room for its log",
        shard=str(shard),
        expected="free space in the shard's data directory",
        actual=str(folder),
        remedy="free some space; pushes are accepted again as soon as there is room",
    )


def make_writable(folder: Path) -> None:
    """Make ``folder`` where it is missing, and check that files can be made there. Raises ConfigError."""
    try:
        make_private_folder(folder)
        probe = folder / ".writable"
        probe.touch(FILE_MODE)
        probe.unlink()
    except OSError as error:
        raise ConfigError(
            f"the data directory {folder} cannot be written: {error.strerror}",
            remedy="give --data-dir a folder this process may write",
        ) from error


def _read(path: Path, shard: int) -> FolderIdentity:
    """Raises DamagedData."""
    if not path.exists():
        _check_unused(path)
        return FolderIdentity(shard)
    found = load(path, FORMAT, partial(from_plain, FolderIdentity), "restore the data directory from a copy")
    if found.shard != shard:
        raise DamagedData(
            f"{path.parent} holds the data of another shard",
            shard=str(shard),
            expected=f"shard {shard}",
            actual=f"shard {found.shard}",
            remedy="give each shard the directory it wrote; nothing was changed",
        )
    return found


def _check_unused(identity: Path) -> None:
    """Raises DamagedData for a folder without its identity in which there is something else of a shard."""
    left = [part.name for part in (identity.parent / "log", identity.parent / "snapshots") if part.exists()]
    if left:
        raise DamagedData(
            f"{identity} is missing, and the directory is not empty",
            expected="the file that says whose directory this is, written before everything else",
            actual=", ".join(left),
            remedy="restore the data directory from a copy, or start with an empty one and a checkpoint",
        )
