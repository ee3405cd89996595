"""Between what a Tracker keeps and the message that holds it on disk and between shards."""

from __future__ import annotations

from ps_protocol.v1 import shard_pb2 as pb
from ps_server.consistency.events import ParticipantStatus, Position, WorkerKey
from ps_server.consistency.tracker_state import TrackerState


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
