"""Row files as Parquet; the only module that uses pyarrow, an optional dependency."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ps_protocol.errors import ConfigError, InvalidRequest
from ps_protocol.files import sync

SUFFIX = ".parquet"
Array = npt.NDArray[Any]


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
