"""Counts the users of a tensor and of its memory, to detect whether user code refers to it."""

from __future__ import annotations

import sys
from functools import cache

import torch

from ps_worker.memory.blocks import alone

Users = tuple[int, int, int]
"""References to the tensor, tensors and others with its memory, references to its storage. All depend on the torch."""


def can_count_users() -> bool:
    """Whether this torch can count the references to a storage; the call is private to torch."""
    return hasattr(torch._C, "_storage_Use_Count")


def storage_users(tensor: torch.Tensor) -> tuple[int, int]:
    """Counts that rise when another tensor, or a Python object, uses the memory of ``tensor`` too."""
    storage = tensor.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata), sys.getrefcount(storage)


def users(tensor: torch.Tensor) -> Users:
    """The counts of ``tensor``, which the caller has in a local variable."""
    return (sys.getrefcount(tensor), *storage_users(tensor))


@cache
def expected_users(containers: int, *, is_gradient: bool) -> Users:
    """The value of ``users`` for a parameter's gradient that is also in so many containers, and not used elsewhere.

    With containers it is a view made by FlatMemory, else a tensor made by torch.
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
