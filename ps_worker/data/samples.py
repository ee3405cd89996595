"""The samples of one worker in a fixed split: every world_size-th element of an order that all workers have."""

from __future__ import annotations

import copy
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeVar

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)
from torch.utils.data._utils import worker as loader_worker

from ps_protocol.errors import ConfigError
from ps_worker.data.same_items import SameItems

T = TypeVar("T")
L = TypeVar("L", bound=DataLoader[Any])

#: Arguments of a DataLoader that do not depend on what it samples.
_KEPT_ARGUMENTS = (
    "num_workers",
    "collate_fn",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "generator",
    "prefetch_factor",
    "persistent_workers",
    "in_order",
)


@dataclass(frozen=True, slots=True)
class Share:
    """Part ``rank`` of ``world_size`` equal ones. ``seed`` is the job's, so that all shuffle alike."""

    rank: int
    world_size: int
    seed: int

    def of(self, length: int) -> int:
        """How many of ``length`` elements are in this part."""
        return (length - self.rank + self.world_size - 1) // self.world_size


class OwnPart(ABC):
    """Base of sources that yield one worker's part of ``whole``. It must not be split again."""

    @property
    @abstractmethod
    def whole(self) -> object:
        """The source that was split."""

    @property
    def own_length(self) -> int | None:
        """The number of elements in this part; None if unknown."""
        return length_of(self)


class ShareSampler(OwnPart, Sampler[T]):
    """The worker's own elements of a sampler that all workers have. Used by one DataLoader in its own process.

    Each iteration takes the next epoch. The order is that of ``source``; torch's random samplers are drawn from (seed,
    epoch) instead of their own generator, so all workers draw the same order. Element k of worker r is element ``k *
    world_size + r`` of that order: the k-th batches of all workers together are one window of it, every element is
    taken by exactly one worker, and none is repeated as padding. Parts differ by at most one element.
    """

    def __init__(self, source: Iterable[T], share: Share, epochs: Iterator[int]) -> None:
        self._source = source
        self._share = share
        self._epochs = epochs
        #: Compares the first elements with those of other workers; for samplers of the user's own.
        self.same: SameItems | None = None

    @property
    def whole(self) -> object:
        """The sampler that all workers have."""
        return self._source

    def start_epochs(self, first: int) -> None:
        """The next iteration has the order of epoch ``first``, and those after it the orders that follow."""
        self._epochs = itertools.count(first)

    def __iter__(self) -> Iterator[T]:
        order = common_order(self._source, self._share.seed, next(self._epochs))
        if self.same is not None:
            order = self.same.watch(order, checks=True)
        return islice(order, self._share.rank, None, self._share.world_size)

    def __len__(self) -> int:
        return self._share.of(len(self._source))  # type: ignore[arg-type]  # TypeError as from the source itself


class ShareSubset(OwnPart, Subset[T]):
    """The worker's own items of a dataset."""

    @property
    def whole(self) -> object:
        """The dataset with all items."""
        return self.dataset


class ShareIterable(OwnPart, IterableDataset[T]):
    """The worker's own items of an iterable dataset that yields the same items in the same order on every worker.

    Iterated in the training process, or in each of a DataLoader's processes: these share the worker's items among them.
    ``get_worker_info()`` is hidden from the dataset meanwhile, so a dataset that splits itself by it is split only
    once.
    """

    def __init__(self, source: IterableDataset[T], share: Share) -> None:
        self._source = source
        self._share = share
        #: Compares the first items with those of other workers.
        self.same: SameItems | None = None

    @property
    def whole(self) -> object:
        """The dataset that all workers have."""
        return self._source

    def __iter__(self) -> Iterator[T]:
        info = get_worker_info()
        loaders, loader = (info.num_workers, info.id) if info else (1, 0)
        first = self._share.rank + self._share.world_size * loader
        items = _unsplit(self._source)
        if self.same is not None and not loader:
            items = self.same.watch(items, checks=info is None)
        return islice(items, first, None, self._share.world_size * loaders)

    def __len__(self) -> int:
        return self._share.of(len(self._source))  # type: ignore[arg-type]  # TypeError as from the source itself


class OwnIteration(DataLoader[Any]):
    """The base of the class that ``with_own_iteration`` makes: checks the ``__iter__`` of the user's own class.

    The method must take its batches from ``DataLoader.__iter__``. If it read the dataset itself, or continued an
    iteration begun in the constructor, every worker would get all the data.
    """

    #: Called with the samples of each batch.
    on_samples: Callable[[int], None] = staticmethod(lambda samples: None)
    #: Whether torch's own ``__iter__`` has begun to read the part.
    _split = False

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        batched = self.batch_sampler is not None
        for batch in super().__iter__():
            if not self._split:
                raise own_iteration_refused(self)
            self.on_samples(batch_samples(batch) if batched else 1)
            yield batch

    def _get_iterator(self) -> Any:
        self._split = True
        return super()._get_iterator()


