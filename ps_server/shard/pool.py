"""Regions for gradients on their way in and parameters on their way out, reused instead of allocated."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from ps_protocol.layout import Layout
from ps_server.optimizers import Region


class RegionPool:
    """Used from the event loop and from the lane.

    A worker's exchange needs one region at a time: first for its gradients, then for the parameters of its reply. So a
    shard's memory is its arenas, its optimizer state and one region per worker in the middle of an exchange. Spare
    regions are kept as long as streams are open that will need them.
    """

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._spare: list[Region] = []
        self._lock = threading.Lock()
        self._streams = 0
        #: Regions in use, taken and not given back.
        self.in_use = 0

    @property
    def spare(self) -> int:
        """Regions held for the next taker."""
        return len(self._spare)

    def take(self) -> Region:
        """A region with unspecified content."""
        with self._lock:
            self.in_use += 1
            if self._spare:
                return self._spare.pop()
        return Region(self._layout)

    def give(self, region: Region) -> None:
        """Hand a region back; its views must not be used any more."""
        with self._lock:
            self.in_use -= 1
            if len(self._spare) < self._streams:
                self._spare.append(region)

    @contextmanager
    def reserved(self) -> Iterator[None]:
        """Keep one spare region for as long as a stream is open."""
        with self._lock:
            self._streams += 1
        try:
            yield
        finally:
            with self._lock:
                self._streams -= 1
                del self._spare[self._streams :]
