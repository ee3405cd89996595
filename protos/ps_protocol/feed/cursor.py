"""The position of a reader of a table's changes on each shard: in memory, as JSON, and in a file; and whether one
position has come to another one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Self

from google.protobuf.json_format import MessageToDict, ParseDict, ParseError

from ps_protocol.errors import InvalidRequest, StateLost
from ps_protocol.files import PUBLIC_MODE, replace_file
from ps_protocol.sealed import load, seal
from ps_protocol.v1 import shard_pb2 as pb

FORMAT = 1

Cursor = Mapping[str, Any]
"""The cursor of a reader, in JSON's types. Only the shards interpret its parts."""


class Cursors:
    """The cursors of one table's shards. Used by one thread."""

    def __init__(
        self, model: str, table: str, shards: Mapping[int, pb.FeedCursor], job_id: str = "", epoch: int = 0
    ) -> None:
        self._model = model
        self._table = table
        self._shards = dict(shards)
        #: The job that is read, as in ClusterStatus, and the epoch of its shard map: where these positions are.
        self.job_id = job_id
        self.epoch = epoch

    @classmethod
    def of(cls, cursor: Cursor | None, model: str, table: str) -> Self:
        """None: from the beginning. Raises InvalidRequest for an invalid cursor, or one of another table."""
        if cursor is None:
            return cls(model, table, {})
        job_id, epoch = "", 0
        try:
            whose = cursor["model"], cursor["table"]
            shards = {int(shard): ParseDict(each, pb.FeedCursor()) for shard, each in cursor["shards"].items()}
            # Version 0.1.0 does not write these.
            job_id, epoch = str(cursor.get("job_id", "")), int(cursor.get("epoch", 0))
        except (KeyError, TypeError, ValueError, AttributeError, ParseError) as error:
            raise InvalidRequest(
                "not a cursor of a table's changes",
                expected="what an earlier change came with",
                actual=repr(cursor)[:200],
                remedy="give none: the reader then begins from the start",
            ) from error
        if whose != (model, table):
            raise InvalidRequest(
                "this is the cursor of another table",
                variable=table,
                expected=f"table '{table}' of model '{model}'",
                actual=f"table '{whose[1]}' of model '{whose[0]}'",
                remedy="keep a cursor for each table",
            )
        return cls(model, table, shards, job_id, epoch)

    def keep(self, shards: Collection[int]) -> None:
        """Forget the other shards: their rows have moved to these."""
        self._shards = {shard: cursor for shard, cursor in self._shards.items() if shard in shards}

    def get(self, shard: int) -> pb.FeedCursor | None:
        """The cursor on ``shard``; None: from the beginning."""
        return self._shards.get(shard)

    def set(self, shard: int, cursor: pb.FeedCursor | None) -> None:
        """Set the position on a shard."""
        if cursor is None:
            self._shards.pop(shard, None)
        else:
            self._shards[shard] = cursor

    def to_json(self) -> Cursor:
        """The form that ``of`` reads."""
        shards = {str(shard): MessageToDict(cursor) for shard, cursor in sorted(self._shards.items())}
        return {
            "model": self._model,
            "table": self._table,
            "job_id": self.job_id,
            "epoch": self.epoch,
            "shards": shards,
        }

    def has_reached(self, wanted: Cursors, whole_epoch: int) -> bool:
        """Whether a copy with this cursor has everything that was there at ``wanted``, of the same table.

        ``whole_epoch``: of the last shard map by which the copy had everything. Raises InvalidRequest for a position of
        another job, StateLost for one that a shard has lost since: the copy will never have it.
        """
        if self.job_id and wanted.job_id and self.job_id != wanted.job_id:
            raise InvalidRequest(
                f"the position is one of another job's table '{self._table}'",
                expected=f"one of job {self.job_id}, which the copy follows",
                actual=f"one of job {wanted.job_id}",
                remedy="follow the job that published the version",
            )
        moved = self.epoch > wanted.epoch
        if self.epoch < wanted.epoch or (moved and whole_epoch < self.epoch):
            return False
        return all(self._has_on(shard, there, moved=moved) for shard, there in wanted._shards.items())

    def _has_on(self, shard: int, there: pb.FeedCursor, *, moved: bool) -> bool:
        here = self._shards.get(shard)
        if here is None:
            # What the shard had is on others, from which all has come.
            return moved
        if here.lineage == there.lineage:
            return here.updates >= there.updates and here.changes >= there.changes
        if here.incarnation == there.incarnation:
            return moved
        if here.incarnation < there.incarnation:
            return False
        # The shard was started again, and all that it has now has come.
        if here.updates < there.updates and not moved:
            raise StateLost(
                f"shard {shard} has lost the last updates of table '{self._table}'",
                shard=str(shard),
                variable=self._table,
                expected=f"update {there.updates}",
                actual=f"update {here.updates}, after it was started again",
                remedy="take the next version; --durability durable loses nothing",
            )
        return True


def save_cursor(path: Path, cursor: Cursor) -> None:
    """Save a position in a file, atomically.

    Args:
        path: The file; one that exists is replaced.
        cursor: ``cursor`` of a change.
    """
    replace_file(path, seal(FORMAT, cursor), PUBLIC_MODE, durable=False)


def load_cursor(path: Path) -> Cursor | None:
    """Return the position that was saved; None: there is no such file.

    Args:
        path: The file.

    Raises:
        DamagedData: It is not such a file, or was changed.
    """
    if not path.exists():
        return None
    return load(path, FORMAT, dict, "delete it: the reader then begins from the start")
