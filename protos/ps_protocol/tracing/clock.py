"""The clock of the times in a trace: ``time.monotonic_ns``, which all processes of one host share."""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass
from pathlib import Path

from ps_protocol.wire.shared_memory import boot_id

_TRIES = 5
_NAMESPACE = Path("/proc/self/ns/time")


@dataclass(frozen=True, slots=True)
class ClockReading:
    """The monotonic clock of a process, and its reading and the wall clock's at one moment, in nanoseconds."""

    #: Processes with the same name read the same clock.
    name: str
    monotonic_ns: int
    wall_ns: int

    @property
    def wall_offset_ns(self) -> int:
        """Wall clock minus monotonic clock."""
        return self.wall_ns - self.monotonic_ns


def read_clock() -> ClockReading:
    """The clock of this process. One that cannot be named is taken for its own."""
    try:
        name = f"{boot} {_NAMESPACE.readlink()}" if (boot := boot_id()) else str(uuid.uuid4())
    except OSError:
        name = str(uuid.uuid4())
    return min((_both(name) for _ in range(_TRIES)), key=lambda pair: pair[0])[1]


def _both(name: str) -> tuple[int, ClockReading]:
    """A reading, and how long it took: the process may be stopped between the two clocks."""
    before, wall, after = time.monotonic_ns(), time.time_ns(), time.monotonic_ns()
    return after - before, ClockReading(name, (before + after) // 2, wall)
