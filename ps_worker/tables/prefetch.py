"""Asks for the rows of a batch in one message per shard, and, where the mode lets it, while another batch computes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

from ps_protocol.errors import InvalidRequest
from ps_worker.leased_loader import LeasedLoader
from ps_worker.tables.batch import Request
from ps_worker.tables.bound import BoundTables, Ready, bound_of
from ps_worker.tables.modules import Embedding, EmbeddingBag, EmbeddingBags
from ps_worker.tables.table import TableModule

T = TypeVar("T")

#: The ids of a batch: by module, or by name of a feature of some EmbeddingBags.
BatchIds = Mapping[Any, Any]


@dataclass(frozen=True, slots=True)
class Prepared:
    """Rows of one batch that were asked for, by model."""

    readies: list[tuple[BoundTables, list[Ready]]]

    def discard(self) -> None:
        """The loop is done with the batch."""
        for bound, readies in self.readies:
            bound.discard(readies)


class Prefetch(Generic[T]):
    """What ``cluster.prefetch`` returns. Used by the training thread; each iteration is one of the loader."""

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
        batches = iter(self._loader)
        # A batch counts as trained when leased data is asked for the next one, so that must not be early.
        leased = isinstance(self._loader, LeasedLoader)
        coming: tuple[T, Prepared] | None = None
        present: Prepared | None = None
        try:
            while True:
                if coming is None:
                    for batch in batches:
                        coming = batch, self._ask(batch, 0)
                        break
                    else:
                        return
                batch, present = coming
                coming = None
                if self._lookahead() and not leased:
                    for following in batches:
                        coming = following, self._ask(following, 1)
                        break
                    else:
                        batches = iter(())
                yield batch
                present.discard()
        finally:
            for prepared in (present, coming[1] if coming else None):
                if prepared is not None:
                    prepared.discard()

    def _ask(self, batch: T, ahead: int) -> Prepared:
        by_model: dict[BoundTables, list[Request]] = {}
        for request in self._requests(self._ids_of(batch)):
            by_model.setdefault(bound_of(request.table), []).append(request)
        return Prepared([(bound, bound.prepare(requests, ahead)) for bound, requests in by_model.items()])

    def _requests(self, ids: BatchIds) -> Iterator[Request]:
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

    def _by_feature(self, features: dict[str, torch.Tensor]) -> Iterator[Request]:
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
