"""Owns the flat memory of one kind of optimizer state, which grows and shrinks in place when slices move."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterable
from contextlib import suppress

import torch
from torch import Tensor

from ps_protocol.model.layout import Range
from ps_server.state.shifts import Shift

#: Linux 5.14: madvise brings the pages of a range, to be written.
_POPULATE_WRITE = 23

#: Linux: address space without a promise of memory.
_NO_RESERVE = 0x4000


class StateMemory:
    """Private memory of one Arena, zeroed at first. Positions and sizes are in elements.

    ``touch`` from any thread, the rest where the Arena is used.
    """

    def __init__(self, size: int, reserved: int, dtype: torch.dtype) -> None:
        """With the pages of ``size`` elements, and address space for ``reserved`` where the system gives it.

        Raises OSError where it has no room.
        """
        self.dtype = dtype
        least = max(size * dtype.itemsize, mmap.PAGESIZE)
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        try:
            self._mapping = mmap.mmap(-1, max(least, reserved * dtype.itemsize), flags=flags | _NO_RESERVE)
        except (OSError, OverflowError):
            self._mapping = mmap.mmap(-1, least, flags=flags)
        self._values = torch.frombuffer(self._mapping, dtype=dtype)
        self._touched_bytes = 0
        self.touch(size)

    def fits(self, size: int) -> bool:
        """Whether so many elements have their place here."""
        return size <= len(self._values)

    def touch(self, size: int) -> None:
        """Have the pages of the first ``size`` elements, where they fit."""
        end = size * self.dtype.itemsize
        begin = self._touched_bytes // mmap.PAGESIZE * mmap.PAGESIZE
        if self._touched_bytes < end <= len(self._mapping):
            # An older kernel does not know the call, and there may be no memory: then pages come as they are written.
            with suppress(OSError):
                self._mapping.madvise(_POPULATE_WRITE, begin, end - begin)
            self._touched_bytes = end

    def trim(self, size: int) -> None:
        """Give the pages behind the first ``size`` elements back to the system."""
        begin = -(-size * self.dtype.itemsize // mmap.PAGESIZE) * mmap.PAGESIZE
        if begin < self._touched_bytes:
            self._mapping.madvise(mmap.MADV_DONTNEED, begin, self._touched_bytes - begin)
            self._touched_bytes = begin

    def part(self, begin: int, end: int) -> Tensor:
        """Elements [begin, end), as a flat view."""
        return self._values[begin:end]

    def shift(self, shifts: Iterable[Shift], zeros: Iterable[Range]) -> None:
        """Make ``shifts`` in this order, with the interpreter lock released; then write zeros."""
        address, item = self._values.data_ptr(), self.dtype.itemsize
        for move in shifts:
            ctypes.memmove(address + move.target * item, address + move.begin * item, (move.end - move.begin) * item)
        for begin, end in zeros:
            self._values[begin:end].zero_()
