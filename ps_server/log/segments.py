"""Owns the segment files of one log: the live ones, and the spare ones that the next records overwrite."""

from __future__ import annotations

import itertools
import os
import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ps_server.log.files import sync_folder
from ps_server.private_files import FILE_MODE, make_private_folder

_ZEROS = memoryview(bytes(1 << 20))
"""Written at a time: whoever begins a segment waits for no more."""

_REST_SECONDS = 0.001
"""Between two pieces: who waits for the lock has it first."""


@dataclass(frozen=True, slots=True)
class LogSegment:
    """One live segment file."""

    path: Path
    #: Number of its first record.
    first: int

    @property
    def size_bytes(self) -> int:
        """Its preallocated size."""
        return self.path.stat().st_size


def live_segments(folder: Path) -> list[LogSegment]:
    """The live segments in ``folder``, in the order of their records."""
    return [LogSegment(path, int(path.stem)) for path in sorted(folder.glob("[0-9]*.log"))]


class SegmentFolder:
    """Called by the log's writer and by the helpers that make room ahead of it, each from its own thread.

    Room is made by allocating blocks, which takes milliseconds. The first write to a block costs more than others, so
    segments that wait are filled with zeros; nobody waits for that. One that is not needed any more is overwritten by
    the next records, or enlarged where records have grown. Records carry numbers, so old bytes are not taken for new.
    """

    def __init__(self, folder: Path, *, sync: bool) -> None:
        """Raises OSError."""
        self.folder = folder
        self._sync = sync
        self._lock = threading.Lock()
        make_private_folder(folder)
        for half_made in folder.glob("*.part"):
            half_made.unlink()
        self._names = itertools.count(1 + max((int(p.stem.removeprefix("spare-")) for p in self._spares()), default=0))
        #: Spare files by path: their sizes.
        self._spare = {path: path.stat().st_size for path in self._spares()}
        #: Those not filled yet: how many bytes of each are.
        self._filled = dict[Path, int]()
        self._stopped = threading.Event()
        #: Sizes of the spare segments; replaced as a whole, so that it can be read without the lock.
        self.spare_bytes: tuple[int, ...] = tuple(self._spare.values())

    def live(self) -> list[LogSegment]:
        """The live segments, in the order of their records."""
        return live_segments(self.folder)

    def prepare(self, size_bytes: int) -> None:
        """Make one more spare segment of ``size_bytes``: the largest smaller one is enlarged, or a new one made.

        Raises OSError, with nothing left behind.
        """
        while (found := self._smaller(size_bytes)) is not None:
            if self._enlarge(*found, size_bytes):
                return
        path = self.folder / f"spare-{next(self._names)}.log"
        partial = path.with_suffix(".part")
        descriptor = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_EXCL, FILE_MODE)
        try:
            _allocate(descriptor, 0, size_bytes)
            partial.rename(path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
        finally:
            os.close(descriptor)
        with self._lock:
            self._spare[path], self._filled[path] = size_bytes, 0
            self._count_spare()

    def added_bytes(self, size_bytes: int) -> int:
        """What ``prepare`` would take of the disk."""
        return size_bytes - max((spare for spare in self.spare_bytes if spare < size_bytes), default=0)

    def _smaller(self, size_bytes: int) -> tuple[Path, int] | None:
        with self._lock:
            smaller = [(size, path) for path, size in self._spare.items() if size < size_bytes]
        return max(smaller)[::-1] if smaller else None

    def _enlarge(self, path: Path, size: int, size_bytes: int) -> bool:
        """Whether it still waits: meanwhile it may be begun, as large as it was. Raises OSError."""
        try:
            descriptor = os.open(path, os.O_RDWR)
        except FileNotFoundError:
            return False
        try:
            _allocate(descriptor, size, size_bytes - size)
        except BaseException:
            with self._lock, suppress(OSError):
                if path in self._spare and not self._stopped.is_set():
                    os.ftruncate(descriptor, size)
            raise
        finally:
            os.close(descriptor)
        with self._lock:
            waits = path in self._spare
            if waits:
                self._spare[path] = size_bytes
                self._filled.setdefault(path, size)
                self._count_spare()
        return waits

    def fill(self) -> None:
        """Write zeros to the segments that wait, piece by piece, until all are filled or ``stop``.

        What fails here fails again when a record is written, where it is told.
        """
        while not self._stopped.is_set():
            with self._lock:
                path = next(iter(self._filled), None)
                if path is None or self._stopped.is_set():
                    return
                try:
                    descriptor = self._fill_piece(path)
                except OSError:
                    del self._filled[path]
                    continue
            # In pieces: a record that is written meanwhile does not wait for gigabytes of zeros.
            if self._sync:
                with suppress(OSError):
                    os.fdatasync(descriptor)
            os.close(descriptor)
            self._stopped.wait(_REST_SECONDS)

    def _fill_piece(self, path: Path) -> int:
        """Under the lock. Returns the open descriptor. Raises OSError."""
        begin, size = self._filled[path], self._spare[path]
        descriptor = os.open(path, os.O_RDWR)
        try:
            written = os.pwrite(descriptor, _ZEROS[: size - begin], begin)
        except BaseException:
            os.close(descriptor)
            raise
        self._filled[path] = begin + written
        if begin + written >= size:
            del self._filled[path]
        return descriptor

    @property
    def is_filled(self) -> bool:
        """Whether there is nothing to ``fill``."""
        return not self._filled

    def stop(self) -> None:
        """``fill`` writes nothing any more: from now on the files may be another's."""
        with self._lock:
            self._stopped.set()

    def is_full(self, most_bytes: int) -> bool:
        """Whether the files take more than ``most_bytes``, and some hold records that a snapshot may free."""
        live = self.live()
        try:
            return len(live) > 1 and sum(segment.size_bytes for segment in live) + sum(self.spare_bytes) > most_bytes
        except FileNotFoundError:
            return True  # one was just freed: look again

    def bytes_from(self, number: int) -> int:
        """Bytes of the live segments that hold records from ``number`` on."""
        segments = self.live()
        gone = sum(following.first <= number for following in segments[1:])
        return sum(segment.size_bytes for segment in segments[gone:])

    def begin(self, first: int, at_least_bytes: int, size_bytes: int) -> tuple[int, int]:
        """Make a spare segment of at least ``at_least_bytes`` the live one from record ``first`` on.

        It is the largest that is filled, or else the largest. Where there is none, one of ``size_bytes`` is made.
        Returns its open descriptor and its size. Raises OSError.
        """
        while True:
            with self._lock:
                fitting = [path for path, size in self._spare.items() if size >= at_least_bytes]
                if fitting:
                    chosen = max(fitting, key=lambda path: (path not in self._filled, self._spare[path]))
                    size = self._forget(chosen)
                    break
            self.prepare(max(at_least_bytes, size_bytes))
        path = chosen.rename(self.folder / f"{first:020}.log")
        sync_folder(self.folder)
        return os.open(path, os.O_RDWR), size

    def _forget(self, path: Path) -> int:
        """Under the lock: it is no spare one any more. Returns its size."""
        size = self._spare.pop(path)
        self._filled.pop(path, None)
        self._count_spare()
        return size

    def cut(self, below: int, keep: int, size_bytes: int) -> None:
        """Recycle the segments whose records are all numbered below ``below``. Raises OSError.

        Files of about ``size_bytes`` wait to be overwritten; what is above ``keep`` files is deleted.
        """
        segments = self.live()
        # A smaller one is used where the next record fits, or enlarged.
        fitting = range(size_bytes // 2, 2 * size_bytes + 1)
        for number, (segment, following) in enumerate(itertools.pairwise(segments), 1):
            if following.first > below:
                break
            with self._lock:
                wanted = len(self._spare) + len(segments) - number < keep and segment.size_bytes in fitting
                if wanted:
                    size = segment.size_bytes
                    spare = segment.path.rename(self.folder / f"spare-{next(self._names)}.log")
                    self._spare[spare] = size
                    self._count_spare()
            if not wanted:
                segment.path.unlink()
        remaining = len(self.live())
        with self._lock:
            unfit = [path for path, size in self._spare.items() if size not in fitting]
            waiting = sorted(self._spare.keys() - unfit, key=self._spare.__getitem__, reverse=True)
            # One waits in any case: it may have been promised.
            unfit += waiting[max(1, keep - remaining) :]
            for path in unfit:
                self._forget(path)
        for path in unfit:
            path.unlink()

    def _count_spare(self) -> None:
        self.spare_bytes = tuple(self._spare.values())

    def _spares(self) -> list[Path]:
        return list(self.folder.glob("spare-*.log"))


def _allocate(descriptor: int, begin: int, nbytes: int) -> None:
    """Enlarge a file. Raises OSError."""
    os.posix_fallocate(descriptor, begin, nbytes)
    # A shorter one is damage, also after a loss of power: its size is on the disk before it is used.
    os.fsync(descriptor)
