"""Memory of published versions. It is used again for the next version: new pages take longer than the copy to them."""

from __future__ import annotations

import mmap
import weakref
from collections import deque
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt

from ps_protocol.logs import EventLogger
from ps_protocol.wire.shared_memory import SharedMemory

logger = EventLogger(__name__)


@dataclass(frozen=True, slots=True)
class Room:
    """Memory for one version, or a piece of it."""

    #: All bytes. The memory is this room's as long as anything refers to them, also through a view.
    data: npt.NDArray[np.uint8]
    #: Has ``data`` at its beginning, for processes of this host; None: they cannot map it. It is lent while something
    #: refers to ``data``.
    segment: SharedMemory | None = None


class VersionMemory:
    """Gives rooms. The memory of a room that nobody refers to any more, here or in another process that maps it, is
    used again for the next one of its size. From any thread.
    """

    def __init__(self, *, shared: bool = False) -> None:
        """``shared``: other processes of this host may map it, where the system has such memory."""
        self._shared = shared
        #: What nobody here refers to, newest last. One that others map may come before it: soon they will not.
        self._spare: deque[mmap.mmap | SharedMemory] = deque(maxlen=2)

    def take(self, size: int) -> Room:
        """A room of ``size`` bytes, with any content. Raises OSError where there is no such memory."""
        memory, others = None, []
        # What is popped is of this thread alone: others take and give meanwhile.
        while memory is None and (spare := self._pop()) is not None:
            if _size(spare) == size and not _is_lent(spare):
                memory = spare
            else:
                others.append(spare)
        self._spare.extendleft(others)
        if memory is None:
            memory = self._segment(size) if self._shared and size else None
        if memory is None:
            memory = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        segment, pages = (memory, memory.bytes) if isinstance(memory, SharedMemory) else (None, memory)
        data = np.frombuffer(pages, np.uint8, size)
        weakref.finalize(data, self._give, memory).atexit = False
        return Room(data, segment)

    def _give(self, memory: mmap.mmap | SharedMemory) -> None:
        before = []
        while (spare := self._pop()) is not None:
            before.append(spare)
        self._spare.extend([spare for spare in before if _is_lent(spare)][:1])
        self._spare.append(memory)

    def _pop(self) -> mmap.mmap | SharedMemory | None:
        """The newest, which is not there any more."""
        try:
            return self._spare.pop()
        except IndexError:
            return None

    @staticmethod
    def _segment(size: int) -> SharedMemory | None:
        try:
            return SharedMemory.create(size)
        except OSError as error:
            _no_room(str(error))
            return None


def _size(memory: mmap.mmap | SharedMemory) -> int:
    return len(memory.bytes if isinstance(memory, SharedMemory) else memory)


def _is_lent(memory: mmap.mmap | SharedMemory) -> bool:
    return isinstance(memory, SharedMemory) and memory.is_lent


@cache
def _no_room(why: str) -> None:
    logger.warning("transport", "readers of this host do not share memory, their bytes are sent: %s", why)
