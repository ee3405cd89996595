"""The datasets that a worker shares with others: their names, their epochs, and the leases held on them."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from torch.utils.data import DataLoader

from ps_protocol.cluster.exchange import ExchangeKey
from ps_protocol.cluster.view import Role
from ps_protocol.errors import ConfigError, PsError
from ps_worker.data import samples
from ps_worker.data.equal_batches import EqualStream, equal_share, is_common
from ps_worker.data.files.batches import Dataset, FileBatches, LeasedRows, LeasedStretches, ShareStretches
from ps_worker.data.leased_loader import LeasedItems, can_lease, leased
from ps_worker.data.same_items import SameItems
from ps_worker.session.reporting import log
from ps_worker.session.session import Session


def share_of(session: Session) -> samples.Share:
    """A worker's part of the data: by rank among the expected workers, in an elastic job among the live ones."""
    if session.config.role is not Role.WORKER:
        return samples.Share(0, 1, session.seed)
    expected = session.view.expected_workers
    if session.rank < expected:
        return samples.Share(session.rank, expected, session.seed)
    ranks = session.workers
    return samples.Share(ranks.index(session.rank), len(ranks), session.seed)


def _both(first: Callable[[int], None], second: Callable[[int], None], count: int) -> None:
    first(count)
    second(count)


class Datasets:
    """Used from the training thread."""

    def __init__(
        self, session: Session, idle: Callable[[], AbstractContextManager[None]], default_name: str = "data"
    ) -> None:
        """``idle()`` is entered while the training thread waits for leased data.

        ``default_name``: the name of the first unnamed dataset; a number is appended for later ones.
        """
        self._default_name = default_name
        self._session = session
        self._idle = idle
        #: A loader keeps its name when it is sharded again, and a name keeps its epochs.
        self._names: weakref.WeakKeyDictionary[DataLoader[Any] | FileBatches, str] = weakref.WeakKeyDictionary()
        self._numbers = itertools.count()
        self._epochs: dict[str, Iterator[int]] = {}
        self._compared_numbers = itertools.count()
        self._leased: weakref.WeakSet[LeasedItems] = weakref.WeakSet()

    @property
    def leased(self) -> list[LeasedItems]:
        """Datasets that may have leases."""
        return list(self._leased)

    def shard(self, loader: Any, lease: bool | None, name: str | None, even: bool = False) -> Any:
        """The worker's part of ``loader``. Raises ConfigError where it cannot be split, was, or is not leased."""
        if even and lease:
            raise ConfigError("shard() is given lease=True and even=True", expected="one of them", actual="both")
        if isinstance(loader, FileBatches) and not loader.split and not even:
            return self.files(loader.data.seeded(self._session.seed), lease, self._name_of(loader, name))
        samples.refuse_split_data(loader)
        name = self._name_of(loader, name)
        epochs = self._epochs.setdefault(name, itertools.count()) if name else itertools.count()
        record = self._session.progress.record_samples
        if even:
            share = share_of(self._session)
            verify = self._same_items("sampler", share, None).verify if share.world_size > 1 else None
            made = equal_share(loader, share.rank, share.world_size, share.seed, epochs, verify, record)
            return self._compared(made, share)
        if lease and not can_lease(loader):
            raise ConfigError(
                "shard() cannot lease this",
                expected="a DataLoader of a dataset and a sampler with a length",
                actual=type(loader).__name__,
                remedy="leave lease=True out: it is split among the workers that live when shard() is called",
            )
        if self._session.config.role is Role.WORKER and (
            lease or (lease is None and self._session.elastic and can_lease(loader))
        ):
            loader = leased(loader, name, self._session, epochs, record, self._idle)
            self._leased.add(loader.leases)
            return loader
        share = share_of(self._session)
        return self._compared(samples.shard(loader, share, epochs, record), share)

    def files(self, data: Dataset, lease: bool | None, name: str | None) -> FileBatches:
        """The worker's part of the rows of ``data``: leased, or with ``lease=False`` by rank; all for an evaluator."""
        progress = self._session.progress
        if self._session.config.role is not Role.WORKER or lease is False:
            epochs = self._epochs.setdefault(name, itertools.count()) if name else itertools.count()
            return FileBatches(data, ShareStretches(data.layout, share_of(self._session), epochs), progress)
        name = name or self._next_name()
        rows = LeasedRows(data, name, self._session, self._epochs.setdefault(name, itertools.count()))
        self._leased.add(rows)
        return FileBatches(data, LeasedStretches(rows, self._idle), progress)

    def _compared(self, part: Any, share: samples.Share) -> Any:
        """``part``; its first items are compared with those of the other workers if they might differ."""
        found = part.dataset if isinstance(part, DataLoader) else part
        source: Any = None
        if isinstance(found, samples.ShareIterable | EqualStream):
            source, what = found, "iterable dataset"
        elif isinstance(part, DataLoader):
            what = "sampler"
            # torch's own samplers yield the same on all workers.
            chosen = (part.batch_sampler, part.sampler, getattr(part.batch_sampler, "sampler", None))
            own = [each for each in chosen if isinstance(each, samples.ShareSampler)]
            source = next((each for each in own if not is_common(each.whole)), None)
        if source is None or share.world_size < 2:
            return part
        source.same = self._same_items(what, share, samples.length_of(source.whole))
        if isinstance(part, samples.ShareLoader | samples.OwnIteration):
            part.on_samples = partial(_both, part.on_samples, source.same.check)
        return part

    def _same_items(self, what: str, share: samples.Share, length: int | None) -> SameItems:
        key = ExchangeKey("first items", next(self._compared_numbers))
        return SameItems(what, share.world_size, length, partial(self._compare, key))

    def _compare(self, key: ExchangeKey, own: str) -> dict[int, str] | None:
        """The values of all workers; None if some are missing. Does not wait for workers or the coordinator."""
        try:
            state = self._session.try_exchange(key, own.encode())
        except PsError as error:
            log.debug("the first items of workers are not compared now: %s", error)
            return None
        return {r: told.decode(errors="replace") for r, told in state.payloads.items()} if state.complete else None

    def _name_of(self, loader: object, name: str | None) -> str:
        if not isinstance(loader, DataLoader | FileBatches):
            return ""
        if loader not in self._names or name:
            self._names[loader] = name or self._next_name()
        return self._names[loader]

    def _next_name(self) -> str:
        number = next(self._numbers)
        return self._default_name + (f"-{number}" if number else "")
