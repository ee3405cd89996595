"""Counts what uses a tensor or its memory, to see whether a user holds it too."""

from __future__ import annotations

import sys
from functools import cache

import torch

from ps_worker.memory.blocks import alone

Users = tuple[int, int, int]
"""References to the tensor, tensors and others with its memory, references to its storage. All depend on the torch."""


def can_count_users() -> bool:
    """Whether this torch tells how often a storage is used; the call is private to torch."""
    return hasattr(torch._C, "_storage_Use_Count")


def storage_users(tensor: torch.Tensor) -> tuple[int, int]:
    """Counts that rise when another tensor, or a Python object, uses the memory of ``tensor`` too."""
    storage = tensor.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata), sys.getrefcount(storage)


def users(tensor: torch.Tensor) -> Users:
    """Those of ``tensor``, which the caller has in a local variable."""
    return (sys.getrefcount(tensor), *storage_users(tensor))


@cache
def expected_users(containers: int, *, is_gradient: bool) -> Users:
    """``users`` of a tensor that a parameter has as its gradient, and so many containers, and nobody else.

    With containers it is a view as FlatMemory makes them, else a tensor of torch.
    """
    parameter, made = torch.nn.Parameter(torch.zeros(16)), torch.zeros(16)
    if containers:
        made = alone(torch.zeros(64, dtype=torch.uint8)).view(torch.float32).view(16)
    held = [[made] for _ in range(containers)]
    if is_gradient:
        parameter.grad = made
    del made
    tensor = parameter.grad if is_gradient else held[0][0]
    assert tensor is not None
    return users(tensor)
