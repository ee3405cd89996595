"""How far a reader of a table's changes has come on each shard: in memory, as JSON, and in a file."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Self

from google.protobuf.json_format import MessageToDict, ParseDict, ParseError

from ps_protocol.errors import DamagedData, InvalidRequest
from ps_protocol.sealed import seal, unseal
from ps_protocol.v1 import shard_pb2 as pb

Cursor = Mapping[str, Any]
"""What a reader keeps, as JSON's types. Its parts are the shards' own affair."""


class Cursors:
    """The cursors of one table's shards. Used by one thread."""

    def __init__(self, model: str, table: str, shards: Mapping[int, pb.FeedCursor]) -> None:
        self._model = model
        self._table = table
        self._shards = dict(shards)

    @classmethod
    def of(cls, cursor: Cursor | None, model: str, table: str) -> Self:
        """None: from the beginning. Raises InvalidRequest for what is no cursor, or one of another table."""
        if cursor is None:
            return cls(model, table, {})
        try:
            whose = cursor["model"], cursor["table"]
            shards = {int(shard): ParseDict(each, pb.FeedCursor()) for shard, each in cursor["shards"].items()}
        except (KeyError, TypeError, ValueError, AttributeError, ParseError) as error:
            raise InvalidRequest(
                "this is no cursor of a table's changes",
                expected="what an earlier change came with",
                actual=repr(cursor)[:200],
                remedy="give none: the reader then begins anew",
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
        """Forget the others: what they held is somewhere else, and comes from there."""
        self._shards = {shard: cursor for shard, cursor in self._shards.items() if shard in shards}

    def get(self, shard: int) -> pb.FeedCursor | None:
        """None: the reader begins anew there."""
        return self._shards.get(shard)

    def set(self, shard: int, cursor: pb.FeedCursor | None) -> None:
        """A reader has come as far as this."""
        if cursor is None:
            self._shards.pop(shard, None)
        else:
            self._shards[shard] = cursor

    def to_json(self) -> Cursor:
        """What ``of`` reads."""
        shards = {str(shard): MessageToDict(cursor) for shard, cursor in sorted(self._shards.items())}
        return {"model": self._model, "table": self._table, "shards": shards}


def save_cursor(path: Path, cursor: Cursor) -> None:
    """Put ``cursor`` into the file ``path`` in one step, so that nobody ever sees half of it."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.part")
    partial.write_bytes(seal({"format": 1, **cursor}))
    partial.replace(path)


def load_cursor(path: Path) -> Cursor | None:
    """What was saved there; None: nothing. Raises DamagedData."""
    try:
        cursor = unseal(path.read_bytes(), first_sealed=1)
        cursor.pop("format", None)  # the first had neither format nor checksum
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise DamagedData(
            f"{path} is no file with a cursor",
            expected="what this wrote",
            actual=str(error),
            remedy="delete it: the reader then begins anew",
        ) from error
    return cursor
