"""Optimizer state as bytes: how its tensors are announced, and how they are read again."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from ps_protocol.errors import InvalidRequest
from ps_protocol.model.payload_headers import StateHeader
from ps_protocol.model.spec import DType
from ps_server.optimizers.state import StateEntry, StateKey
from ps_server.state.region import torch_dtype

_DTYPES: dict[torch.dtype, DType] = {torch_dtype(dtype): dtype for dtype in DType}


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, as a view."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def describe(entries: Sequence[StateEntry]) -> list[StateHeader]:
    """Names, dtypes and shapes of optimizer state, in payload order."""
    return [
        StateHeader(key.slice_index, key.name, _DTYPES[tensor.dtype], tuple(tensor.shape)) for key, tensor in entries
    ]


def read_state(state: Iterable[StateHeader], payload: memoryview) -> list[StateEntry]:
    """State tensors, copied out of ``payload`` in order. Raises InvalidRequest when it is not exactly as long."""
    entries: list[StateEntry] = []
    position = 0
    for item in state:
        tensor = torch.empty(item.shape, dtype=torch_dtype(item.dtype))
        data = tensor_bytes(tensor)
        data[:] = taken(payload, position, len(data))
        position += len(data)
        entries.append((StateKey(item.slice_index, item.name), tensor))
    taken(payload, position, 0, whole=True)
    return entries


def taken(payload: memoryview, begin: int, size: int, *, whole: bool = False) -> memoryview:
    """``size`` bytes from ``begin``. Raises InvalidRequest when they are not there, or ``whole`` and more are."""
    if len(payload) - begin < size or (whole and len(payload) != begin + size):
        raise InvalidRequest(
            "a record does not have the bytes it announces", expected=str(begin + size), actual=str(len(payload))
        )
    return payload[begin : begin + size]
