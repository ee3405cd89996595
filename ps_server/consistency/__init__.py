"""When a push is applied and a pull is answered: the consistency modes, decided without tensors, threads or clocks."""

from ps_server.consistency.counts import FAILED
from ps_server.consistency.events import Decision, Position, PushInfo, Round, Standing, Verdict, WorkerKey
from ps_server.consistency.memento import TrackerMemento
from ps_server.consistency.parked import ParkedPulls
from ps_server.consistency.tracker import LIMIT, Tracker

__all__ = [
    "FAILED",
    "LIMIT",
    "Decision",
    "ParkedPulls",
    "Position",
    "PushInfo",
    "Round",
    "Standing",
    "Tracker",
    "TrackerMemento",
    "Verdict",
    "WorkerKey",
]
