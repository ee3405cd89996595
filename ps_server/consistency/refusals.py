"""Why a Tracker refuses a worker or a push, as errors."""

from __future__ import annotations

from ps_protocol.errors import Fenced, InvalidRequest
from ps_server.consistency.events import Position, PushInfo, WorkerKey


def not_live(worker: WorkerKey, incarnation: int | None) -> Fenced:
    """``incarnation``: the live one of its rank."""
    return Fenced(
        f"{worker} is not a live member of the job",
        expected="a live worker" if incarnation is None else str(WorkerKey(worker.rank, incarnation)),
        actual=str(worker),
        remedy="its lease ended or a newer process took its rank: start the worker again",
    )


def no_stream(worker: WorkerKey) -> InvalidRequest:
    """It has not attached."""
    return InvalidRequest(
        f"{worker} has not opened a stream of this model", remedy="open the stream before anything else"
    )


def out_of_range(push: PushInfo, limit: int) -> InvalidRequest:
    """``limit``: phases, clocks and sequences are below."""
    return InvalidRequest(
        f"push {push.sequence} of {push.worker} names a position that is out of range",
        expected=f"phase, clock and sequence below {limit}",
        actual=str(push.position),
    )


def does_not_rise(push: PushInfo, own: Position) -> InvalidRequest:
    """``own``: where its worker stands."""
    return InvalidRequest(
        f"push {push.sequence} of {push.worker} does not advance its clock",
        expected=f"a position above {own}, its clock from 1",
        actual=str(push.position),
        remedy="continue from the position the shard named when the stream opened",
    )


def stands_out_of_range(worker: WorkerKey, position: Position, limit: int) -> InvalidRequest:
    """``limit``: phases and clocks are below."""
    return InvalidRequest(
        f"the position of {worker} is out of range",
        expected=f"phase and clock below {limit}",
        actual=str(position),
    )
