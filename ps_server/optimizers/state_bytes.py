"""Optimizer state as bytes: how its tensors are announced, and how they are read again."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from ps_protocol.errors import InvalidRequest
from ps_protocol.model.spec import DType
from ps_protocol.v1 import shard_pb2 as pb
from ps_protocol.wire import convert_model
from ps_server.optimizers.state import StateEntry, StateKey
from ps_server.state.region import torch_dtype

_DTYPES: dict[torch.dtype, DType] = {torch_dtype(dtype): dtype for dtype in DType}


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, as a view."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def describe(entries: Sequence[StateEntry]) -> list[pb.StateTensor]:
    """Names, dtypes and shapes of optimizer state, in payload order."""
    return [
        pb.StateTensor(
            slice=key.slice_index,
            name=key.name,
            dtype=convert_model.dtype_to_pb(_DTYPES[tensor.dtype]),
            shape=tensor.shape,
        )
        for key, tensor in entries
    ]


def read_state(state: Iterable[pb.StateTensor], payload: memoryview) -> list[StateEntry]:
    """State tensors, copied out of ``payload`` in order. Raises InvalidRequest when it is not exactly as long."""
    entries: list[StateEntry] = []
    position = 0
    for item in state:
        tensor = torch.empty(tuple(item.shape), dtype=torch_dtype(convert_model.dtype_from_pb(item.dtype)))
        data = tensor_bytes(tensor)
        data[:] = taken(payload, position, len(data))
        position += len(data)
        entries.append((StateKey(item.slice, item.name), tensor))
    taken(payload, position, 0, whole=True)
    return entries


def taken(payload: memoryview, begin: int, size: int, *, whole: bool = False) -> memoryview:
    """``size`` bytes from ``begin``. Raises InvalidRequest when they are not there, or ``whole`` and more are."""
    if len(payload) - begin < size or (whole and len(payload) != begin + size):
        raise InvalidRequest(
            "a record does not have the bytes it announces", expected=str(begin + size), actual=str(len(payload))
        )
    return payload[begin : begin + size]
