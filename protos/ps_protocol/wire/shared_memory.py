"""Memory that two processes of one machine share: it has no name, so nothing is left behind when a process dies.

A segment is a memfd: it lives as long as a process maps it or holds its descriptor, and is handed over as a descriptor
on a Unix socket. There is no name in /dev/shm to find, to guess or to clean up.
"""

from __future__ import annotations

import fcntl
import hashlib
import mmap
import os
import signal
import weakref
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Generic, TypeVar

T = TypeVar("T")

#: How many regions a worker keeps mapped, and a shard takes for known.
KNOWN_SEGMENTS = 16

#: Linux 5.1: what is mapped writable already stays so, and no other mapping can be writable.
_F_SEAL_FUTURE_WRITE = 0x10

#: Linux 5.14: madvise brings the pages of a range, to be read or written.
_POPULATE_READ, _POPULATE_WRITE = 22, 23

#: madvise takes the pages of a range out of the file.
_REMOVE = 9

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class SharedMemory:
    """One block of shared memory, mapped here. The mapping ends with the last view of ``bytes``."""

    def __init__(
        self, fd: int, size_bytes: int, *, writable: bool, whole: bool = True, reserved_bytes: int = 0
    ) -> None:
        """Map ``fd`` and take it over. ``whole``: with the pages of ``size_bytes``. Raises OSError, ValueError.

        ``reserved_bytes``: the least size of the mapping; address space beyond the segment is for ``touch``.
        """
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        grows = reserved_bytes > size_bytes
        # Prefaulted, so that no step pays for the page table.
        flags = mmap.MAP_SHARED | (getattr(mmap, "MAP_POPULATE", 0) if whole and not grows else 0)
        self._mapping = mmap.mmap(fd, max(size_bytes, reserved_bytes), flags=flags, prot=protection)
        #: All bytes; read-only unless mapped ``writable``.
        self.bytes = memoryview(self._mapping)
        self._writable = writable
        #: The pages of so many bytes are there.
        self.touched_bytes = size_bytes if whole and not grows else 0
        self.fd = fd
        self._was_lent = False
        if whole:
            self.touch(size_bytes)
        weakref.finalize(self, os.close, fd)

    @classmethod
    def create(cls, size_bytes: int, *, whole: bool = True, reserved_bytes: int = 0) -> SharedMemory:
        """A new zeroed segment; ``size_bytes`` is not 0. ``whole``: with all its pages, else they come as written.

        ``reserved_bytes``: address space that it may ``touch`` later. Raises OSError when there is no room or no such
        system call.
        """
        fd = os.memfd_create("torch-ps", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, max(size_bytes, reserved_bytes))
            if whole:
                os.posix_fallocate(fd, 0, size_bytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            return cls(fd, size_bytes, writable=True, whole=whole, reserved_bytes=reserved_bytes)
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def attach(
        cls, fd: int, size_bytes: int, *, writable: bool, whole: bool = True, reserved: bool = False
    ) -> SharedMemory:
        """Map what another process created. Raises OSError or ValueError when it is smaller than that.

        ``reserved``: with the address space behind ``size_bytes`` that its creator reserved.
        """
        try:
            actual = os.fstat(fd).st_size
            if actual < size_bytes:
                raise ValueError(f"a segment of {actual} bytes where {size_bytes} were promised")
            return cls(fd, size_bytes, writable=writable, whole=whole, reserved_bytes=actual if reserved else 0)
        except BaseException:
            os.close(fd)
            raise

    @property
    def is_writable(self) -> bool:
        """Whether it is mapped to be written."""
        return self._writable

    def touch(self, size_bytes: int) -> None:
        """Have the pages of the first ``size_bytes`` bytes, which are mapped. Raises OSError when there is no room."""
        begin = self.touched_bytes // mmap.PAGESIZE * mmap.PAGESIZE
        if size_bytes <= self.touched_bytes:
            return
        if self._writable:
            os.posix_fallocate(self.fd, begin, size_bytes - begin)
        # An older kernel does not know the call: there the first step brings the pages.
        with suppress(OSError):
            self._mapping.madvise(_POPULATE_WRITE if self._writable else _POPULATE_READ, begin, size_bytes - begin)
        self.touched_bytes = size_bytes

    def trim(self, size_bytes: int) -> None:
        """Give the pages behind the first ``size_bytes`` bytes back to the system, where it takes them."""
        begin = -(-size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        if begin >= self.touched_bytes:
            return
        with suppress(OSError):  # sealed: other processes read it
            self._mapping.madvise(_REMOVE, begin, self.touched_bytes - begin)
            self.touched_bytes = begin

    def seal(self) -> None:
        """From now on no other process can map it writable; does nothing where the kernel cannot."""
        try:
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _F_SEAL_FUTURE_WRITE)
        except OSError:
            pass

    def lend(self) -> int:
        """A new descriptor, to read, for another process: ``is_lent`` as long as it is open there, or the memory is
        mapped. Raises OSError.
        """
        self._was_lent = True
        return _opened(self.fd)

    @property
    def is_lent(self) -> bool:
        """Whether another process, however many it has forked, may still read what ``lend`` gave. The system knows,
        also of a process that was killed; where it does not say, this is true.
        """
        if self._was_lent and can_tell_lent():
            self._was_lent = _is_open_elsewhere(self.fd)
        return self._was_lent


def _opened(fd: int) -> int:
    """A file of its own, to read, of the memory behind ``fd``: descriptors that are sent, and mappings, are of it."""
    return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)


