"""Converts optimizer state between torch's per-variable form and the per-slice form of the shards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ps_protocol.errors import InvalidRequest
from ps_protocol.model.layout import Layout, SliceSpan

#: Optimizer state by number of the variable and name, as torch has it.
StateByNumber = Mapping[int, Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class StateEntry:
    """One tensor of optimizer state that belongs to one slice of a shard."""

    slice_index: int
    #: The name as in torch: "momentum_buffer", "exp_avg", "step", …
    name: str
    tensor: torch.Tensor


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, as a writable view."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


def join_state(
    layouts: Sequence[Layout], entries: Sequence[Sequence[StateEntry]]
) -> dict[int, dict[str, torch.Tensor]]:
    """State by number of the variable and name, from the entries of every shard.

    Tensors with the slice's rows are joined along axis 0. Scalars, and state of a whole variable, are taken from the
    first slice.
    """
    parts: dict[int, dict[str, list[tuple[SliceSpan, torch.Tensor]]]] = {}
    for layout, of_shard in zip(layouts, entries, strict=True):
        for entry in of_shard:
            span = layout.slices[entry.slice_index]
            by_name = parts.setdefault(span.slice.variable, {})
            by_name.setdefault(entry.name, []).append((span, entry.tensor))
    return {
        variable: {name: _join(slices) for name, slices in by_name.items()}
        for variable, by_name in sorted(parts.items())
    }


def _join(slices: list[tuple[SliceSpan, torch.Tensor]]) -> torch.Tensor:
    ordered = sorted(slices, key=lambda pair: pair[0].slice.row_begin)
    span, first = ordered[0]
    if len(ordered) == 1 or tuple(first.shape) != span.shape:
        return first
    return torch.cat([tensor for _, tensor in ordered])


def split_state(layout: Layout, state: StateByNumber) -> list[StateEntry]:
    """The entries of one shard, from state by number of the variable and name.

    Tensors of the variable's shape are narrowed to the slice's rows, without a copy where they are on the CPU;
    scalars go with every slice. Python numbers become tensors. Raises InvalidRequest for anything else.
    """
    entries = []
    for index, span in enumerate(layout.slices):
        for name, value in state.get(span.slice.variable, {}).items():
            if value is not None:
                entries.append(StateEntry(index, name, _split(span, name, value)))
    return entries


def _split(span: SliceSpan, name: str, value: Any) -> torch.Tensor:
    if isinstance(value, bool | int | float):
        return torch.tensor(float(value))
    if not isinstance(value, torch.Tensor):
        raise InvalidRequest(
            f"optimizer state '{name}' is not a tensor", variable=span.variable.name, actual=type(value).__name__
        )
    tensor = value.detach().to("cpu")
    begin, end = span.slice.row_begin, span.slice.row_end
    if not tensor.dim() or (begin, end) == (0, span.variable.rows):
        return tensor.contiguous()
    if tuple(tensor.shape) != span.variable.shape:
        raise InvalidRequest(
            f"optimizer state '{name}' does not have its variable's shape",
            variable=span.variable.name,
            expected=str(span.variable.shape),
            actual=str(tuple(tensor.shape)),
        )
    return tensor[begin:end].contiguous()
