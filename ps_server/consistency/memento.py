"""What of a Tracker must outlive its process: enough to know every push in the log again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self

from ps_server.consistency.events import START, Position, Standing, WorkerKey


@dataclass(frozen=True, slots=True)
class TrackerMemento:
    """Pushes that are held for an open round are not in it: they have not been acknowledged and will come again."""

    version: int = 0
    applied: Position = START
    highest: Position = START
    standings: tuple[Standing, ...] = ()
    outcomes: Mapping[str, int] | None = None
    staleness: tuple[int, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """As JSON's types."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Raises KeyError or TypeError for what ``to_json`` did not make."""
        standings = tuple(
            Standing(WorkerKey(**item["worker"]), Position(*item["position"]), item["last_sequence"])
            for item in data["standings"]
        )
        return cls(
            data["version"],
            Position(*data["applied"]),
            Position(*data["highest"]),
            standings,
            data["outcomes"],
            tuple(data["staleness"]),
        )
