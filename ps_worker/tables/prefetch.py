"""Requests the rows of a batch in one message per shard and, where the mode allows it, during another batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

from ps_protocol.errors import InvalidRequest
from ps_worker.data.files.batches import FileBatches, Taken
from ps_worker.data.leased_loader import LeasedLoader
from ps_worker.tables.batch import RowRequest
from ps_worker.tables.binding import PreparedRows, TableBinding, bound_of
from ps_worker.tables.modules import Embedding, EmbeddingBag, EmbeddingBags
from ps_worker.tables.table import TableModule

T = TypeVar("T")

#: The ids of a batch: by module, or by name of a feature of some EmbeddingBags.
BatchIds = Mapping[Any, Any]


@dataclass(frozen=True, slots=True)
class PrefetchedRows:
    """The prepared rows of one batch, by model."""

    readies: list[tuple[TableBinding, list[PreparedRows]]]

    def discard(self) -> None:
        """Drop the rows: the loop has finished the batch."""
        for bound, readies in self.readies:
            bound.discard(readies)


class Prefetch(Generic[T]):
    """What ``Cluster.prefetch`` returns. Used by the training thread; each iteration is one of the loader."""

    def __init__(
        self,
        loader: Iterable[T],
        ids_of: Callable[[T], BatchIds],
        modules: Callable[[], Iterable[TableModule]],
        lookahead: Callable[[], int],
    ) -> None:
        self._loader = loader
        self._ids_of = ids_of
        self._modules = modules
        self._lookahead = lookahead

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]  # TypeError as from the loader itself

    def __iter__(self) -> Iterator[T]:
        # A leased batch counts as trained when the next one is requested, so that must not happen early. Files tell one
        # from the other.
        loader: Any = self._loader
        leased, files = isinstance(loader, LeasedLoader), isinstance(loader, FileBatches)
        batches: Iterator[Taken[T] | None] = loader.taken() if files else map(Taken, loader)
        coming: tuple[Taken[T], PrefetchedRows] | None = None
        present: PrefetchedRows | None = None
        try:
            while True:
                if coming is None:
                    taken = next(batches, None)
                    if taken is None:
                        return
                    coming = taken, self._ask(taken.batch, 0)
                taken, present = coming
                coming = None
                if self._lookahead() and not leased:
                    following = next(batches, None)
                    if following is not None:
                        coming = following, self._ask(following.batch, 1)
                    elif not files:
                        batches = iter(())
                taken.handed_out()
                yield taken.batch
                present.discard()
                taken.finished()
        finally:
            for prepared in (present, coming[1] if coming else None):
                if prepared is not None:
                    prepared.discard()

    def _ask(self, batch: T, ahead: int) -> PrefetchedRows:
        by_model: dict[TableBinding, list[RowRequest]] = {}
        for request in self._requests(self._ids_of(batch)):
            by_model.setdefault(bound_of(request.table), []).append(request)
        return PrefetchedRows([(bound, bound.prepare(requests, ahead)) for bound, requests in by_model.items()])

    def _requests(self, ids: BatchIds) -> Iterator[RowRequest]:
        features: dict[str, torch.Tensor] = {}
        for key, value in ids.items():
            if isinstance(key, Embedding | EmbeddingBag):
                yield key.request(value)
            elif isinstance(key, EmbeddingBags):
                yield from key.requests(value)
            else:
                features[key] = value
        if features:
            yield from self._by_feature(features)

    def _by_feature(self, features: dict[str, torch.Tensor]) -> Iterator[RowRequest]:
        found: set[str] = set()
        for module in self._modules():
            if isinstance(module, EmbeddingBags) and features.keys() & module.features.keys():
                wanted = {name: features[name] for name in module.features if name in features}
                found |= wanted.keys()
                yield from module.requests(wanted)
        if unknown := features.keys() - found:
            raise InvalidRequest(
                "prefetch() was given ids that belong to no module",
                expected="modules, or names of features of embedding_bags(...)",
                actual=", ".join(map(str, sorted(unknown, key=str))),
            )
