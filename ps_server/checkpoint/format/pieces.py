"""Records of one tensor and of one file in a manifest, with their JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ps_protocol.model.spec import DType


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


def piece_to_json(piece: Piece) -> dict[str, Any]:
    """JSON's types only."""
    return {**{name: getattr(piece, name) for name in Piece.__slots__}, "dtype": piece.dtype.value}


def piece_from_json(data: Mapping[str, Any]) -> Piece:
    """Raises KeyError, TypeError or ValueError for other JSON than from ``piece_to_json``."""
    lists: dict[str, Sequence[Any]] = {name: tuple(data[name]) for name in ("shape", "checksums")}
    return Piece(**{**data, **lists, "dtype": DType(data["dtype"])})
