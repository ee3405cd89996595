"""Owns the segment files of one log: the live ones, and the spare ones that the next records overwrite."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from ps_protocol.errors import ConfigError
from ps_protocol.files import FILE_MODE, make_private_folder
from ps_server.log.head import HEAD_BYTES
from ps_server.log.record import ALIGNMENT_BYTES, record_bytes

SEGMENT_BYTES = 64 << 20
"""Size of a segment, at most; larger records get larger ones."""

SEGMENTS = 8
"""A log that was given little space has about so many."""

FEWEST_SEGMENTS = 3
"""One that is written, one that waits, one whose records a snapshot is about to replace."""

_SMALLEST_SEGMENT_BYTES = 64 << 10

_ZEROS = memoryview(bytes(4 << 20))


def segment_bytes_for(largest: int, bound_bytes: int | None) -> int:
    """Size of a segment: room for at least two records of ``largest`` bytes. ``bound_bytes``: all the log may take."""
    unit = SEGMENT_BYTES
    if bound_bytes is not None:
        part = (bound_bytes - HEAD_BYTES) // SEGMENTS // ALIGNMENT_BYTES * ALIGNMENT_BYTES
        unit = min(unit, max(_SMALLEST_SEGMENT_BYTES, part))
    return max(unit, -(-2 * largest // unit) * unit)


def require_space(shard: int, model: str, nbytes: int, bound_bytes: int) -> None:
    """Raises ConfigError when updates of ``nbytes`` bytes need more disk space than the log was given."""
    smallest = FEWEST_SEGMENTS * 2 * record_bytes(nbytes)
    if smallest > bound_bytes:
        raise ConfigError(
            f"updates of model '{model}' do not fit into the log of shard {shard}",
            shard=str(shard),
            expected=f"--log-mb {-(-smallest // (1 << 20))} or more: six updates of {nbytes / 1e6:.1f} MB",
            actual=f"--log-mb {bound_bytes >> 20}",
            remedy="raise --log-mb or leave it out; with more shards updates are smaller",
        )


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


def _about(size_bytes: int) -> range:
    """Sizes of segments that may wait where new ones have ``size_bytes``."""
    return range(size_bytes // 2, 2 * size_bytes + 1)


class SegmentFolder:
    """Called by the log's writer and by the helper that makes room ahead of it, each from its own thread.

    Allocating blocks is the expensive part of a write: a segment is filled with zeros before it is used, and one that
    is no longer needed is overwritten by later records. Records carry numbers, so old bytes are not mistaken for new
    ones.
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
        #: Sizes of the spare segments; replaced as a whole, so that it can be read without the lock.
        self.spare_bytes: tuple[int, ...] = tuple(self._spare.values())

    def live(self) -> list[LogSegment]:
        """The live segments, in the order of their records."""
        return live_segments(self.folder)

    def prepare(self, size_bytes: int) -> None:
        """Make one spare segment. Raises OSError, with nothing left behind."""
        path = self.folder / f"spare-{next(self._names)}.log"
        partial = path.with_suffix(".part")
        descriptor = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_EXCL, FILE_MODE)
        try:
            os.posix_fallocate(descriptor, 0, size_bytes)
            # A shorter one is damage, also after a loss of power: its size is on the disk before it is used.
            os.fsync(descriptor)
            for begin in range(0, size_bytes, len(_ZEROS)):
                os.pwrite(descriptor, _ZEROS[: size_bytes - begin], begin)
            if self._sync:
                os.fsync(descriptor)
            partial.rename(path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
        finally:
            os.close(descriptor)
        with self._lock:
            self._spare[path] = size_bytes
            self._count_spare()

    def is_full(self, most_bytes: int) -> bool:
        """Whether the files take more than ``most_bytes``, and some hold records that a snapshot may free."""
        try:
            return len(self.live()) > 1 and self.file_bytes > most_bytes
        except FileNotFoundError:
            return True  # one was just freed: look again

    @property
    def file_bytes(self) -> int:
        """Bytes of all segments. Raises FileNotFoundError when one is freed meanwhile."""
        with self._lock:  # a spare one that becomes live is one of both
            return sum(segment.size_bytes for segment in self.live()) + sum(self.spare_bytes)

    def live_from(self, number: int) -> list[LogSegment]:
        """The live segments that hold records from ``number`` on."""
        segments = self.live()
        return segments[sum(following.first <= number for following in segments[1:]) :]

    def bytes_from(self, number: int) -> int:
        """Bytes of the live segments that hold records from ``number`` on."""
        return sum(segment.size_bytes for segment in self.live_from(number))

    def begin(self, first: int, at_least_bytes: int, size_bytes: int) -> tuple[int, int]:
        """Make a spare segment of at least ``at_least_bytes`` the live one from record ``first`` on.

        Where there is none, one of ``size_bytes`` is made. Returns its open descriptor and its size; its name is on the
        disk once the folder is synced. Raises OSError.
        """
        with self._lock:
            spare = next((path for path, size in self._spare.items() if size >= at_least_bytes), None)
            if spare is not None:
                path = spare.rename(self.folder / f"{first:020}.log")
                size = self._spare.pop(spare)
                self._count_spare()
                return os.open(path, os.O_RDWR), size
        self.prepare(max(at_least_bytes, size_bytes))
        return self.begin(first, at_least_bytes, size_bytes)

    def recycle(self, below: int, keep: int, size_bytes: int) -> None:
        """Free the segments whose records are all numbered below ``below``. Raises OSError.

        Files of about ``size_bytes`` wait to be overwritten; what is above ``keep`` files is deleted.
        """
        segments, fitting = self.live(), _about(size_bytes)
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

    def take_unneeded(self, keep: int, size_bytes: int, enough: Callable[[Collection[int]], bool]) -> list[Path]:
        """Spare segments that no record is to use any more, for the caller to delete: of another size than about
        ``size_bytes``, or above ``keep`` files.

        None without which the sizes of the others are not ``enough``, nor the last of its size.
        """
        remaining, fitting = len(self.live()), _about(size_bytes)
        with self._lock:
            unneeded = [path for path, size in self._spare.items() if size not in fitting]
            unneeded += [path for path in self._spare if path not in unneeded][max(1, keep - remaining) :]
            taken = []
            for path in unneeded:
                size = self._spare.pop(path)
                if enough(self._spare.values()):
                    taken.append(path)
                else:
                    self._spare[path] = size
            self._count_spare()
        return taken

    def _count_spare(self) -> None:
        self.spare_bytes = tuple(self._spare.values())

    def _spares(self) -> list[Path]:
        return list(self.folder.glob("spare-*.log"))
