"""Takes what Load brings: parameters and optimizer state, announced by a header, in chunks."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from ps_protocol.errors import InvalidRequest
from ps_protocol.model.layout import Layout
from ps_protocol.model.payload_headers import StateHeader
from ps_protocol.wire.chunks import LOAD_REQUESTS, ChunkReceiver
from ps_server.optimizers.state import StateEntry, StateKey
from ps_server.optimizers.state_bytes import tensor_bytes
from ps_server.state.region import Region, torch_dtype


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
