"""The values of one model as they are loaded: by its first worker, by a worker that assigns them, from a checkpoint."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from types import MappingProxyType

import torch

from ps_protocol.errors import InvalidRequest, PsError, StateLost
from ps_protocol.model.layout import Layout
from ps_protocol.model.payload_headers import StateHeader
from ps_protocol.wire.chunks import LOAD_REQUESTS, ChunkReceiver
from ps_server.consistency import TrackerState
from ps_server.log.entries import Loaded
from ps_server.optimizers.state import StateEntry, StateKey, tensor_bytes
from ps_server.shard.step.applier import Applier
from ps_server.state.region import Region, torch_dtype


class ModelValues:
    """Part of one ShardModel, on the shard's event loop."""

    def __init__(self, applier: Applier, announce: Callable[[], Awaitable[None]] | None, *, initialised: bool) -> None:
        """``announce`` is awaited before the model gets its first values."""
        self._applier = applier
        self._layout = applier.layout
        self._announce = announce
        #: Whether the region holds values yet: rank 0's initial ones, or later ones.
        self.initialised = initialised
        #: The record of the first values until answers may rest on it; None: it is not written yet.
        self._untold: int | None = 0
        #: Loads that replaced values.
        self.assigned = 0
        #: Checksums of the values that slices were set to last, by index, as far as they came with them.
        self.checksums: dict[int, int] = {}

    def require(self) -> None:
        """Raises StateLost while no values have been loaded."""
        if not self.initialised:
            shard = self._layout.shard
            raise StateLost(
                f"shard {shard} holds no values of model '{self._layout.shard_map.spec.name}'",
                shard=str(shard),
                expected="initial values from rank 0, or values loaded from a state_dict",
                remedy="wait for the first worker; if training had begun, the shard restarted and lost its memory",
            )

    @property
    def told(self) -> bool:
        """Whether answers may say that there are values: once no takeover and no restart loses them, as with pushes.

        Such an answer stays true, so a worker that then finds no values knows that state is lost.
        """
        if self._untold and self._applier.covers(self._untold):
            self._untold = 0
        return self.initialised and self._untold == 0

    async def load(
        self,
        region: Region | None,
        entries: Sequence[StateEntry] | None,
        tracker: TrackerState | None = None,
        *,
        only_first: bool,
        at_cut: bool = False,
        slices: Collection[int] = (),
        checksums: Mapping[int, int] = MappingProxyType({}),
        check: Callable[[], None] | None = None,
    ) -> bool:
        """Write values and state; False when ``only_first`` found values; answers may rest on those then, too.

        Raises InvalidRequest, StorageFull, and what closed the replication.

        ``slices``: those of ``region`` that are written; none: all. ``checksums``: of some of them, for status.
        ``tracker``: where a restored job stood; before any stream is open. ``at_cut`` and ``check`` as in
        ``ModelRows.write``.
        """
        nbytes = self._layout.region_bytes + sum(tensor.nbytes for _, tensor in entries or ())
        if not self.initialised and self._announce:
            await self._announce()
        await self._applier.reserve(nbytes, at_cut=at_cut, check=check)
        # Looked at last: of two that come at once the first wins.
        if only_first and self.initialised:
            self._applier.log.release(nbytes)
            await self._applier.settled()
            self._untold = 0
            return False

        if tracker:
            self._applier.tracker.restore(tracker)
        before = self.initialised
        self.initialised = before or region is not None
        if self.initialised and not before:
            self._untold = None
        loaded = Loaded(self._layout.shard_map.spec.name, region, entries, tracker)
        loading = self._applier.load(loaded, nbytes, self._applier.tracker.version, slices)
        loading.add_done_callback(self._written)
        try:
            await asyncio.shield(loading)
        except PsError:
            self.initialised = before
            raise
        except asyncio.CancelledError:
            # The executor reads ``region``, which is its owner's again when this returns.
            await asyncio.gather(loading, return_exceptions=True)
            raise
        self.assigned += before and region is not None
        if region is not None:
            kept = {i: c for i, c in self.checksums.items() if i not in slices} if slices else {}
            self.checksums = {**kept, **checksums}
        await self._applier.covered()
        self._untold = 0
        return True

    def _written(self, loading: asyncio.Future[Region]) -> None:
        """Also where the caller of ``load`` is gone."""
        if self._untold is None:
            self._untold = self._applier.log.number


class LoadReader:
    """Checks the header of one Load call, and makes room for its payload: a region, and new state tensors."""

    def __init__(
        self,
        layout: Layout,
        state: Sequence[StateHeader] | None,
        slices: Sequence[int],
        checksums: Sequence[int],
        region: Region | None,
    ) -> None:
        """``region`` receives the parameters and buffers of ``slices``, or of all. Raises InvalidRequest.

        ``state``: the tensors that come behind them; None: the optimizer's state stays. ``checksums``: of each of
        ``slices``, or none.
        """
        self.region = region
        self.entries = [_allocate(layout, header) for header in state] if state is not None else None
        check_slices(layout, slices)
        if checksums and len(checksums) != len(slices):
            raise InvalidRequest(
                "a Load has not one checksum for each of its slices",
                shard=str(layout.shard),
                expected=f"{len(slices)}, or none",
                actual=str(len(checksums)),
            )
        ranges = [(layout.slices[i].begin, layout.slices[i].end) for i in slices] or layout.ranges()
        pieces = region.pieces(ranges) if region else []
        pieces += [tensor_bytes(tensor) for _, tensor in self.entries or ()]
        self.payload = ChunkReceiver(LOAD_REQUESTS, pieces, "Load")


def check_slices(layout: Layout, slices: Sequence[int]) -> None:
    """Raises InvalidRequest for a slice that is not there, or is asked for twice."""
    if slices and (max(slices) >= len(layout.slices) or len(set(slices)) < len(slices)):
        raise InvalidRequest(
            "slices are asked for that do not exist, or twice",
            shard=str(layout.shard),
            expected=f"indexes below {len(layout.slices)}, each once",
            actual=", ".join(map(str, slices)),
        )


def _allocate(layout: Layout, header: StateHeader) -> StateEntry:
    """An empty tensor for one announced piece of state. Raises InvalidRequest for a size no optimizer has."""
    if header.slice_index >= layout.parameter_slices:
        raise InvalidRequest(
            f"optimizer state '{header.name}' names a slice that does not exist",
            shard=str(layout.shard),
            expected=f"an index below {layout.parameter_slices}",
            actual=str(header.slice_index),
        )
    span = layout.slices[header.slice_index]
    shape = header.shape
    elements = math.prod(span.shape)
    refused = InvalidRequest(
        f"optimizer state '{header.name}' is larger than its variable",
        variable=span.variable.name,
        shard=str(layout.shard),
        expected=f"at most {elements} elements",
        actual=f"shape {shape}",
    )
    if min(shape, default=1) < 0 or math.prod(shape) > max(1, elements):
        raise refused
    dtype = torch_dtype(header.dtype)
    try:
        return StateKey(header.slice_index, header.name), torch.empty(shape, dtype=dtype)
    except RuntimeError as error:  # no elements, and axes beyond what torch can count
        raise refused from error
