"""The position of a reader of a table's changes on each shard: in memory, as JSON, and in a file."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Self

from google.protobuf.json_format import MessageToDict, ParseDict, ParseError

from ps_protocol.errors import InvalidRequest
from ps_protocol.files import PUBLIC_MODE, replace_file
from ps_protocol.sealed import load, seal
from ps_protocol.v1 import shard_pb2 as pb

FORMAT = 1

Cursor = Mapping[str, Any]
"""The cursor of a reader, in JSON's types. Only the shards interpret its parts."""


class Cursors:
    """The cursors of one table's shards. Used by one thread."""

    def __init__(self, model: str, table: str, shards: Mapping[int, pb.FeedCursor]) -> None:
        self._model = model
        self._table = table
        self._shards = dict(shards)

    @classmethod
    def of(cls, cursor: Cursor | None, model: str, table: str) -> Self:
        """None: from the beginning. Raises InvalidRequest for an invalid cursor, or one of another table."""
        if cursor is None:
            return cls(model, table, {})
        try:
            whose = cursor["model"], cursor["table"]
            shards = {int(shard): ParseDict(each, pb.FeedCursor()) for shard, each in cursor["shards"].items()}
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
        return cls(model, table, shards)

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
        return {"model": self._model, "table": self._table, "shards": shards}


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
