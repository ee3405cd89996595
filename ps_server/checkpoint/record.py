"""What a checkpoint says about its files: the parts that shards report, and the model they make together; all JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from google.protobuf import json_format

from ps_protocol.convert import shard_map_from_pb, shard_map_to_pb
from ps_protocol.errors import InvalidRequest, PsError
from ps_protocol.model import ShardMap
from ps_protocol.v1 import common_pb2 as pb
from ps_server.checkpoint.pieces import FileRecord, Piece, piece_from_json, piece_to_json
from ps_server.checkpoint.table_part import Base, TablePart

#: What the caller wants back as it was: versions, clocks, sequences, data positions. JSON's types only.
Facts = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Part:
    """What one shard wrote of one model; sent to whoever commits, as JSON."""

    model: str
    shard: int
    #: Of the shard map it was written by.
    epoch: int
    facts: Facts
    files: tuple[FileRecord, ...]
    pieces: tuple[Piece, ...]
    tables: tuple[TablePart, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """JSON's types only."""
        return {
            "model": self.model,
            "shard": self.shard,
            "epoch": self.epoch,
            "facts": dict(self.facts),
            "files": [asdict(file) for file in self.files],
            "pieces": [piece_to_json(piece) for piece in self.pieces],
            "tables": [table.to_json() for table in self.tables],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Part:
        """Raises InvalidRequest for anything that ``to_json`` did not make."""
        try:
            return cls(
                data["model"],
                data["shard"],
                data["epoch"],
                data["facts"],
                tuple(FileRecord(**file) for file in data["files"]),
                tuple(map(piece_from_json, data["pieces"])),
                tuple(map(TablePart.from_json, data["tables"])),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise InvalidRequest(
                "this is not a part of a checkpoint",
                actual=repr(error),
                remedy="run the same torch-ps on the coordinator and on every shard",
            ) from error


@dataclass(frozen=True, slots=True)
class ModelRecord:
    """One model of a checkpoint. Each row of each variable is in one piece, each bucket of each table in one part."""

    #: Folder inside the checkpoint.
    folder: str
    shard_map: ShardMap
    files: tuple[FileRecord, ...]
    #: Per shard that holds anything of it, what its caller wants back.
    facts: tuple[Facts, ...]
    pieces: tuple[Piece, ...]
    tables: tuple[TablePart, ...] = ()

    def parts_of(self, table: str) -> list[TablePart]:
        """What holds the rows of one table here."""
        return [part for part in self.tables if part.table == table]

    def base(self, table: str) -> Base | None:
        """The checkpoint with the rows of ``table`` that are not here; None: all are.

        Where shards have different ones, the newest: what was touched since an earlier one is right on top of it, too.
        """
        bases = [part.base for part in self.parts_of(table) if part.base]
        return max(bases, key=lambda base: (len(base.folder), base.folder), default=None)

    def to_json(self) -> dict[str, Any]:
        """JSON's types only."""
        return {
            "folder": self.folder,
            "shard_map": json_format.MessageToDict(shard_map_to_pb(self.shard_map), preserving_proto_field_name=True),
            "files": [asdict(file) for file in self.files],
            "facts": list(self.facts),
            "pieces": [piece_to_json(piece) for piece in self.pieces],
            "tables": [table.to_json() for table in self.tables],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ModelRecord:
        """Raises KeyError, TypeError or ValueError for anything that ``to_json`` did not make."""
        try:
            shard_map = shard_map_from_pb(json_format.ParseDict(data["shard_map"], pb.ShardMap()))
        except (json_format.ParseError, PsError, SystemError) as error:  # the last: numbers beyond what C can hold
            raise ValueError(str(error)) from error
        return cls(
            data["folder"],
            shard_map,
            tuple(FileRecord(**file) for file in data["files"]),
            tuple(data["facts"]),
            tuple(map(piece_from_json, data["pieces"])),
            tuple(map(TablePart.from_json, data.get("tables", ()))),  # format 1 has none
        )
