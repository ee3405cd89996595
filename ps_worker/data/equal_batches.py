"""Data split into as many batches on every replica: all-reduces of gradients need a partner for each.

Every window of ``replicas * batch_size`` samples of the common order is dealt to the replicas in turn. The remaining
samples are dealt, too, so the last batches differ by one sample at most. If fewer samples than replicas remain, they
join the window before: some replicas get one sample more in their last batch. Each sample is used once, and none is
repeated as padding.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from ps_protocol.errors import ConfigError
from ps_worker.data.files.batches import FileBatches
from ps_worker.data.same_items import SameItems
from ps_worker.data.samples import (
    OwnPart,
    common_order,
    iterates_by_itself,
    kept_arguments,
    own_iteration_refused,
    refuse_split_data,
)

T = TypeVar("T")

#: Samplers whose order is common to all by construction.
_COMMON = (SequentialSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler)

Verify = Callable[[bytes], None]
"""Called with a digest of an epoch's order; raises if another replica's digest differs."""


def windows(count: int, window: int, replicas: int, *, drop_last: bool) -> list[tuple[int, int]]:
    """First and last (exclusive) of ``count`` samples in each step. Raises ConfigError if a replica would get no
    sample.
    """
    full = count // window
    ends = [(each * window, (each + 1) * window) for each in range(full)]
    rest = count - full * window
    if drop_last or not rest:
        return ends
    if rest >= replicas:
        return [*ends, (full * window, count)]
    if not ends:
        raise too_few(count, replicas)
    return [*ends[:-1], (ends[-1][0], count)]


def too_few(count: int, replicas: int) -> ConfigError:
    """The error for an epoch in which a replica would have nothing."""
    return ConfigError(
        "the data has fewer samples than there are replicas",
        expected=f"at least {replicas}",
        actual=str(count),
        remedy="use fewer replicas",
    )


def not_counted(samples: int) -> None:
    """Counts nothing."""


class EqualBatches(OwnPart, Sampler[list[Any]]):
    """The batches of one replica. Each iteration takes the next epoch's order, or that which ``set_epoch`` named."""

    def __init__(
        self,
        source: Iterable[Any],
        batch_size: int,
        drop_last: bool,
        place: tuple[int, int, int],
        epochs: Iterator[int],
        verify: Verify | None,
        on_samples: Callable[[int], None] = not_counted,
    ) -> None:
        """``place``: rank, number of replicas, their common seed. ``on_samples`` gets the samples of each batch."""
        self._source, self._batch_size, self._drop_last = source, batch_size, drop_last
        self._rank, self._replicas, self._seed = place
        self._epochs = epochs
        self._verify = verify
        self._on_samples = on_samples

    @property
    def whole(self) -> object:
        """What all replicas have."""
        return self._source

    @property
    def own_length(self) -> int | None:
        """About how many samples this replica's batches have."""
        try:
            return len(range(self._rank, len(self._source), self._replicas))  # type: ignore[arg-type]  # the next line
        except TypeError:
            return None

    def set_epoch(self, epoch: int) -> None:
        """All iterations from now on have the order of ``epoch``, until it is set again."""
        self._epochs = itertools.repeat(epoch)

    def start_epochs(self, first: int) -> None:
        """The next iteration has the order of epoch ``first``, and those after it the orders that follow."""
        self._epochs = itertools.count(first)

    def __iter__(self) -> Iterator[list[Any]]:
        order = list(common_order(self._source, self._seed, next(self._epochs)))
        if self._verify is not None:
            self._verify(digest(order))
        for first, end in self._windows(len(order)):
            batch = order[first + self._rank : end : self._replicas]
            self._on_samples(len(batch))
            yield batch

    def __len__(self) -> int:
        return len(self._windows(len(self._source)))  # type: ignore[arg-type]  # TypeError as from the source itself

    def _windows(self, count: int) -> list[tuple[int, int]]:
        return windows(count, self._replicas * self._batch_size, self._replicas, drop_last=self._drop_last)


class EqualTurns(OwnPart, Sampler[T]):
    """Every ``replicas``-th element of a batch sampler of the user's own, whose batches are taken as they are.

    Each iteration takes the next epoch's order, or that which ``set_epoch`` named.
    """

    def __init__(
        self,
        source: Iterable[T],
        place: tuple[int, int, int],
        epochs: Iterator[int],
        verify: Verify | None,
        on_samples: Callable[[int], None],
    ) -> None:
        self._source = source
        self._rank, self._replicas, self._seed = place
        self._epochs = epochs
        self._verify = verify
        self._on_samples = on_samples

    @property
    def whole(self) -> object:
        """What all replicas have."""
        return self._source

    def set_epoch(self, epoch: int) -> None:
        """All iterations from now on have the order of ``epoch``, until it is set again."""
        self._epochs = itertools.repeat(epoch)

    def start_epochs(self, first: int) -> None:
        """The next iteration has the order of epoch ``first``, and those after it the orders that follow."""
        self._epochs = itertools.count(first)

    def __iter__(self) -> Iterator[T]:
        order = list(common_order(self._source, self._seed, next(self._epochs)))
        if self._verify is not None:
            self._verify(digest(order))
        self._check(len(order))
        for element in order[self._rank :: self._replicas]:
            self._on_samples(len(element) if isinstance(element, list | tuple) else 1)
            yield element

    def __len__(self) -> int:
        return len(self._source) // self._replicas  # type: ignore[arg-type]  # TypeError as from the source itself

    def _check(self, count: int) -> None:
        if count % self._replicas:
            raise ConfigError(
                "the batches of this sampler cannot be dealt to the replicas",
                expected=f"a multiple of {self._replicas}",
                actual=str(count),
                remedy="give the DataLoader batch_size= and a sampler, whose last batches are then dealt evenly",
            )


