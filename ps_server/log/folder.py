"""Owns the data directory of one shard: who may use it, whose it is, and where its parts lie."""

from __future__ import annotations

import fcntl
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from ps_protocol.errors import ConfigError, DamagedData
from ps_server.log.files import replace_file, writable_folder

FORMAT = 1
_IDENTITY = "shard.json"


@dataclass(frozen=True, slots=True)
class Identity:
    """What a data directory says of itself."""

    shard: int
    #: Rises each time a process opens the directory.
    life: int = 0
    #: The incarnation that wrote here last; 0 before the first.
    incarnation: int = 0


class DataFolder:
    """Held by one process from ``open`` to ``close``; the system lets go of it when the process dies."""

    def __init__(self, path: Path, lock: int, identity: Identity) -> None:
        self.path = path
        self._lock = lock
        self.identity = identity

    @classmethod
    def open(cls, root: Path, shard: int) -> Self:
        """The folder of shard ``shard`` in ``root``, made where it is missing.

        Raises ConfigError when it cannot be written or another process uses it, DamagedData when it is of another shard
        or of a newer version.
        """
        path = root / f"shard-{shard}"
        writable_folder(path)
        lock = os.open(path / "LOCK", os.O_RDWR | os.O_CREAT, 0o644)
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
            folder = cls(path, lock, Identity(shard, known.life + 1, known.incarnation))
            folder._write()
        except BaseException:
            os.close(lock)
            raise
        return folder

    @property
    def log(self) -> Path:
        """Where the segments lie."""
        return self.path / "log"

    @property
    def snapshots(self) -> Path:
        """Where the snapshots lie."""
        return self.path / "snapshots"

    def belongs_to(self, incarnation: int) -> None:
        """From now on ``incarnation`` writes here. Raises OSError."""
        self.identity = Identity(self.identity.shard, self.identity.life, incarnation)
        self._write()

    def close(self) -> None:
        """Let other processes use it. Repeatable."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _write(self) -> None:
        known = self.identity
        data = {"format": FORMAT, "shard": known.shard, "life": known.life, "incarnation": known.incarnation}
        replace_file(self.path / _IDENTITY, json.dumps(data).encode())


def _read(path: Path, shard: int) -> Identity:
    """Raises DamagedData."""
    if not path.exists():
        return Identity(shard)
    try:
        data = json.loads(path.read_bytes())
        found = Identity(data["shard"], data["life"], data["incarnation"])
        version = int(data["format"])
    except (ValueError, KeyError, TypeError) as error:
        raise DamagedData(f"{path} cannot be read: {error}", remedy="restore the data directory from a copy") from error
    if version > FORMAT:
        raise DamagedData(
            f"{path.parent} was written by a newer torch-ps",
            expected=f"format {FORMAT}",
            actual=f"format {version}",
            remedy="use that version or a later one; nothing was changed",
        )
    if found.shard != shard:
        raise DamagedData(
            f"{path.parent} holds the data of another shard",
            shard=str(shard),
            expected=f"shard {shard}",
            actual=f"shard {found.shard}",
            remedy="give each shard the directory it wrote; nothing was changed",
        )
    return found
