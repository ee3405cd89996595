"""What of a Tracker must outlive its process: enough to know every push in the log again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from ps_protocol.records import fields_of
from ps_server.consistency.events import START, ParticipantStatus, Position, Verdict, WorkerKey

STALENESS_BUCKETS = 64
"""Staleness is counted exactly below this, less one; the last bucket counts all beyond."""

FAILED = "failed"
"""The name under which pushes are counted whose step raised; there only where one has."""


@dataclass(slots=True)
class Counts:
    """For status pages. Written by one Tracker; of constant size."""

    #: Pushes by outcome name. A held push is counted once its round is taken, as applied.
    outcomes: dict[str, int] = field(default_factory=lambda: {v.value: 0 for v in Verdict if v is not Verdict.HOLD})
    #: ``staleness[i]``: pushes applied with staleness i.
    staleness: list[int] = field(default_factory=lambda: [0] * STALENESS_BUCKETS)

    def failed(self, pushes: int) -> None:
        """The step that so many pushes made raised, and was skipped: a version that is as the one before."""
        self.outcomes[Verdict.APPLY.value] -= pushes
        self.outcomes[FAILED] = self.outcomes.get(FAILED, 0) + pushes


@dataclass(frozen=True, slots=True)
class TrackerState:
    """Pushes that are held for an open round are not in it: they have not been acknowledged and will come again."""

    version: int = 0
    applied: Position = START
    highest: Position = START
    standings: tuple[ParticipantStatus, ...] = ()
    outcomes: Mapping[str, int] = field(default_factory=dict)
    staleness: tuple[int, ...] = ()
    #: Of a model whose gradients are clipped: this shard's part of the last rounds' squared norms.
    norms: tuple[tuple[Position, float], ...] = ()

    def to_json(self) -> dict[str, Any]:
        """As JSON's types."""
        return {
            "version": self.version,
            "applied": self.applied,
            "highest": self.highest,
            "standings": [
                {"worker": fields_of(each.worker), "position": each.position, "last_sequence": each.last_sequence}
                for each in self.standings
            ],
            "outcomes": dict(self.outcomes),
            "staleness": self.staleness,
            **({"norms": self.norms} if self.norms else {}),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Raises KeyError or TypeError for what ``to_json`` did not make."""
        standings = tuple(
            ParticipantStatus(WorkerKey(**item["worker"]), Position(*item["position"]), item["last_sequence"])
            for item in data["standings"]
        )
        return cls(
            data["version"],
            Position(*data["applied"]),
            Position(*data["highest"]),
            standings,
            data["outcomes"] or {},
            tuple(data["staleness"]),
            tuple((Position(*position), squared_norm) for position, squared_norm in data.get("norms", ())),
        )