class EqualStream(OwnPart, IterableDataset[list[Any]]):
    """The batches of one replica out of a stream that all replicas read alike, one window ahead."""

    def __init__(
        self,
        source: Iterable[Any],
        batch_size: int,
        drop_last: bool,
        rank: int,
        replicas: int,
        on_samples: Callable[[int], None] = not_counted,
    ) -> None:
        self._source, self._batch_size, self._drop_last = source, batch_size, drop_last
        self._rank, self._replicas = rank, replicas
        self._on_samples = on_samples
        #: Compares the first items with those of the other workers.
        self.same: SameItems | None = None

    @property
    def whole(self) -> object:
        """What all replicas have."""
        return self._source

    def __iter__(self) -> Iterator[list[Any]]:
        for batch in self._batches():
            self._on_samples(len(batch))
            yield batch

    def _batches(self) -> Iterator[list[Any]]:
        window, held = self._replicas * self._batch_size, list[Any]()
        items = iter(self._source)
        for item in items if self.same is None else self.same.watch(items, checks=True):
            held.append(item)
            # Kept back until enough items follow for another step.
            if len(held) == window + self._replicas:
                yield held[self._rank : window : self._replicas]
                held = held[window:]
        for first, end in windows(len(held), window, self._replicas, drop_last=self._drop_last):
            yield held[first + self._rank : end : self._replicas]


def equal_share(
    loader: Any,
    rank: int,
    replicas: int,
    seed: int,
    epochs: Iterator[int],
    verify: Verify | None,
    on_samples: Callable[[int], None] = not_counted,
) -> DataLoader[Any]:
    """A loader of this replica's part of ``loader``. Raises ConfigError for what cannot be split equally.

    ``on_samples`` gets the number of samples of each batch. ``verify`` is called for the user's own samplers, never for
    streams.
    """
    if isinstance(loader, FileBatches):
        raise ConfigError(
            "rows of files cannot be split into as many batches for each replica",
            expected="a DataLoader",
            actual="the batches of files.read",
            remedy="train them under the strategy parameter_server or central_storage, or with cluster.files",
        )
    if not isinstance(loader, DataLoader):
        raise ConfigError(
            "this cannot be split into as many batches for each replica",
            expected="a DataLoader",
            actual=type(loader).__name__,
            remedy="wrap it in a torch.utils.data.DataLoader",
        )
    if iterates_by_itself(loader):
        raise own_iteration_refused(loader)
    refuse_split_data(loader)
    arguments = kept_arguments(loader)
    if isinstance(loader.dataset, IterableDataset):
        return _stream(loader, rank, replicas, arguments, on_samples)
    place = rank, replicas, seed
    if loader.batch_size is None:
        source: Any = loader.batch_sampler if loader.batch_sampler is not None else loader.sampler
        turns = EqualTurns(source, place, epochs, None if is_common(source) else verify, on_samples)
        if loader.batch_sampler is not None:
            return DataLoader(loader.dataset, batch_sampler=turns, **arguments)
        return DataLoader(loader.dataset, batch_size=None, sampler=turns, **arguments)
    source = loader.sampler
    checked = None if is_common(source) else verify
    batches = EqualBatches(source, loader.batch_size, loader.drop_last, place, epochs, checked, on_samples)
    return DataLoader(loader.dataset, batch_sampler=batches, **arguments)


def _stream(
    loader: DataLoader[Any], rank: int, replicas: int, arguments: dict[str, Any], on_samples: Callable[[int], None]
) -> DataLoader[Any]:
    if loader.num_workers or loader.batch_size is None:
        raise ConfigError(
            "an iterable dataset is dealt to replicas in the training process",
            expected="num_workers=0 and a batch_size",
            actual=f"num_workers={loader.num_workers}, batch_size={loader.batch_size}",
            remedy="give the DataLoader those, or use a dataset with a length, or the strategy parameter_server",
        )
    iterable: IterableDataset[Any] = loader.dataset  # type: ignore[assignment]  # as was asked
    stream = EqualStream(iterable, loader.batch_size, loader.drop_last, rank, replicas, on_samples)
    return DataLoader(stream, batch_size=None, **arguments)


def is_common(source: object) -> bool:
    """Whether all workers get the same order of ``source`` by construction."""
    if type(source) is BatchSampler:
        source = source.sampler
    return type(source) in _COMMON


def digest(order: Sequence[object]) -> bytes:
    """A short name of ``order``, the same for equal ones."""
    return hashlib.blake2b(repr(order).encode(), digest_size=8).digest()
