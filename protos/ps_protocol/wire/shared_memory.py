"""Memory that two processes of one machine share: it has no name, so nothing is left behind when a process dies.

A segment is a memfd: it lives as long as a process maps it or holds its descriptor, and is handed over as a descriptor
on a Unix socket. There is no name in /dev/shm to find, to guess or to clean up.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")

#: How many regions a worker keeps mapped, and a shard takes for known.
KNOWN_SEGMENTS = 16

#: Linux 5.1: what is mapped writable already stays so, and no other mapping can be writable.
_F_SEAL_FUTURE_WRITE = 0x10


class SharedMemory:
    """One block of shared memory, mapped here. The mapping ends with the last view of ``bytes``."""

    def __init__(self, fd: int, size_bytes: int, *, writable: bool, whole: bool = True) -> None:
        """Map ``fd`` and take it over. ``whole``: with all its pages. Raises OSError, ValueError."""
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        # Prefaulted, so that no step pays for the page table.
        flags = mmap.MAP_SHARED | (getattr(mmap, "MAP_POPULATE", 0) if whole else 0)
        #: All bytes; read-only unless mapped ``writable``.
        self.bytes = memoryview(mmap.mmap(fd, size_bytes, flags=flags, prot=protection))
        self.fd = fd
        weakref.finalize(self, os.close, fd)

    @classmethod
    def create(cls, size_bytes: int, *, whole: bool = True) -> SharedMemory:
        """A new zeroed segment; ``size_bytes`` is not 0. ``whole``: with all its pages, else they come as written.

        Raises OSError when there is no room or no such system call.
        """
        fd = os.memfd_create("torch-ps", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.posix_fallocate(fd, 0, size_bytes) if whole else os.ftruncate(fd, size_bytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            return cls(fd, size_bytes, writable=True, whole=whole)
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def attach(cls, fd: int, size_bytes: int, *, writable: bool, whole: bool = True) -> SharedMemory:
        """Map what another process created. Raises OSError or ValueError when it is smaller than that."""
        try:
            actual = os.fstat(fd).st_size
            if actual < size_bytes:
                raise ValueError(f"a segment of {actual} bytes where {size_bytes} were promised")
            return cls(fd, size_bytes, writable=writable, whole=whole)
        except BaseException:
            os.close(fd)
            raise

    def seal(self) -> None:
        """From now on no other process can map it writable; does nothing where the kernel cannot."""
        try:
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _F_SEAL_FUTURE_WRITE)
        except OSError:
            pass


class Recent(Generic[T]):
    """The last few segments by number. Both ends see the same numbers in the same order, so they forget alike."""

    def __init__(self) -> None:
        self._known: OrderedDict[int, T] = OrderedDict()

    def get(self, number: int) -> T | None:
        """What is known by this number, now the most recent."""
        if number in self._known:
            self._known.move_to_end(number)
        return self._known.get(number)

    def find(self, known: Callable[[T], bool]) -> int | None:
        """The number of the one that ``known`` recognises, now the most recent."""
        for number, value in self._known.items():
            if known(value):
                self._known.move_to_end(number)
                return number
        return None

    def put(self, number: int, value: T) -> None:
        """Know one more; the least recent is forgotten."""
        self._known[number] = value
        if len(self._known) > KNOWN_SEGMENTS:
            self._known.popitem(last=False)
