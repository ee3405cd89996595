"""The ordered log of a shard's updates, its snapshots, and the way back from both."""

from ps_server.log.durable import DurableLog
from ps_server.log.folder import DataFolder
from ps_server.log.models import RecoveredModel, new_model
from ps_server.log.reader import LogReader, RecordParser
from ps_server.log.record import Header
from ps_server.log.recovery import Recovered, recover
from ps_server.log.replay import Replay
from ps_server.log.snapshots import ModelPart, Snapshot, SnapshotWriter
from ps_server.log.switch import rows_of, switched
from ps_server.log.updates import Entry, Loaded, MemoryLog, Placed, Prepared, Switched, Update, UpdateLog

__all__ = [
    "DataFolder",
    "DurableLog",
    "Entry",
    "Header",
    "Loaded",
    "LogReader",
    "MemoryLog",
    "ModelPart",
    "Placed",
    "Prepared",
    "RecordParser",
    "Recovered",
    "RecoveredModel",
    "Replay",
    "Snapshot",
    "SnapshotWriter",
    "Switched",
    "Update",
    "UpdateLog",
    "new_model",
    "recover",
    "rows_of",
    "switched",
]
