"""The records of a manifest: one tensor, one file, the part of a model that a shard wrote, and the whole model."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ps_protocol.model.spec import DType, ShardMap
from ps_protocol.records import fields_from, fields_of, to_plain
from ps_protocol.wire.convert.model import shard_map_from_json, shard_map_to_json


@dataclass(frozen=True, slots=True)
class Piece:
    """One tensor in a file: rows [row_begin, row_end) of a variable, or optimizer state of these rows."""

    #: A variable, or a table.
    variable: str
    row_begin: int
    row_end: int
    #: Name of the optimizer state, as "exp_avg", or of a table's column; empty for the rows of a variable.
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
    """One file of a model: a head, then tensors only."""

    name: str
    size_bytes: int
    head_bytes: int
    #: xxh3_64 of the head.
    head_checksum: str


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
        plain: dict[str, Any] = to_plain({**fields_of(self), "shard_map": shard_map_to_json(self.shard_map)})
        return plain

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ModelRecord:
        """Raises KeyError, TypeError or ValueError for other JSON than from ``to_json``."""
        others = {name: value for name, value in data.items() if name != "shard_map"}
        return cls(shard_map=shard_map_from_json(data["shard_map"]), **fields_from(cls, others))
