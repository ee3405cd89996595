"""Memory that grows without being copied: address space is reserved, and pages are allocated when written."""

from __future__ import annotations

import mmap
import os
import sys
from typing import Any

import numpy as np
import numpy.typing as npt

from ps_protocol.errors import TableFull
from ps_server.tables.memory import take_pages

#: From this size on, huge pages are requested; a smaller table stays small.
_HUGE_FROM_BYTES = 8 << 20
#: Linux constant; Python has it from 3.13.
_NO_RESERVE = 0x4000 if sys.platform == "linux" else 0
#: Below this size, memory of numpy is used.
_MAPPED_FROM_BYTES = 128 << 10


def machine_bytes() -> int:
    """Physical memory of this machine."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


class Reserved:
    """A zeroed array of ``count`` x ``width`` items that uses memory only where it was written.

    Owned by one RowStore, used by the executor. Memory that was returned reads as zeros.
    Raises TableFull when the system has not even the address space.
    """

    def __init__(self, count: int, width: int, dtype: npt.DTypeLike) -> None:
        self._item_bytes = width * np.dtype(dtype).itemsize
        self._memory = _map(count * self._item_bytes)
        self._bytes = np.frombuffer(self._memory, np.uint8)
        #: [count, width]; ``width`` may be 0.
        self.array: npt.NDArray[Any] = np.frombuffer(self._memory, dtype, count * width).reshape(count, width)

    def give_back(self, begin: int, end: int) -> None:
        """Return the pages that are entirely within rows [begin, end)."""
        page = mmap.PAGESIZE
        first = -(-begin * self._item_bytes // page) * page
        last = end * self._item_bytes // page * page
        if first < last:
            self._memory.madvise(mmap.MADV_DONTNEED, first, last - first)

    def populate(self, begin: int, end: int) -> None:
        """Allocate the memory of rows [begin, end). From any thread, while others use the array.

        By writing what is there: a page that is written stops nobody else, as ``madvise`` would, who maps memory.
        """
        if self._item_bytes:
            take_pages(self._bytes, begin * self._item_bytes, end * self._item_bytes, mmap.PAGESIZE)


def zeroed(size_bytes: int) -> npt.NDArray[np.uint8]:
    """A zeroed block, returned to the system when it is no longer referenced. Raises TableFull."""
    if size_bytes < _MAPPED_FROM_BYTES:
        return np.zeros(size_bytes, np.uint8)
    return np.frombuffer(_map(size_bytes), np.uint8, size_bytes)


def _map(size_bytes: int) -> mmap.mmap:
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
    try:
        memory = mmap.mmap(-1, max(1, size_bytes), flags=flags)
    except (OSError, OverflowError) as error:
        raise TableFull(
            "the system has no address space left for a table's rows",
            expected=f"{size_bytes} bytes, reserved and not used",
            actual=str(error),
            remedy="raise the limit on address space (ulimit -v), or use more shards",
        ) from error
    if size_bytes > _HUGE_FROM_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
        try:
            memory.madvise(mmap.MADV_HUGEPAGE, _HUGE_FROM_BYTES)
        except OSError:
            pass  # A kernel without huge pages.
    return memory
