"""Files of rows for anybody: ids, rows and optimizer state side by side; safetensors or Parquet, written and read."""

from __future__ import annotations

import json
import mmap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ps_protocol.errors import ConfigError, InvalidRequest
from ps_protocol.model import DType
from ps_protocol.tables import Ids, TableSpec
from ps_server.checkpoint import parquet
from ps_server.checkpoint.files import Output
from ps_server.checkpoint.header import FileForm, TensorForm

Floats = npt.NDArray[np.float32]
Array = npt.NDArray[Any]

_LONGEST_HEADER_BYTES = 100 << 20
_DTYPES: dict[str, np.dtype[Any]] = {"I64": np.dtype("<i8"), "F32": np.dtype("<f4")}


@dataclass(frozen=True, slots=True)
class Rows:
    """Some rows of a table."""

    ids: Ids
    #: float32 [n, dim], or [n, width] with the optimizer's state.
    values: Floats


class RowWriter(Protocol):
    """A file being written; rows come one behind the other."""

    def put(self, ids: Ids, rows: Floats, state: Floats) -> None:
        """The next rows."""


def file_form(name: str, spec: TableSpec, count: int) -> FileForm:
    """A safetensors file of ``count`` rows."""
    tensors = [TensorForm("ids", DType.INT64, (count,)), TensorForm("rows", DType.FLOAT32, (count, spec.dim))]
    if spec.state_width:
        tensors.append(TensorForm("state", DType.FLOAT32, (count, spec.state_width)))
    return FileForm.of(name, tensors)


class SafetensorsFile:
    """Writes rows into a file laid out by ``file_form``."""

    def __init__(self, file: Output, form: FileForm) -> None:
        self._file = file
        self._at = dict(form.at)
        file.write(memoryview(form.head), 0)

    def put(self, ids: Ids, rows: Floats, state: Floats) -> None:
        """The next rows. Raises OSError."""
        for name, items in (("ids", ids), ("rows", rows), ("state", state)):
            if items.size:
                data = memoryview(np.ascontiguousarray(items).reshape(-1).view(np.uint8).data)
                self._file.write(data, self._at[name])
                self._at[name] += len(data)


class RowFile:
    """A file with rows for one table, checked against it; read by one thread."""

    def __init__(self, path: Path, spec: TableSpec, *, with_state: bool = True) -> None:
        """``with_state`` False: state in the file is passed over.

        Raises ConfigError for a file that cannot be read, InvalidRequest for one whose rows do not fit the table.
        """
        self.path = path
        self._spec = spec
        self._file = _Parquet(path) if path.suffix == parquet.SUFFIX else _Safetensors(path)
        shapes = self._file.shapes
        for name, shape, dtype in (("ids", (), "int64"), ("rows", (spec.dim,), "float32")):
            self._check(name, (shape, dtype), shapes.get(name, "missing"))
        #: Whether rows come with the state of the table's optimizer.
        self.with_state = with_state and bool(spec.state_width) and "state" in shapes
        if with_state and "state" in shapes:
            self._check("state", ((spec.state_width,), "float32"), shapes["state"])
        counts = {self._file.count(name) for name in ("ids", "rows", "state")[: 2 + self.with_state]}
        if len(counts) > 1:
            raise self._wrong("numbers of ids, rows and state", "as many of each", sorted(counts))

    @property
    def count(self) -> int:
        """Rows in the file."""
        return self._file.count("ids")

    def pieces(self, rows: int) -> Iterator[Rows]:
        """At most ``rows`` rows at a time. Raises ConfigError, InvalidRequest."""
        for columns in self._file.pieces(rows):
            values = columns["rows"]
            if self.with_state:
                values = np.hstack([values, columns["state"]])
            yield Rows(np.ascontiguousarray(columns["ids"]), np.ascontiguousarray(values))

    def check_values(self, rows: int = 1 << 18) -> None:
        """Read everything. Raises InvalidRequest for NaN or infinity, naming the first id."""
        for piece in self.pieces(rows):
            fine = np.isfinite(piece.values).all(1)
            if not fine.all():
                raise self._wrong("value", "finite numbers", f"NaN or infinity in the row of id {piece.ids[~fine][0]}")

    def _check(self, name: str, expected: object, actual: object) -> None:
        if expected != actual:
            raise self._wrong(f"'{name}'", _shown(expected), _shown(actual))

    def _wrong(self, what: str, expected: object, actual: object) -> InvalidRequest:
        return InvalidRequest(
            f"{self.path} does not fit table '{self._spec.name}': {what}; nothing was written",
            variable=self._spec.name,
            expected=str(expected),
            actual=str(actual),
            remedy="give a file of this table: int64 ids [n], float32 rows [n, dim], float32 state [n, its width]",
        )


#: Shape of an item, and dtype.
_Shape = tuple[tuple[int, ...], str]


def _shown(shape: Any) -> str:
    return shape if isinstance(shape, str) else f"{shape[1]} [{', '.join(map(str, ('n', *shape[0])))}]"


class _Safetensors:
    """The format: header.py."""

    def __init__(self, path: Path) -> None:
        try:
            with path.open("rb") as file:
                data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            length = int.from_bytes(data[:8], "little")
            if length > min(_LONGEST_HEADER_BYTES, len(data) - 8):
                raise ValueError(f"a header of {length} bytes in a file of {len(data)}")
            tensors = {n: t for n, t in json.loads(data[8 : 8 + length]).items() if n != "__metadata__"}
            self._tensors = {name: self._tensor(data, 8 + length, tensor) for name, tensor in tensors.items()}
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ConfigError(
                f"{path} is no safetensors file: {error}", remedy="give .safetensors files, or .parquet ones"
            ) from error

    @staticmethod
    def _tensor(data: mmap.mmap, base: int, tensor: dict[str, Any]) -> Array | str:
        """The tensor, not copied; of a dtype that no table has, its name."""
        if tensor["dtype"] not in _DTYPES:
            return str(tensor["dtype"])
        begin, end = tensor["data_offsets"]
        found: Array = np.frombuffer(memoryview(data)[base + begin : base + end], _DTYPES[tensor["dtype"]])
        return found.reshape(tensor["shape"])

    @property
    def shapes(self) -> dict[str, Any]:
        return {
            name: tensor if isinstance(tensor, str) else (tensor.shape[1:], tensor.dtype.name)
            for name, tensor in self._tensors.items()
            if isinstance(tensor, str) or tensor.ndim
        }

    def count(self, name: str) -> int:
        return len(self._tensors[name])

    def pieces(self, rows: int) -> Iterator[dict[str, Any]]:
        for begin in range(0, self.count("ids"), rows):
            yield {n: t[begin : begin + rows] for n, t in self._tensors.items() if n in ("ids", "rows", "state")}


class _Parquet:
    def __init__(self, path: Path) -> None:
        self._file = parquet.open_parquet(path)
        self.shapes: dict[str, Any] = dict(parquet.shapes(self._file))

    def count(self, name: str) -> int:
        """Every column has as many."""
        return int(self._file.metadata.num_rows)

    def pieces(self, rows: int) -> Iterator[dict[str, Any]]:
        return parquet.batches(self._file, rows)
