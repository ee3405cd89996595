"""Records of a manifest: the part of a model that one shard wrote, and the whole model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ps_protocol.model.spec import ShardMap
from ps_protocol.wire.convert.model import shard_map_from_json, shard_map_to_json
from ps_server.checkpoint.format.pieces import FileRecord, Piece, piece_from_json, piece_to_json
from ps_server.checkpoint.format.table_part import Base, TablePart

#: Facts of the caller, returned unchanged: versions, clocks, sequences, data positions. JSON types only.
Facts = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ShardPart:
    """The part of one model that one shard wrote; sent to the coordinator, which commits."""

    model: str
    shard: int
    #: Epoch of the shard map that it was written with.
    epoch: int
    facts: Facts
    files: tuple[FileRecord, ...]
    pieces: tuple[Piece, ...]
    tables: tuple[TablePart, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelRecord:
    """One model of a checkpoint. Each row of each variable is in one piece, each bucket of each table in one part."""

    #: Folder inside the checkpoint.
    folder: str
    shard_map: ShardMap
    files: tuple[FileRecord, ...]
    #: Facts of each shard that holds anything of it.
    facts: tuple[Facts, ...]
    pieces: tuple[Piece, ...]
    tables: tuple[TablePart, ...] = ()

    def parts_of(self, table: str) -> list[TablePart]:
        """The parts with rows of one table in this checkpoint."""
        return [part for part in self.tables if part.table == table]

    def base(self, table: str) -> Base | None:
        """The checkpoint with the other rows of ``table``; None: all are here.

        Where shards have different ones, the newest: what was touched since an earlier one is right on top of it, too.
        """
        bases = [part.base for part in self.parts_of(table) if part.base]
        return max(bases, key=lambda base: (len(base.folder), base.folder), default=None)

    def to_json(self) -> dict[str, Any]:
        """JSON's types only."""
        return {
            "folder": self.folder,
            "shard_map": shard_map_to_json(self.shard_map),
            "files": [asdict(file) for file in self.files],
            "facts": list(self.facts),
            "pieces": [piece_to_json(piece) for piece in self.pieces],
            "tables": [table.to_json() for table in self.tables],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ModelRecord:
        """Raises KeyError, TypeError or ValueError for other JSON than from ``to_json``."""
        return cls(
            data["folder"],
            shard_map_from_json(data["shard_map"]),
            tuple(FileRecord(**file) for file in data["files"]),
            tuple(data["facts"]),
            tuple(map(piece_from_json, data["pieces"])),
            tuple(map(TablePart.from_json, data["tables"])),
        )
