"""What of a Tracker must outlive its process, as JSON and as a message: enough to recognise every push of the log."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from ps_protocol.records import from_plain, to_plain
from ps_protocol.v1 import shard_pb2 as pb
from ps_server.consistency.events import START, ParticipantStatus, Position, Verdict, WorkerKey

STALENESS_BUCKETS = 64
"""Staleness is counted exactly below this, less one; the last bucket counts all beyond."""

_APPLIED = Verdict.APPLY.value  # the attribute of an enum is a function of Python

FAILED = "failed"
"""The name under which pushes are counted whose step raised; there only where one has."""


@dataclass(slots=True)
class Counts:
    """Counts of pushes for status pages. Written by one Tracker; of constant size."""

    #: Pushes by outcome name. A held push is counted once its round is taken, as applied.
    outcomes: dict[str, int] = field(default_factory=lambda: {v.value: 0 for v in Verdict if v is not Verdict.HOLD})
    #: ``staleness[i]``: pushes applied with staleness i.
    staleness: list[int] = field(default_factory=lambda: [0] * STALENESS_BUCKETS)

    def applied(self, staleness: int) -> None:
        """Count a push that is applied."""
        self.outcomes[_APPLIED] += 1
        self.staleness[staleness if staleness < STALENESS_BUCKETS else -1] += 1

    def failed(self, pushes: int) -> None:
        """Count ``pushes`` whose step raised: it was skipped, and its version has the values of the one before."""
        self.outcomes[_APPLIED] -= pushes
        self.outcomes[FAILED] = self.outcomes.get(FAILED, 0) + pushes


@dataclass(frozen=True, slots=True)
class TrackerState:
    """The state of a Tracker after its last update.

    It leaves out pushes that wait in an open round: they are not acknowledged, and their workers send them again.
    """

    version: int = 0
    applied: Position = START
    highest: Position = START
    standings: tuple[ParticipantStatus, ...] = ()
    outcomes: Mapping[str, int] = field(default_factory=dict)
    staleness: tuple[int, ...] = ()
    #: Of a model whose gradients are clipped: this shard's part of the last rounds' squared norms.
    norms: tuple[tuple[Position, float], ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Encode as JSON's types."""
        plain: dict[str, Any] = to_plain(self)
        if not self.norms:
            del plain["norms"]
        return plain

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Raises TypeError, ValueError or LookupError for what ``to_json`` did not make."""
        return from_plain(cls, {name: data[name] for name in cls.__match_args__ if name != "norms" or name in data})


def pushes_to_pb(state: TrackerState) -> pb.KnownPushes:
    """The message of ``state``."""
    return pb.KnownPushes(
        version=state.version,
        applied=position_to_pb(state.applied),
        highest=position_to_pb(state.highest),
        standings=[
            pb.WorkerStanding(
                worker=pb.WorkerId(rank=each.worker.rank, incarnation=each.worker.incarnation),
                position=position_to_pb(each.position),
                last_sequence=each.last_sequence,
            )
            for each in state.standings
        ],
        outcomes=state.outcomes,
        staleness_counts=state.staleness,
        norms=[
            pb.RoundNorm(position=position_to_pb(position), squared_norm=squared_norm)
            for position, squared_norm in state.norms
        ],
    )


def pushes_from_pb(message: pb.KnownPushes) -> TrackerState:
    """What ``message`` holds."""
    return TrackerState(
        message.version,
        position_from_pb(message.applied),
        position_from_pb(message.highest),
        tuple(
            ParticipantStatus(
                worker_from_pb(each.worker),
                position_from_pb(each.position),
                each.last_sequence,
            )
            for each in message.standings
        ),
        dict(message.outcomes),
        tuple(message.staleness_counts),
        tuple((position_from_pb(each.position), each.squared_norm) for each in message.norms),
    )


def worker_from_pb(message: pb.WorkerId) -> WorkerKey:
    """The worker that ``message`` names."""
    return WorkerKey(message.rank, message.incarnation)


def position_to_pb(position: Position) -> pb.Position:
    """The message of ``position``."""
    return pb.Position(phase=position.phase, clock=position.clock)


def position_from_pb(message: pb.Position) -> Position:
    """The position that ``message`` names."""
    return Position(message.phase, message.clock)
