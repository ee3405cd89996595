"""When a push is applied and a pull is answered: the consistency modes, decided without tensors, threads or clocks."""

from ps_server.consistency.events import (
    FOREVER,
    OUTCOMES,
    ParticipantStatus,
    Position,
    PushDecision,
    PushInfo,
    Round,
    Verdict,
    WorkerKey,
)
from ps_server.consistency.tracker import LIMIT, ParkedPulls, Tracker
from ps_server.consistency.tracker_state import FAILED, TrackerState

__all__ = [
    "FAILED",
    "FOREVER",
    "LIMIT",
    "OUTCOMES",
    "ParkedPulls",
    "ParticipantStatus",
    "Position",
    "PushDecision",
    "PushInfo",
    "Round",
    "Tracker",
    "TrackerState",
    "Verdict",
    "WorkerKey",
]
