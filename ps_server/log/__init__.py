"""The ordered log of a shard's updates, its snapshots, and the way back from both."""

from ps_server.log.durable import FEWEST_SEGMENTS, DurableLog
from ps_server.log.folder import DataFolder
from ps_server.log.manifest import ModelPart
from ps_server.log.models import RecoveredModel, new_model
from ps_server.log.reader import LogReader, RecordParser
from ps_server.log.record import Header
from ps_server.log.recovery import Recovered, recover
from ps_server.log.replay import Replay
from ps_server.log.row_messages import apply_rows, bytes_of, describe_buckets
from ps_server.log.snapshots import Snapshot, SnapshotWriter
from ps_server.log.switch import rows_of, switched
from ps_server.log.updates import (
    BucketsPut,
    Entry,
    Loaded,
    MemoryLog,
    Placed,
    Prepared,
    RowsDropped,
    RowsEntry,
    RowsLoaded,
    Switched,
    Update,
    UpdateLog,
)

__all__ = [
    "FEWEST_SEGMENTS",
    "BucketsPut",
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
    "RowsDropped",
    "RowsEntry",
    "RowsLoaded",
    "Snapshot",
    "SnapshotWriter",
    "Switched",
    "Update",
    "UpdateLog",
    "apply_rows",
    "bytes_of",
    "describe_buckets",
    "new_model",
    "recover",
    "rows_of",
    "switched",
]
