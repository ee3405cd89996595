"""What optimizer state looks like outside the optimizer: one tensor per slice and name, checked on its way in."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ps_protocol.errors import InvalidRequest
from ps_protocol.model.layout import Layout, SliceSpan


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
