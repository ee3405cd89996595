"""What a checkpoint says about its files: the parts that shards report, and the model they make together; all JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from google.protobuf import json_format

from ps_protocol.convert import shard_map_from_pb, shard_map_to_pb
from ps_protocol.errors import InvalidRequest, PsError
from ps_protocol.model import DType, ShardMap
from ps_protocol.v1 import common_pb2 as pb

#: What the caller wants back as it was: versions, clocks, sequences, data positions. JSON's types only.
Facts = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Piece:
    """One tensor in a file: rows [row_begin, row_end) of a variable, or optimizer state of these rows."""

    variable: str
    row_begin: int
    row_end: int
    #: Name of the optimizer state, as "exp_avg"; empty for the rows themselves.
    state: str
    dtype: DType
    shape: tuple[int, ...]
    file: str
    #: First byte in the file.
    at: int
    #: xxh3_64 of each CHECKED_BYTES.
    checksums: tuple[str, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def rows(self) -> tuple[int, int]:
        """The rows, as [begin, end)."""
        return self.row_begin, self.row_end

    def __str__(self) -> str:
        return f"{self.variable}[{self.row_begin}:{self.row_end}]" + (f", {self.state}" if self.state else "")


@dataclass(frozen=True, slots=True)
class FileRecord:
    """One file of a model. What lies behind its head is tensors only."""

    name: str
    size_bytes: int
    head_bytes: int
    #: xxh3_64 of the head.
    head_checksum: str


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

    def to_json(self) -> dict[str, Any]:
        """JSON's types only."""
        return {
            "model": self.model,
            "shard": self.shard,
            "epoch": self.epoch,
            "facts": dict(self.facts),
            "files": [asdict(file) for file in self.files],
            "pieces": [_piece_to_json(piece) for piece in self.pieces],
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
                tuple(map(_piece_from_json, data["pieces"])),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise InvalidRequest(
                "this is not a part of a checkpoint",
                actual=repr(error),
                remedy="run the same torch-ps on the coordinator and on every shard",
            ) from error


@dataclass(frozen=True, slots=True)
class ModelRecord:
    """One model of a checkpoint. Every row of every variable is in exactly one piece."""

    #: Folder inside the checkpoint.
    folder: str
    shard_map: ShardMap
    files: tuple[FileRecord, ...]
    #: Per shard that holds slices, what its caller wants back.
    facts: tuple[Facts, ...]
    pieces: tuple[Piece, ...]

    def to_json(self) -> dict[str, Any]:
        """JSON's types only."""
        return {
            "folder": self.folder,
            "shard_map": json_format.MessageToDict(shard_map_to_pb(self.shard_map), preserving_proto_field_name=True),
            "files": [asdict(file) for file in self.files],
            "facts": list(self.facts),
            "pieces": [_piece_to_json(piece) for piece in self.pieces],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ModelRecord:
        """Raises KeyError, TypeError or ValueError for anything that ``to_json`` did not make."""
        try:
            shard_map = shard_map_from_pb(json_format.ParseDict(data["shard_map"], pb.ShardMap()))
        except (json_format.ParseError, PsError) as error:
            raise ValueError(str(error)) from error
        return cls(
            data["folder"],
            shard_map,
            tuple(FileRecord(**file) for file in data["files"]),
            tuple(data["facts"]),
            tuple(map(_piece_from_json, data["pieces"])),
        )


def _piece_to_json(piece: Piece) -> dict[str, Any]:
    return {**{name: getattr(piece, name) for name in Piece.__slots__}, "dtype": piece.dtype.value}


def _piece_from_json(data: Mapping[str, Any]) -> Piece:
    lists: dict[str, Sequence[Any]] = {name: tuple(data[name]) for name in ("shape", "checksums")}
    return Piece(**{**data, **lists, "dtype": DType(data["dtype"])})
