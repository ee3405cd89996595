"""Puts the observers in place for the time of a run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from simulation.observers.coordinator import CoordinatorObservers
from simulation.observers.relays import RelayObservers
from simulation.observers.shards import ShardObservers
from simulation.observers.subjects import Subjects, Wrappers
from simulation.observers.workers import WorkerObservers


class Observers:
    """All of them, of one run."""

    def __init__(self, subjects: Subjects) -> None:
        self._shards = ShardObservers(subjects)
        self._workers = WorkerObservers(subjects)
        self._coordinator = CoordinatorObservers(subjects)
        self._relays = RelayObservers(subjects)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Within the block the judge hears of everything."""
        before: list[tuple[Any, str, Any]] = []
        try:
            for holder, name, wrapper in self._wrappers():
                original = vars(holder)[name]
                before.append((holder, name, original))
                setattr(holder, name, wrapper(original))
            yield
        finally:
            for holder, name, original in reversed(before):
                setattr(holder, name, original)
            self._shards.forget()

    def _wrappers(self) -> Wrappers:
        yield from self._shards.wrappers()
        yield from self._workers.wrappers()
        yield from self._coordinator.wrappers()
        yield from self._relays.wrappers()
