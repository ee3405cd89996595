"""The events of a window as a dataset: its items are whole batches, so that a lease is of batches."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from .events import Stream


class Batch(NamedTuple):
    """``Events`` as tensors."""

    #: int64 [1]: the number of the batch in the whole stream.
    number: Tensor
    #: float32 [n, 2].
    numbers: Tensor
    #: int64 [n].
    users: Tensor
    #: int64 [n, 1 + history]: the item shown, then those before.
    items: Tensor
    #: int64 [n, 1 + history].
    topics: Tensor
    #: float32 [n], 1 for a click.
    labels: Tensor

    def to(self, device: torch.device) -> Batch:
        """The same on ``device``."""
        return Batch(*(each.to(device) for each in self))


class Window(Dataset[Batch]):
    """The batches of one window, in the order of time; or each ``every``-th of them."""

    def __init__(self, stream: Stream, window: int, size: int, every: int = 1) -> None:
        """``size``: events of a batch."""
        self._stream, self._window, self._size, self._every = stream, window, size, every
        self._batches = -(-stream.events // size)

    def __len__(self) -> int:
        return -(-self._batches // self._every)

    def __getitem__(self, index: int) -> Batch:
        if not 0 <= index < len(self):
            raise IndexError(index)
        place = index * self._every
        events = self._stream.draw(self._window, place * self._size, self._size)
        items = torch.from_numpy(events.items)
        return Batch(
            torch.tensor([self._window * self._batches + place]),
            torch.from_numpy(events.numbers),
            torch.from_numpy(events.users),
            items,
            self._stream.topic_of(items),
            torch.from_numpy(events.labels),
        )

    def loader(self) -> DataLoader[Batch]:
        """What ``cluster.shard`` leases."""
        return DataLoader(self, batch_size=None)
