"""Regions that workers on this machine map and fill with gradients: each is one worker's alone."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress

from ps_protocol.errors import InvalidRequest
from ps_protocol.model.layout import Layout
from ps_server.consistency import WorkerKey
from ps_server.state.region import Region


class LentRegions:
    """The regions of one model that its workers write to. Streams own what they took.

    Used on the event loop; ``take`` and ``touch`` are called in helper threads.

    A worker that opens its streams again after a move gets the memory that it has mapped already. After an outage it
    does not: a push that the shard holds may still be read from there.
    """

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        #: What streams have now.
        self._lent: dict[WorkerKey, list[weakref.ref[Region]]] = {}
        #: What was lent before the move, for workers that have not come back yet.
        self._kept: dict[WorkerKey, list[Region]] = {}

    def take(self, worker: WorkerKey, count: int) -> Sequence[Region]:
        """``count`` regions for a stream of ``worker``. Raises InvalidRequest when there is no memory to share."""
        kept, regions = self._kept.pop(worker, []), list[Region]()
        if len(kept) == count:
            with suppress(OSError):
                regions = [relaid for each in kept if (relaid := each.relaid(self._layout)) is not None]
        if len(regions) < count:
            regions = [Region(self._layout) for _ in range(count if self._layout.region_bytes else 0)]
        if any(region.segment is None for region in regions):
            raise InvalidRequest(
                "there is not enough shared memory for this worker's gradients",
                shard=str(self._layout.shard),
                expected=f"{len(regions) * self._layout.region_bytes} bytes",
                remedy="nothing needs to be done: the worker uses TCP",
            )
        self._lent[worker] = [weakref.ref(region) for region in regions]
        return regions

    def hold(self) -> None:
        """Keep the regions of streams that end because slices move; nothing is read from them any more."""
        for worker, refs in self._lent.items():
            if regions := [region for ref in refs if (region := ref()) is not None]:
                self._kept[worker] = regions

    def keep(self, before: LentRegions) -> None:
        """Lend the regions of ``before``, which has another layout."""
        self._kept, before._kept = before._kept, {}

    def members(self, live: Mapping[int, int]) -> None:
        """Replace the live workers, rank to incarnation. Nothing is kept for others."""
        for worker in [key for key in self._kept if live.get(key.rank) != key.incarnation]:
            del self._kept[worker]

    def touch(self, size_bytes: int) -> None:
        """Call ``Region.touch`` for all regions of workers. Raises OSError where there is no room."""
        for refs in list(self._lent.values()):
            for region in [found for ref in refs if (found := ref()) is not None]:
                region.touch(size_bytes)
