"""Values made of tensors: batches, and results of a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


def mapped(function: Callable[[Tensor], Tensor], value: T, *, numbers: bool = False) -> T:
    """``value`` with ``function`` applied to every tensor in its mappings, lists and tuples.

    With ``numbers`` plain numbers are tensors of one element to ``function``, and numbers again afterwards.
    """
    if isinstance(value, Tensor):
        return function(value)  # type: ignore[return-value]  # a tensor for a tensor
    if numbers and isinstance(value, int | float) and not isinstance(value, bool):
        return function(torch.tensor(value, dtype=torch.float64)).item()  # type: ignore[return-value]
    if isinstance(value, Mapping):
        return type(value)({key: mapped(function, each, numbers=numbers) for key, each in value.items()})  # type: ignore[call-arg]
    if isinstance(value, tuple | list):
        parts = [mapped(function, each, numbers=numbers) for each in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return value
