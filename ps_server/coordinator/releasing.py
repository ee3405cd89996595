"""Ends the use of models and drops them: the part of the driver that does so."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from ps_protocol.cluster.closed_model import ClosedModelAsk
from ps_protocol.cluster.view import Role
from ps_server.coordinator.changes import StateChange
from ps_server.coordinator.state import ClusterState
from ps_server.coordinator.views.publisher import Publisher


class ModelReleases:
    """Used on the driver's loop. Owns nothing: the state is the driver's."""

    def __init__(self, state: ClusterState, publisher: Publisher, settle: Callable[[StateChange[Any]], Any]) -> None:
        """``settle`` has a change on disk and told, and returns its value."""
        self._state = state
        self._publisher = publisher
        self._settle = settle

    async def close(self, rank: int, incarnation: int, ask: ClosedModelAsk, wait_seconds: float) -> Collection[int]:
        """See PlacementState.close; then wait up to ``wait_seconds`` (30 s at most) until no worker uses the model.

        Returns the ranks of those that do. Raises Fenced.
        """
        model, epoch = ask.model, ask.epoch
        placement = self._state.placement
        worker = self._state.membership.find(Role.WORKER, rank, incarnation)
        self._settle(placement.close(worker, model, epoch))

        def users() -> Collection[int]:
            view = self._state.view
            return () if view.was_released(model, epoch) else placement.uses.ranks(model, view.live(Role.WORKER))

        return await self._publisher.repeat(users, lambda ranks: not ranks, wait_seconds)

    def release(self, model: str, epoch: int = 0) -> int:
        """See PlacementState.release."""
        released: int = self._settle(self._state.placement.release(model, epoch))
        return released
