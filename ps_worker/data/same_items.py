"""Detects data that differs between workers: a dataset or sampler that splits itself would be split twice."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import numpy as np
import torch

from ps_protocol.logs import EventLogger

T = TypeVar("T")

logger = EventLogger("ps_worker")

_ITEMS = 4
"""So many first items are compared."""

_MOST_BYTES = 1 << 16
"""Of one array of an item."""

Compare = Callable[[str], Mapping[int, str] | None]
"""Gives this worker's value, and returns those of all workers by rank, once all have given theirs; None until then."""


class SameItems:
    """Checks one dataset or sampler that is split by rank. Used in the training process; ``watch`` also in a loader's
    process.

    Compares the first items that this worker reads, before its part is taken, with those of the other workers. It does
    not wait for them: it asks at the first batch, then after twice as many batches each time.
    """

    def __init__(self, what: str, world_size: int, length: int | None, compare: Compare) -> None:
        """``what``: the kind of source, such as "iterable dataset". ``length``: its number of items, if known."""
        self._what = what
        self._world_size = world_size
        self._length = length
        self._compare = compare
        # A loader's process, perhaps a spawned one, writes here too. 0 until all items have been read.
        self._digest = torch.zeros(2, dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call]
        self._asks = itertools.count(1)
        self._settled = world_size < 2

    def watch(self, items: Iterator[T], *, checks: bool) -> Iterator[T]:
        """Yield ``items``, noting the first ones. ``checks``: also compare them; for the training process."""
        digest = hashlib.blake2b(digest_size=8)
        count = 0
        for count, item in enumerate(items, 1):
            if count <= _ITEMS:
                _add(digest, item)
                if count == _ITEMS:
                    self._note(digest.digest())
            if checks:
                self.check()
            yield item
        if 0 < count < _ITEMS:
            self._note(digest.digest())
            if checks:
                self.check()

    def check(self, *_: object) -> None:
        """Compare with the other workers once the first items are known and a comparison is due. Warns once of a
        difference.
        """
        if self._settled or not int(self._digest[0]) or (number := next(self._asks)) & (number - 1):
            return
        own = f"{int(self._digest[1]):x}"
        told = self._compare(own)
        if told is None:
            return
        self._settled = True
        others = [rank for rank, digest in told.items() if digest != own]
        if others:
            self._warn(others[0])

    def verify(self, digest: bytes) -> None:
        """Compare the digest of the first epoch's order."""
        if not int(self._digest[0]):
            self._note(digest)
        self.check()

    def _warn(self, other: int) -> None:
        size = self._world_size
        counts = (
            f"{-(-self._length // size)} of the {self._length} items that it yields here are"
            if self._length is not None
            else f"one of {size} items that it yields here is"
        )
        logger.warning(
            "model.options",
            "the first items of the %s are others on rank %d: it has to yield the same on all workers, since %s "
            "trained here and the rest on other workers; where it splits itself by rank, part of its items is never "
            "trained: leave it as it is (no cluster.shard; Trainer(use_distributed_sampler=False)), or whole",
            self._what,
            other,
            counts,
        )

    def _note(self, digest: bytes) -> None:
        self._digest[1] = int.from_bytes(digest, "little", signed=True)
        self._digest[0] = 1


def _add(digest: hashlib.blake2b, item: Any) -> None:
    """Add the comparable parts of ``item`` to the digest; for other objects, their class."""
    if isinstance(item, torch.Tensor):
        _add(digest, item.detach().cpu().reshape(-1)[:_MOST_BYTES].contiguous().view(torch.uint8).numpy())
    elif isinstance(item, np.ndarray) and item.dtype.kind in "biufcUS":
        digest.update(np.ascontiguousarray(item).tobytes()[:_MOST_BYTES])
    elif item is None or isinstance(item, bool | int | float | complex | str | bytes | np.generic):
        digest.update(repr(item).encode())
    elif isinstance(item, Mapping):
        for key, value in item.items():
            _add(digest, key)
            _add(digest, value)
    elif isinstance(item, tuple | list):
        for each in item:
            _add(digest, each)
    digest.update(type(item).__qualname__.encode())
