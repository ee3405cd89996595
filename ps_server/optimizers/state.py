"""What optimizer state looks like outside the optimizer: one tensor per slice and name, checked on its way in."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ps_protocol.errors import InvalidRequest
from ps_protocol.model.layout import Layout, SliceSpan
from ps_protocol.model.payload_headers import StateHeader
from ps_protocol.model.spec import DType
from ps_server.state.region import torch_dtype


@dataclass(frozen=True, slots=True)
class StateKey:
    """Names one tensor of optimizer state."""

    #: Position in the layout's slices.
    slice_index: int
    #: As in torch: "momentum_buffer", "exp_avg", "step", …
    name: str


StateEntry = tuple[StateKey, Tensor]

#: Name → (shape, dtype) of the state that torch keeps for one slice.
Expected = Mapping[str, tuple[tuple[int, ...], torch.dtype]]


def by_slice(
    layout: Layout, entries: Iterable[StateEntry], expected: Callable[[SliceSpan], Expected]
) -> dict[int, dict[str, Tensor]]:
    """The entries by slice index and name.

    Raises InvalidRequest when a slice, name, shape or dtype does not fit, or when a slice has only part of its state:
    torch would fail in the middle of a step.
    """
    found: dict[int, dict[str, Tensor]] = {}
    for key, tensor in entries:
        if not 0 <= key.slice_index < layout.parameter_slices:
            raise InvalidRequest(
                f"optimizer state '{key.name}' names a slice that is not a parameter of this shard",
                expected=f"a slice index below {layout.parameter_slices}",
                actual=str(key.slice_index),
            )
        found.setdefault(key.slice_index, {})[key.name] = tensor
    for index, tensors in found.items():
        span = layout.slices[index]
        _check_slice(span, tensors, expected(span))
    return found


def _check_slice(span: SliceSpan, tensors: Mapping[str, Tensor], expected: Expected) -> None:
    if tensors.keys() != expected.keys():
        raise InvalidRequest(
            "the optimizer keeps other state",
            variable=span.variable.name,
            expected=", ".join(sorted(expected)) or "none",
            actual=", ".join(sorted(tensors)),
            remedy="load a checkpoint that was made with the same optimizer and arguments",
        )
    for name, tensor in tensors.items():
        shape, dtype = expected[name]
        if (tuple(tensor.shape), tensor.dtype) != (shape, dtype):
            raise InvalidRequest(
                f"optimizer state '{name}' does not fit its slice",
                variable=span.variable.name,
                expected=f"{dtype} of shape {shape}",
                actual=f"{tensor.dtype} of shape {tuple(tensor.shape)}",
                remedy="load a checkpoint of the same model",
            )


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
