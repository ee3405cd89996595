"""What a checkpoint says about the rows of one table from one shard; all JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ps_server.checkpoint.pieces import Piece, piece_from_json, piece_to_json


@dataclass(frozen=True, slots=True)
class Base:
    """The checkpoint that an incremental one goes on from: a folder beside its own."""

    folder: str
    #: The checksum that its manifest begins with.
    seal: str


@dataclass(frozen=True, slots=True)
class Mark:
    """Where a table of one process stood when it was written."""

    updates: int
    #: Numbers of the last change of rows, and of ids that wait.
    changes: int
    waiting_changes: int
    #: Increments on top of the last checkpoint with everything.
    depth: int


@dataclass(frozen=True, slots=True)
class TablePart:
    """One file: the rows of some buckets of a table, all of them or those touched since ``base``."""

    table: str
    shard: int
    #: Updates of the table so far.
    updates: int
    #: None: every bucket is there whole.
    base: Base | None
    file: str
    #: One for each of the columns in the file, named by its state; table_form.py says which there are.
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
        """Raises KeyError, TypeError or ValueError for anything that ``to_json`` did not make."""
        base = Base(**data["base"]) if data["base"] else None
        pieces = tuple(map(piece_from_json, data["pieces"]))
        return cls(data["table"], data["shard"], data["updates"], base, data["file"], pieces)
