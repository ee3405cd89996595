"""Records of the rows of one table from one shard in a manifest, with their JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ps_server.checkpoint.format.pieces import Piece, piece_from_json, piece_to_json


@dataclass(frozen=True, slots=True)
class Base:
    """The checkpoint that an incremental one builds on: a folder beside its own."""

    folder: str
    #: The checksum that its manifest begins with.
    seal: str


@dataclass(frozen=True, slots=True)
class Mark:
    """The position of a table of one process when it was written."""

    updates: int
    #: Numbers of the last change of rows, and of waiting ids.
    changes: int
    waiting_changes: int
    #: Increments since the last full checkpoint.
    depth: int


@dataclass(frozen=True, slots=True)
class TablePart:
    """One file: the rows of some buckets of a table, all of them or those changed since ``base``."""

    table: str
    shard: int
    #: Updates of the table so far.
    updates: int
    #: None: every bucket is complete.
    base: Base | None
    file: str
    #: One for each column in the file, named by its state; see table_columns.py.
    pieces: tuple[Piece, ...]

    def to_json(self) -> dict[str, Any]:
        """JSON's types only."""
        return {
            "table": self.table,
            "shard": self.shard,
            "updates": self.updates,
            "base": {"folder": self.base.folder, "seal": self.base.seal} if self.base else None,
            "file": self.file,
            "pieces": [piece_to_json(piece) for piece in self.pieces],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> TablePart:
        """Raises KeyError, TypeError or ValueError for other JSON than from ``to_json``."""
        base = Base(**data["base"]) if data["base"] else None
        pieces = tuple(map(piece_from_json, data["pieces"]))
        return cls(data["table"], data["shard"], data["updates"], base, data["file"], pieces)
