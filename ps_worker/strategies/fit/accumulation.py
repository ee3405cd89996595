"""Which batches make one optimizer step: pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import TypeVar

T = TypeVar("T")


def grouped(batches: Iterable[T], size: int, steps: int | None = None) -> Iterator[list[T]]:
    """``batches`` in groups of ``size``, the last one perhaps shorter, and at most ``steps`` of them."""
    rest = iter(batches)
    made = 0
    while steps is None or made < steps:
        group = list(islice(rest, size))
        if not group:
            return
        yield group
        made += 1
