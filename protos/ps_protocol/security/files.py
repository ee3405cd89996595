"""Files that may be replaced while a process runs: read again when they change, refused where others can read them."""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Generic, TypeVar

from ps_protocol.errors import ConfigError, PsError
from ps_protocol.logs import EventLogger

logger = EventLogger(__name__)

T = TypeVar("T")

_Stamp = tuple[tuple[int, int, int], ...]


def read_secret(path: Path, what: str) -> bytes:
    """The contents of a file that only its owner may read; one of root may be read by its group, too.

    Raises ConfigError, which names the file, its mode and the remedy.
    """
    data, status = _read(path, what)
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
    return _read(path, what)[0]


def _read(path: Path, what: str) -> tuple[bytes, os.stat_result]:
    """The contents and the status of one file, also when another one takes its name meanwhile."""
    try:
        with path.open("rb") as file:
            return file.read(), os.fstat(file.fileno())
    except OSError as error:
        raise ConfigError(
            f"{what} {path} cannot be read: {error.strerror or error}", remedy="correct the name, or make the file"
        ) from error


@dataclass(frozen=True, slots=True)
class LoadedFiles(Generic[T]):
    """The content of some files when they were read."""

    value: T
    #: Rises with every replacement that was taken.
    generation: int
    #: Of the files, taken before they were read.
    stamp: _Stamp
    #: The files have changed since, to something that is not taken: they are being replaced, or are wrong.
    outdated: bool = False


class WatchedFiles(Generic[T]):
    """What ``load`` makes of some files, made again when one of them was replaced. Any thread may ask.

    A replacement that ``load`` refuses is logged once, and what was loaded last stays: files are often replaced one
    after the other. A thread that asks while another one loads waits for it, so none gets what was replaced.
    """

    def __init__(self, paths: Sequence[Path], load: Callable[[], T]) -> None:
        """Loads for the first time. Raises what ``load`` raises."""
        self._paths = tuple(paths)
        self._load = load
        self._lock = threading.Lock()
        stamp = self._read_stamp()
        self._loaded = LoadedFiles(load(), 1, stamp)

    def current(self) -> LoadedFiles[T]:
        """What the files hold now. Costs one ``stat`` of each."""
        loaded = self._loaded
        if self._read_stamp() == loaded.stamp:
            return loaded
        with self._lock:
            # Taken here: the files may have been replaced, and read by another thread, while this one waited.
            stamp = self._read_stamp()
            if stamp != self._loaded.stamp:
                self._loaded = self._load_again(stamp)
            return self._loaded

    def _load_again(self, stamp: _Stamp) -> LoadedFiles[T]:
        before, names = self._loaded, ", ".join(map(str, self._paths))
        try:
            value = self._load()
        except PsError as error:
            logger.error(
                "files.refused", "the change of %s is not taken, what was read before stays in use: %s", names, error
            )
            return replace(before, stamp=stamp, outdated=True)
        logger.info("files.read", "read again: %s", names)
        return LoadedFiles(value, before.generation + 1, stamp)

    def _read_stamp(self) -> _Stamp:
        return tuple(map(_stamp, self._paths))


def _stamp(path: Path) -> tuple[int, int, int]:
    try:
        status = os.stat(path)  # noqa: PTH116 -- called often, and half as expensive as Path.stat
    except OSError:
        return 0, 0, 0
    return status.st_mtime_ns, status.st_size, status.st_ino
