"""Which workers use which model: those that have declared it and not closed it."""

from __future__ import annotations

from collections.abc import Mapping

from ps_protocol.cluster.view import Member

Uses = Mapping[str, Mapping[int, int]]
"""The incarnation of each worker, by model and rank. Never changed in place: a journal compares it with the last."""


class ModelUses:
    """Part of PlacementState. Workers that are not members any more count for nothing, and are forgotten in time."""

    def __init__(self) -> None:
        self._uses: dict[str, Mapping[int, int]] = {}

    @property
    def records(self) -> Uses:
        """All that ``restore`` needs."""
        return dict(self._uses)

    def restore(self, uses: Uses) -> None:
        """Take the uses of a journal."""
        self._uses = dict(uses)

    def begin(self, model: str, worker: Member, live: Mapping[int, Member]) -> None:
        """``worker`` uses ``model`` from now on."""
        known = self._uses.get(model, {})
        if known.get(worker.index) != worker.incarnation:
            self._uses[model] = {**_alive(known, live), worker.index: worker.incarnation}

    def end(self, model: str, rank: int, incarnation: int) -> bool:
        """End the use of ``model`` by this worker; returns whether it used it."""
        known = self._uses.get(model, {})
        if known.get(rank) != incarnation:
            return False
        self._uses[model] = {each: life for each, life in known.items() if each != rank}
        return True

    def forget(self, model: str) -> None:
        """The model is gone."""
        self._uses.pop(model, None)

    def ranks(self, model: str, live: Mapping[int, Member]) -> list[int]:
        """The workers among ``live``, by rank, that use ``model``, in ascending order."""
        return sorted(_alive(self._uses.get(model, {}), live))


def _alive(uses: Mapping[int, int], live: Mapping[int, Member]) -> dict[int, int]:
    return {rank: life for rank, life in uses.items() if rank in live and live[rank].incarnation == life}