class ShareLoader(DataLoader[T]):
    """A DataLoader that reports how many samples it hands out. Used by the training loop."""

    #: Called with the samples of each batch.
    on_samples: Callable[[int], None] = staticmethod(lambda samples: None)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # a generator instead of torch's own iterator class
        batched = self.batch_sampler is not None
        for batch in super().__iter__():
            self.on_samples(batch_samples(batch) if batched else 1)
            yield batch


def shard(data: Any, share: Share, epochs: Iterator[int], on_samples: Callable[[int], None]) -> Any:
    """Return this worker's part of ``data``.

    - A ``DataLoader`` gives a ``DataLoader`` with the same arguments (``batch_size`` stays per worker) over this
      worker's elements of its sampler; with a ``batch_sampler`` of the user's, over every world_size-th batch. The
      user's own samplers are used unchanged and must yield the same on every worker. A subclass keeps its own
      ``__iter__`` if it takes its batches from ``DataLoader.__iter__``; otherwise its first batch raises ConfigError.
    - An ``IterableDataset``, alone or in a ``DataLoader``, gives every world_size-th item.
    - Another ``Dataset`` gives a ``Subset``: items rank, rank + world_size, …

    ``epochs`` gives the number of the next epoch. Raises ConfigError for anything else and for data that was split
    already.
    """
    if isinstance(data, DataLoader):
        loader = _shard_loader(data, share, epochs)
        loader.on_samples = on_samples
        return loader
    refuse_split_data(data)
    if isinstance(data, IterableDataset):
        return ShareIterable(data, share)
    if isinstance(data, Dataset) and hasattr(data, "__len__"):
        return ShareSubset(data, range(share.rank, len(data), share.world_size))
    raise ConfigError(
        "shard() cannot split this",
        expected="a DataLoader, an IterableDataset, or a Dataset with a length",
        actual=type(data).__name__,
        remedy="wrap it in a torch.utils.data.DataLoader",
    )


def batch_samples(batch: object) -> int:
    """Samples in ``batch``: the first dimension of its first tensor, else its length, else 1."""
    if isinstance(batch, torch.Tensor):
        return batch.shape[0] if batch.ndim else 1
    if isinstance(batch, Mapping):
        return batch_samples(next(iter(batch.values()))) if batch else 0
    if isinstance(batch, tuple | list):
        nested = batch and isinstance(batch[0], torch.Tensor | Mapping | tuple | list)
        return batch_samples(batch[0]) if nested else len(batch)
    return 1


def rebuilt(
    kind: type[L], loader: DataLoader[Any], sampler_of: Callable[[Iterable[Any]], Sampler[Any]], **changes: Any
) -> L:
    """A loader of ``kind`` with the arguments of ``loader`` but for its sampler, or batch sampler, and ``changes``.

    Raises ConfigError for data that is already split, and for a class with its own ``__iter__``.
    """
    if iterates_by_itself(loader):
        raise own_iteration_refused(loader)
    refuse_split_data(loader)
    arguments = kept_arguments(loader) | changes
    if loader.batch_size is None and loader.batch_sampler is not None:
        return kind(loader.dataset, batch_sampler=sampler_of(loader.batch_sampler), **arguments)
    sampler = sampler_of(loader.sampler)
    return kind(loader.dataset, batch_size=loader.batch_size, sampler=sampler, drop_last=loader.drop_last, **arguments)


def common_order(source: Iterable[T], seed: int, epoch: int) -> Iterator[T]:
    """The order of ``source`` in ``epoch``, the same on every worker of a job with this ``seed``."""
    return iter(_seeded(source, torch.Generator().manual_seed((seed + epoch) % 2**63)))


def iterates_by_itself(loader: DataLoader[Any]) -> bool:
    """Whether the class of ``loader`` has an ``__iter__`` of its own."""
    return type(loader).__iter__ not in (DataLoader.__iter__, ShareLoader.__iter__)


def own_iteration_refused(loader: DataLoader[Any]) -> ConfigError:
    """The error for a loader whose own ``__iter__`` cannot be split."""
    kind = next(each for each in type(loader).__mro__ if "__iter__" in each.__dict__ and each is not OwnIteration)
    return ConfigError(
        f"the __iter__ of {kind.__name__} is its own, and cannot be split",
        expected="an __iter__ that takes its batches from DataLoader.__iter__, in a fixed split (no lease)",
        actual=f"{kind.__module__}.{kind.__qualname__}.__iter__",
        remedy="give shard() a plain DataLoader, and do the rest in the training loop",
    )


