"""The result of an event, and the view of the cluster with its revision: shared by the parts of ClusterState."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from ps_protocol.cluster.view import ClusterView

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class StateChange(Generic[T]):
    """The result of an event; ``reason`` describes what changed, and is empty if nothing did."""

    value: T
    reason: str = ""
    #: Whether something was lost, which is logged as a warning.
    loss: bool = False


class CurrentView:
    """The newest view. Its revision rises with every change and never falls."""

    def __init__(self, view: ClusterView) -> None:
        self.now = view

    def change(self, **changes: Any) -> None:
        """Replace these fields of the view, as one new revision."""
        self.now = replace(self.now, revision=self.now.revision + 1, **changes)
