"""Writes and reads files with ids, rows and optimizer state, as safetensors or Parquet."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open

from ps_protocol.errors import ConfigError, InvalidRequest
from ps_protocol.files import sync
from ps_protocol.model.spec import DType
from ps_protocol.model.tables import Ids, TableSpec
from ps_server.checkpoint.file_plan import FileForm, TensorForm
from ps_server.checkpoint.files import Output

Floats = npt.NDArray[np.float32]
Array = npt.NDArray[Any]

SUFFIX = ".parquet"

_DTYPES = {"I64": "int64", "F32": "float32"}


@dataclass(frozen=True, slots=True)
class Rows:
    """Some rows of a table."""

    ids: Ids
    #: float32 [n, dim], or [n, width] with the optimizer's state.
    values: Floats


class RowWriter(Protocol):
    """A file being written, row by row."""

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
        """``with_state`` False: state in the file is ignored.

        Raises ConfigError for a file that cannot be read, InvalidRequest for one whose rows do not fit the table.
        """
        self.path = path
        self._spec = spec
        self._file = _Parquet(path) if path.suffix == SUFFIX else _Safetensors(path)
        shapes = self._file.shapes
        for name, shape, dtype in (("ids", (), "int64"), ("rows", (spec.dim,), "float32")):
            self._check(name, (shape, dtype), shapes.get(name, "missing"))
        #: Whether rows include the state of the table's optimizer.
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
    """A file whose header the library has checked; its bytes are read piece by piece."""

    def __init__(self, path: Path) -> None:
        try:
            file: Any = safe_open(path, "np")
            self._tensors = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error}") from error
        except SafetensorError as error:
            raise ConfigError(
                f"{path} is no safetensors file: {error}", remedy="give .safetensors files, or .parquet ones"
            ) from error

    @property
    def shapes(self) -> dict[str, Any]:
        """By tensor, the shape of an item and the dtype of its numbers; for other dtypes, its name."""
        forms = {name: (tensor.get_dtype(), tensor.get_shape()) for name, tensor in self._tensors.items()}
        return {
            name: (tuple(shape[1:]), _DTYPES[dtype]) if dtype in _DTYPES else dtype
            for name, (dtype, shape) in forms.items()
            if shape or dtype not in _DTYPES
        }

    def count(self, name: str) -> int:
        return int(self._tensors[name].get_shape()[0])

    def pieces(self, rows: int) -> Iterator[dict[str, Any]]:
        count = self.count("ids")
        wanted = {name: tensor for name, tensor in self._tensors.items() if name in ("ids", "rows", "state")}
        for begin in range(0, count, rows):
            yield {name: tensor[begin : min(begin + rows, count)] for name, tensor in wanted.items()}


class _Parquet:
    def __init__(self, path: Path) -> None:
        self._file = open_parquet(path)
        self.shapes: dict[str, Any] = dict(shapes(self._file))

    def count(self, name: str) -> int:
        """The number of items, equal for all columns."""
        return int(self._file.metadata.num_rows)

    def pieces(self, rows: int) -> Iterator[dict[str, Any]]:
        return batches(self._file, rows)


def libraries() -> tuple[Any, Any]:
    """Pyarrow and pyarrow.parquet. Raises ConfigError if they are not installed."""
    try:
        return import_module("pyarrow"), import_module("pyarrow.parquet")
    except ImportError as error:
        raise ConfigError(
            "Parquet files need pyarrow, which is not installed",
            actual=str(error),
            remedy="pip install 'torch-ps[parquet]', or use safetensors",
        ) from error


class ParquetFile:
    """A file being written: int64 "ids", lists of float32 "rows" and "state". Used by one thread."""

    def __init__(self, path: Path, dim: int, state_width: int) -> None:
        """Raises ConfigError without pyarrow, OSError."""
        self._arrow, parquet = libraries()
        self._path = path
        floats = self._arrow.float32()
        columns = [("ids", self._arrow.int64()), ("rows", self._arrow.list_(floats, dim))]
        columns += [("state", self._arrow.list_(floats, state_width))] if state_width else []
        self._schema = self._arrow.schema(columns)
        self._writer = parquet.ParquetWriter(path, self._schema)

    def put(self, ids: Array, rows: Array, state: Array) -> None:
        """Write the next rows as a row group."""
        arrays = [self._arrow.array(ids)]
        for values in (rows, state)[: len(self._schema) - 1]:
            flat = self._arrow.array(np.ascontiguousarray(values).reshape(-1))
            arrays.append(self._arrow.FixedSizeListArray.from_arrays(flat, values.shape[1]))
        self._writer.write_table(self._arrow.Table.from_arrays(arrays, schema=self._schema))

    def close(self) -> None:
        """Complete the file and sync it to disk."""
        self._writer.close()
        sync(self._path)


def open_parquet(path: Path) -> Any:
    """A pyarrow.parquet.ParquetFile. Raises ConfigError."""
    arrow, parquet = libraries()
    try:
        return parquet.ParquetFile(path)
    except (OSError, arrow.ArrowException) as error:
        raise ConfigError(
            f"{path} cannot be read as Parquet: {error}", remedy="give a file that psctl export wrote"
        ) from error


def batches(file: Any, rows: int) -> Iterator[dict[str, Array]]:
    """The columns of the next ``rows`` rows, lists as [n, width]. Raises InvalidRequest for lists of many lengths."""
    for batch in file.iter_batches(rows):
        yield {name: _numbers(name, column) for name, column in zip(batch.schema.names, batch.columns, strict=True)}


def shapes(file: Any) -> dict[str, tuple[tuple[int, ...], str]]:
    """By column, the shape of an item and the dtype of its numbers. Raises as ``batches``."""
    if file.metadata.num_rows:
        return {name: (found.shape[1:], found.dtype.name) for name, found in next(batches(file, 1)).items()}
    return {field.name: _shape(field.type) for field in file.schema_arrow}


def _shape(kind: Any) -> tuple[tuple[int, ...], str]:
    item = getattr(kind, "value_type", kind)
    return ((kind.list_size,) if hasattr(kind, "list_size") else ()), np.dtype(item.to_pandas_dtype()).name


def _numbers(name: str, column: Any) -> Array:
    """A column, of lists of one length [n, length]."""
    values = column.flatten() if hasattr(column.type, "value_type") else column
    if column.null_count or values.null_count:
        raise InvalidRequest(f"column '{name}' has missing values", variable=name)
    numbers = np.asarray(values.to_numpy(zero_copy_only=False))
    if values is column:
        return numbers
    if not hasattr(column.type, "list_size") and np.unique(np.diff(column.offsets.to_numpy())).size > 1:
        raise InvalidRequest(f"column '{name}' has lists of different lengths", variable=name)
    return numbers.reshape(len(column), -1)