def with_own_iteration(loader: DataLoader[Any], share: Share, epochs: Iterator[int]) -> OwnIteration:
    """A copy of ``loader``, of its own class, over this worker's part. Raises ConfigError for data that is already
    split.
    """
    refuse_split_data(loader)
    own: OwnIteration = copy.copy(loader)  # type: ignore[assignment]
    object.__setattr__(own, "__class__", type(type(loader).__name__, (OwnIteration, type(loader)), {}))
    # torch forbids these changes after the constructor; the copy is still under construction.
    own._DataLoader__initialized = False
    if isinstance(loader.dataset, IterableDataset):
        own.dataset = ShareIterable(loader.dataset, share)
    elif loader.batch_size is None and loader.batch_sampler is not None:
        own.batch_sampler = ShareSampler(loader.batch_sampler, share, epochs)
    else:
        own.sampler = ShareSampler(loader.sampler, share, epochs)
        if loader.batch_size is not None:
            own.batch_sampler = BatchSampler(own.sampler, loader.batch_size, loader.drop_last)
    own._iterator = None
    own._DataLoader__initialized = True
    return own


def _shard_loader(loader: DataLoader[Any], share: Share, epochs: Iterator[int]) -> ShareLoader[Any] | OwnIteration:
    if iterates_by_itself(loader):
        return with_own_iteration(loader, share, epochs)
    if isinstance(loader.dataset, IterableDataset):
        dataset: Dataset[Any] = ShareIterable(loader.dataset, share)
        arguments = kept_arguments(loader)
        return ShareLoader(dataset, batch_size=loader.batch_size, drop_last=loader.drop_last, **arguments)
    return rebuilt(ShareLoader, loader, lambda source: ShareSampler(source, share, epochs))


def kept_arguments(loader: DataLoader[Any]) -> dict[str, Any]:
    """The arguments of ``loader`` that do not depend on what it samples."""
    arguments: dict[str, Any] = {name: getattr(loader, name) for name in _KEPT_ARGUMENTS}
    if loader.pin_memory_device:
        arguments["pin_memory_device"] = loader.pin_memory_device
    return arguments


def refuse_split_data(data: object) -> None:
    """Raises ConfigError for data that the cluster, ``DistributedSampler`` or another program has split already."""
    for each in _parts(data):
        if isinstance(each, OwnPart):
            whole = length_of(each.whole)
            own = each.own_length
            raise ConfigError(
                "the data is split among the workers already, and would be split again",
                expected="all of the data, as for one process",
                actual="a part of it, from cluster.shard or its like"
                + ("" if whole is None or own is None else f": {own} of {whole}, from {type(each).__name__}"),
                remedy="split it once: leave cluster.shard out, or have the trainer leave the data as it is "
                "(Trainer(use_distributed_sampler=False))",
            )
        if _splits_by_rank(each):
            raise ConfigError(
                f"the data is split by a {type(each).__name__} already",
                expected="the loader as for one process",
                actual=type(each).__name__,
                remedy=f"leave the {type(each).__name__} out: the cluster, or the strategy, splits and shuffles by "
                "itself",
            )


def _parts(data: object) -> Iterator[object]:
    """``data`` and its sources: samplers, and nested datasets."""
    seen: set[int] = set()
    left: list[object] = [data]
    while left and len(seen) < _MOST_PARTS:
        each = left.pop()
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        yield each
        found = vars(each) if hasattr(each, "__dict__") else {}
        left += [found.get(name) for name in ("dataset", "sampler", "batch_sampler")]
        nested = found.get("datasets")
        left += list(nested.values() if isinstance(nested, Mapping) else nested or ()) if _is_nested(nested) else []


_MOST_PARTS = 1000
"""So many parts of a dataset are looked at."""


def _is_nested(value: object) -> bool:
    return isinstance(value, list | tuple | Mapping)


def _splits_by_rank(each: object) -> bool:
    """Whether ``each`` splits by process, as DistributedSampler and classes of accelerate and datasets do."""
    found = vars(each) if hasattr(each, "__dict__") else {}
    if isinstance(each, DistributedSampler) or getattr(found.get("_distributed"), "world_size", 1) > 1:
        return True
    if isinstance(each, Sampler | BatchSampler | IterableDataset):
        return any(
            isinstance(count := found.get(number), int) and count > 1 and rank in found
            for number, rank in (("num_replicas", "rank"), ("num_processes", "process_index"))
        )
    return False


def length_of(data: Any) -> int | None:
    """``len(data)``; None if it has no length."""
    try:
        return len(data)
    except TypeError:
        return None


def _seeded(source: Any, generator: torch.Generator) -> Any:
    """``source``; for one of torch's random samplers, a copy that draws from ``generator``."""
    if isinstance(source, RandomSampler | SubsetRandomSampler | WeightedRandomSampler):
        source = copy.copy(source)
        source.generator = generator
    elif type(source) is BatchSampler:
        source = copy.copy(source)
        source.sampler = _seeded(source.sampler, generator)
    return source


def _unsplit(dataset: IterableDataset[T]) -> Iterator[T]:
    """All items of ``dataset``, also inside a DataLoader's process, whose worker info is hidden while it works."""
    info = get_worker_info()
    end = object()

    def alone(function: Callable[..., Any], *arguments: object) -> Any:
        loader_worker._worker_info = None
        try:
            return function(*arguments)
        finally:
            loader_worker._worker_info = info

    items = alone(iter, dataset)
    while (item := alone(next, items, end)) is not end:
        yield item