def _is_open_elsewhere(fd: int) -> bool:
    """Whether a file of ``_opened`` is there: a lease to write is given to the only one who has opened something."""
    try:
        probe = _opened(fd)
    except OSError:
        return True
    try:
        # What comes here if somebody opens it meanwhile; it would be SIGIO, which ends a process.
        fcntl.fcntl(probe, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(probe, fcntl.F_SETLEASE, fcntl.F_WRLCK)
    except OSError:
        return True
    finally:
        os.close(probe)  # and ends the lease
    return False


@cache
def can_tell_lent() -> bool:
    """Whether the system knows of a mapping whose descriptors are closed, and of its end."""
    try:
        segment = SharedMemory.create(mmap.PAGESIZE)
        theirs = map_private(_opened(segment.fd), mmap.PAGESIZE)
        while_mapped = _is_open_elsewhere(segment.fd)
        del theirs
        return while_mapped and not _is_open_elsewhere(segment.fd)
    except OSError:
        return False


class PrivateMapping:
    """The pages of a segment, mapped once more: a page that is written here is copied first, and the segment stays."""

    def __init__(self, segment: SharedMemory, size_bytes: int) -> None:
        """Raises OSError."""
        protection = mmap.PROT_READ | mmap.PROT_WRITE
        self._mapping = mmap.mmap(segment.fd, size_bytes, flags=mmap.MAP_PRIVATE, prot=protection)
        self.bytes = memoryview(self._mapping)

    def renew(self) -> None:
        """Drop the copies: these are the bytes of the segment again."""
        self._mapping.madvise(mmap.MADV_DONTNEED)

    def part(self) -> None:
        """Copy all pages: what is written to the segment from now on is not seen here.

        Another thread may write here meanwhile. Raises OSError before Linux 5.14.
        """
        self._mapping.madvise(_POPULATE_WRITE)


@cache
def can_map_privately() -> bool:
    """Whether the system has all that PrivateMapping needs."""
    try:
        PrivateMapping(SharedMemory.create(mmap.PAGESIZE), mmap.PAGESIZE).part()
    except (AttributeError, OSError):
        return False
    return True


def map_private(fd: int, size_bytes: int) -> memoryview:
    """The bytes of a segment of another process, which cannot make it smaller. A page that is written here is copied
    first. Takes ``fd`` over. Raises OSError, ValueError.
    """
    try:
        if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK or os.fstat(fd).st_size < size_bytes:
            raise ValueError(f"this is no segment of {size_bytes} bytes that stay")
        mapping = mmap.mmap(fd, size_bytes, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    finally:
        os.close(fd)
    with suppress(OSError):  # an older kernel brings the pages one by one
        mapping.madvise(_POPULATE_READ, 0, size_bytes)
    return memoryview(mapping)


def boot_id() -> str:
    """The name of this start of the machine; empty where the system gives none."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""


@cache
def host_id() -> str:
    """Identifies this machine since it was started, for processes that may share memory; empty: unknown."""
    boot = boot_id()
    return boot and hashlib.sha256(f"{boot}\n".encode()).hexdigest()[:32]


class KeptMappings:
    """Mappings whose streams have ended, for streams that are opened next and may be given the same memory."""

    def __init__(self) -> None:
        #: By file and use.
        self.kept: dict[tuple[int, int, bool], SharedMemory] = {}

    def keep(self, memory: SharedMemory) -> None:
        """Have one for ``map``."""
        self.kept[(*_inode(memory.fd), memory.is_writable)] = memory

    def map(self, fd: int, size_bytes: int, *, writable: bool) -> SharedMemory:
        """The memory behind ``fd``, which is taken over. Raises as ``SharedMemory.attach``."""
        known = self.kept.pop((*_inode(fd), writable), None)
        if known is None or len(known.bytes) < size_bytes:
            return SharedMemory.attach(fd, size_bytes, writable=writable, reserved=True)
        os.close(fd)
        known.touch(size_bytes)
        return known

    def clear(self) -> None:
        """Forget what nobody has asked for."""
        self.kept.clear()


def _inode(fd: int) -> tuple[int, int]:
    found = os.fstat(fd)
    return found.st_dev, found.st_ino


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

    def values(self) -> list[T]:
        """All that are known."""
        return list(self._known.values())

    def put(self, number: int, value: T) -> None:
        """Know one more; the least recent is forgotten."""
        self._known[number] = value
        if len(self._known) > KNOWN_SEGMENTS:
            self._known.popitem(last=False)
