"""Makes the operating system fail at one chosen file operation, and watches what is synced."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

OPERATIONS = ("open", "pwrite", "ftruncate", "fsync", "rename", "mkdir", "unlink", "rmdir")


class Crash(BaseException):
    """The process ends here."""


@contextmanager
def watched(before: Callable[[str, tuple[Any, ...]], None]) -> Iterator[None]:
    """Call ``before(operation, arguments)`` ahead of every file operation."""
    with pytest.MonkeyPatch.context() as patch:
        for name in OPERATIONS:
            patch.setattr(os, name, _wrapped(name, getattr(os, name), before))
        yield


def _wrapped(name: str, real: Callable[..., Any], before: Callable[[str, tuple[Any, ...]], None]) -> Callable[..., Any]:
    def call(*arguments: Any, **keywords: Any) -> Any:
        before(name, arguments)
        return real(*arguments, **keywords)

    return call


def anything(name: str, arguments: tuple[Any, ...]) -> bool:
    """Every operation."""
    return True


def growing(name: str, arguments: tuple[Any, ...]) -> bool:
    """Operations that can find the disk full."""
    return name in ("pwrite", "ftruncate", "fsync", "mkdir") or (name == "open" and bool(arguments[1] & os.O_CREAT))


def counted(work: Callable[[], object], what: Callable[[str, tuple[Any, ...]], bool] = anything) -> int:
    """How many file operations of this kind ``work`` does."""
    seen: list[bool] = []
    with watched(lambda name, arguments: seen.append(what(name, arguments))):
        work()
    return sum(seen)


@contextmanager
def dies_at(number: int) -> Iterator[None]:
    """The process ends before operation ``number``; of a write, half is done. Nothing works afterwards."""
    seen = 0
    write = os.pwrite

    def before(name: str, arguments: tuple[Any, ...]) -> None:
        nonlocal seen
        seen += 1
        if seen - 1 == number and name == "pwrite":
            descriptor, data, position = arguments
            write(descriptor, data[: len(data) // 2], position)
        if seen > number:
            raise Crash

    with watched(before), pytest.raises(Crash):
        yield


@contextmanager
def full_at(number: int) -> Iterator[None]:
    """There is no space from growing operation ``number`` on; removing works."""
    seen = 0

    def before(name: str, arguments: tuple[Any, ...]) -> None:
        nonlocal seen
        if growing(name, arguments):
            seen += 1
            if seen > number:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with watched(before):
        yield


class Unsynced:
    """What a power loss could take: files written and folders changed since their last fsync."""

    def __init__(self) -> None:
        self.paths: set[Path] = set()
        #: What was unsynced when a rename came.
        self.at_renames: list[set[Path]] = []

    def before(self, name: str, arguments: tuple[Any, ...]) -> None:
        if name == "open" and arguments[1] & os.O_CREAT:
            self.paths.add(Path(arguments[0]).parent)
        elif name in ("pwrite", "ftruncate"):
            self.paths.add(_path_of(arguments[0]))
        elif name == "fsync":
            self.paths.discard(_path_of(arguments[0]))
        elif name in ("mkdir", "unlink", "rmdir"):
            self.paths.add(Path(arguments[0]).parent)
        elif name == "rename":
            self.at_renames.append(set(self.paths))
            self.paths.add(Path(arguments[1]).parent)


def _path_of(descriptor: int) -> Path:
    return Path(f"/proc/self/fd/{descriptor}").readlink()
