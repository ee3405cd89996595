"""Files that may be replaced while a process runs: read again when they change, refused where others can read them."""

from __future__ import annotations

import logging
import os
import stat
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from ps_protocol.errors import ConfigError, PsError

logger = logging.getLogger(__name__)

T = TypeVar("T")

_Stamp = tuple[tuple[int, int, int], ...]


def read_secret(path: Path, what: str) -> bytes:
    """The contents of a file that only its owner may read; one of root may be read by its group, too.

    Raises ConfigError, which names the file, its mode and the remedy.
    """
    data = read_public(path, what)
    status = path.stat()
    allowed = 0o640 if status.st_uid == 0 else 0o600
    mode = stat.S_IMODE(status.st_mode)
    if mode & 0o777 & ~allowed:
        raise ConfigError(
            f"{what} {path} is open to other users",
            expected=f"mode {allowed:04o} or stricter",
            actual=f"mode {mode:04o}",
            remedy=f"chmod 600 {path}",
        )
    return data


def read_public(path: Path, what: str) -> bytes:
    """The contents of a file. Raises ConfigError, which names it and the reason."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"{what} {path} cannot be read: {error.strerror or error}", remedy="correct the name, or make the file"
        ) from error


class WatchedFiles(Generic[T]):
    """What ``load`` makes of some files, made again when one of them was replaced. Any thread may ask.

    A replacement that ``load`` refuses is logged once, and what was loaded last stays: files are often replaced one
    after the other.
    """

    def __init__(self, paths: Sequence[Path], load: Callable[[], T]) -> None:
        """Loads for the first time. Raises what ``load`` raises."""
        self._paths = tuple(paths)
        self._load = load
        self._lock = threading.Lock()
        self._stamp = self._read_stamp()
        self._value = load()
        #: Rises with every replacement that was taken.
        self.generation = 1

    def current(self) -> T:
        """What the files hold now. Costs one ``stat`` of each."""
        stamp = self._read_stamp()
        if stamp != self._stamp:
            with self._lock:
                if stamp != self._stamp:
                    self._replace(stamp)
        return self._value

    def _replace(self, stamp: _Stamp) -> None:
        self._stamp = stamp
        names = ", ".join(map(str, self._paths))
        try:
            self._value = self._load()
        except PsError as error:
            logger.error("the change of %s is not taken, what was read before stays in use: %s", names, error)
        else:
            self.generation += 1
            logger.info("read again: %s", names)

    def _read_stamp(self) -> _Stamp:
        return tuple(map(_stamp, self._paths))


def _stamp(path: Path) -> tuple[int, int, int]:
    try:
        status = os.stat(path)  # noqa: PTH116 -- called often, and half as expensive as Path.stat
    except OSError:
        return 0, 0, 0
    return status.st_mtime_ns, status.st_size, status.st_ino
