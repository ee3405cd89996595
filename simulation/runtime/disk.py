"""Owns the folder of one simulated disk, and what goes wrong with it; stands for ``os`` in the shipped code."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from simulation.runtime.kernel import Killed, Process
from simulation.runtime.wait import Wait, kernel, running

WRITE_POINTS = ("write", "sync")
"""Where a process can be made to die: in the middle of a record, and before a file is synced."""


class Disk:
    """Outlives the processes that use it, one at a time. Its files lie in memory (tmpfs)."""

    def __init__(self, root: Path, name: str) -> None:
        self._root = root
        #: Names the place: a copy has the one of its original.
        self.name = self._folder_name = name
        self._generation = 0
        #: No room for new files.
        self.full = False
        #: How long a sync takes.
        self.sync_seconds = 0.0
        #: The process that uses it.
        self.holder: Process | None = None
        self.path.mkdir()

    @property
    def path(self) -> Path:
        """The folder; another one after each process."""
        return self._root / f"{self._folder_name}.{self._generation}"

    @property
    def shared(self) -> Path:
        """A folder that every process sees, as on a network file system."""
        return self._root / "shared"

    @property
    def kept(self) -> Path:
        """Another one, for checkpoints that a job begins with: nothing there is pruned."""
        return self._root / "kept"

    def attach(self, process: Process) -> None:
        """``process`` uses it from now on, until its end."""
        self.holder = process
        process.at_end.append(self._detach)

    def _detach(self) -> None:
        """The process has ended: what it still runs finds nothing any more."""
        self.holder = None
        before = self.path
        self._generation += 1
        before.rename(self.path)

    def copied(self, name: str) -> Disk:
        """As a backup would hold it."""
        other = Disk.__new__(Disk)
        other.__dict__.update(self.__dict__)
        other._generation, other.holder, other._folder_name = 0, None, name
        shutil.copytree(self.path, other.path)
        return other

    def renew(self) -> None:
        """Other files with the same content: locks of the ones before are nobody's."""
        before = self.path
        self._generation += 1
        shutil.copytree(before, self.path)
        shutil.rmtree(before)


class Files:
    """Stands for the module ``os``: dead processes change no file, full disks refuse, slow ones take time."""

    def __init__(self) -> None:
        self.disks: dict[Process, Disk] = {}
        #: By process: the points where it dies, and how often each is passed before.
        self.armed: dict[Process, dict[str, int]] = {}
        self._memory: set[int] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    @property
    def environ(self) -> Mapping[str, str]:
        """That of the process."""
        process = kernel().process
        return process.environment if process else os.environ

    def getpid(self) -> int:
        """That of the process."""
        process = kernel().process
        return process.number if process else os.getpid()

    def open(self, path: Any, flags: int, mode: int = 0o777, **keywords: Any) -> int:
        """As ``os.open``."""
        kernel().check_alive()
        descriptor = os.open(path, flags, mode, **keywords)
        if process := kernel().process:
            process.descriptors.add(descriptor)
        return descriptor

    def fdopen(self, descriptor: int, *arguments: Any, **keywords: Any) -> Any:
        """As ``os.fdopen``. A full disk takes none that is to be written."""
        closes = keywords.get("closefd", True)
        if closes and (process := kernel().process):
            process.descriptors.discard(descriptor)
        if "r" not in arguments[0] and self._is_full(descriptor):
            if closes:
                os.close(descriptor)
            raise _no_space()
        return os.fdopen(descriptor, *arguments, **keywords)

    def memfd_create(self, name: str, flags: int = 0) -> int:
        """As ``os.memfd_create``; what it returns is closed also after its process has ended."""
        descriptor = os.memfd_create(name, flags)
        self._memory.add(descriptor)
        return descriptor

    def take_over(self, descriptor: int) -> None:
        """As ``memfd_create``, of memory that came from another process."""
        self._memory.add(descriptor)

    def close(self, descriptor: int) -> None:
        """As ``os.close``."""
        process = running()
        # Code of a process that has ended is unwound: the number may be that of another one's memory by now.
        stale = process is not None and descriptor in process.closed_at_end
        if descriptor in self._memory and not stale:
            self._memory.discard(descriptor)
            os.close(descriptor)
            return
        kernel().check_alive()
        if process:
            process.descriptors.discard(descriptor)
        os.close(descriptor)

    def pwritev(self, descriptor: int, pieces: Sequence[memoryview], offset: int) -> int:
        """As ``os.pwritev``; a process may die in the middle of it, and a file does not grow on a full disk."""
        kernel().check_alive()
        self._check_room(descriptor, offset + sum(map(len, pieces)))
        if self._dies("write"):
            torn = b"".join(pieces)
            os.pwrite(descriptor, torn[: kernel().random.randrange(len(torn) + 1)], offset)
            self._kill()
        return os.pwritev(descriptor, pieces, offset)

    def pwrite(self, descriptor: int, data: Any, offset: int) -> int:
        """As ``os.pwrite``; a file does not grow on a full disk."""
        kernel().check_alive()
        self._check_room(descriptor, offset + len(data))
        return os.pwrite(descriptor, data, offset)

    def fsync(self, descriptor: int) -> None:
        """The time it takes, and nothing else: the folder is in memory."""
        kernel().check_alive()
        if self._dies("sync"):
            self._kill()
        process = kernel().process
        disk = self.disks.get(process) if process else None
        if disk is not None and disk.sync_seconds:
            Wait().pause(disk.sync_seconds * kernel().random.random())

    fdatasync = fsync

    def posix_fallocate(self, descriptor: int, offset: int, size: int) -> None:
        """As ``os.posix_fallocate``; a full disk has room for no file."""
        kernel().check_alive()
        self._check_room(descriptor, offset + size)
        os.posix_fallocate(descriptor, offset, size)

    def _check_room(self, descriptor: int, end: int) -> None:
        """Raises OSError where a file on a full disk would grow to ``end`` bytes."""
        if self._is_full(descriptor) and end > os.fstat(descriptor).st_size:
            raise _no_space()

    def _is_full(self, descriptor: int) -> bool:
        """Whether it is of a file on a full disk. Memory is on none, nor is what all processes share."""
        process = kernel().process
        disk = self.disks.get(process) if process else None
        if disk is None or not disk.full:
            return False
        return Path(f"/proc/self/fd/{descriptor}").readlink().is_relative_to(disk.path)

    def _exit(self, code: int) -> None:
        self._kill()

    def _dies(self, point: str) -> bool:
        process = kernel().process
        armed = self.armed.get(process) if process else None
        if not armed or point not in armed:
            return False
        armed[point] -= 1
        return armed[point] <= 0

    def _kill(self) -> None:
        process = kernel().process
        if process is not None:
            process.kill()
        raise Killed


def _no_space() -> OSError:
    return OSError(errno.ENOSPC, "No space left on device")
