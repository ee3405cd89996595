"""What is read of a file's columns, and how Arrow's arrays become tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ps_protocol.errors import ConfigError, DamagedData

Array = npt.NDArray[Any]

IDS, FLOATS, HASHED, ANY = "ids", "floats", "hashed", "any"
"""Kinds of columns: integers, floating-point numbers, strings as ids, whatever the file has."""


class Ragged(NamedTuple):
    """Lists of different lengths: ``bag(*batch["items"])`` sums the rows of each list."""

    #: The values of all lists: ids int64 [n], or numbers [n].
    values: Tensor
    #: Where each list begins, int64 [lists].
    offsets: Tensor


Value = Tensor | Ragged
"""What a batch has under a name."""


@dataclass(frozen=True, slots=True)
class ColumnSpec:
    """What one entry of a batch is made of; see ``ids``, ``floats`` and ``hashed``, which make it."""

    kind: str
    names: tuple[str, ...]
    fill: float | None = None
    dtype: torch.dtype = torch.int64
    seed: int = 0
    split: str | None = None

    def __post_init__(self) -> None:
        if not self.names or not all(isinstance(name, str) and name for name in self.names):
            raise ConfigError("no column is named", expected="names of columns", actual=repr(self.names))
        if self.split is not None and (not self.split or len(self.names) > 1):
            raise ConfigError(
                f"column '{self.names[0]}' cannot be split", expected="one column and a separator", actual=repr(self)
            )


def ids(*names: str, fill: int | None = None, split: str | None = None) -> ColumnSpec:
    """Integers as ids or labels, int64: [n] of one column, [n, k] of k columns, ``Ragged`` of a column of lists.

    Args:
        *names: Columns of integers, or of lists of them. Unsigned 64-bit integers keep their bits. Times are integers
            in their unit.
        fill: In place of null. None: null is an error.
        split: Separator in a column of strings, each of which is a list of integers.

    Raises:
        ConfigError: No column is named, or several are to be split.
    """
    return ColumnSpec(IDS, names, fill, torch.int64, split=split)


def floats(
    *names: str, fill: float | None = None, dtype: torch.dtype = torch.float32, split: str | None = None
) -> ColumnSpec:
    """Numbers: [n] of one column, [n, k] of k columns or of lists that all have k, ``Ragged`` of other lists.

    Args:
        *names: Columns of numbers or booleans, or of lists of them.
        fill: In place of null. None: null is an error.
        dtype: torch.float32, float64 or float16.
        split: Separator in a column of strings, each of which is a list of numbers.

    Raises:
        ConfigError: No column is named, several are to be split, or the dtype is none of these.
    """
    if dtype not in _NUMPY:
        raise ConfigError(
            "files.floats() cannot make this dtype", expected="float32, float64, float16", actual=str(dtype)
        )
    return ColumnSpec(FLOATS, names, fill, dtype, split=split)


def hashed(*names: str, fill: int | None = None, seed: int = 0, split: str | None = None) -> ColumnSpec:
    """Strings as 64-bit ids: XXH64 of their bytes, as a signed number. Shapes as of ``ids``.

    Any program can compute the same: ``xxhash.xxh64(text.encode(), seed=0).intdigest()``, less 2**64 from 2**63 on.

    Args:
        *names: Columns of strings or bytes, or of lists of them.
        fill: The id in place of null. None: null is an error.
        seed: Of the hash. Give columns that share a table different ones if the same text means different things.
        split: Separator in a string, which is then a list of strings: "Comedy|Drama".

    Raises:
        ConfigError: No column is named, or several are to be split.
    """
    return ColumnSpec(HASHED, names, fill, torch.int64, seed, split)


def columns_of(given: Mapping[str, ColumnSpec | str] | Iterable[str] | None) -> dict[str, ColumnSpec] | None:
    """What a batch has, by name. A name alone stands for the column as it is. None: all columns.

    Raises ConfigError.
    """
    if given is None:
        return None
    if isinstance(given, str | ColumnSpec):
        raise ConfigError(
            "columns= is not a mapping or a list of names",
            expected='columns={"ids": files.ids("C1", "C2")}, or columns=["C1", "C2"]',
            actual=repr(given),
        )
    pairs: Iterable[tuple[Any, Any]] = given.items() if isinstance(given, Mapping) else ((name, name) for name in given)
    found: dict[str, ColumnSpec] = {}
    for name, value in pairs:
        entry = ColumnSpec(ANY, (value,)) if isinstance(value, str) else value
        if not isinstance(name, str) or not isinstance(entry, ColumnSpec):
            raise ConfigError(
                f"columns= does not say what '{name}' is",
                expected="files.ids(…), files.floats(…), files.hashed(…) or the name of a column",
                actual=repr(value),
            )
        if name in found:
            raise ConfigError(f"columns= has '{name}' twice")
        found[name] = entry
    if not found:
        raise ConfigError("columns= is empty", expected="at least one column", remedy="leave it out to read all")
    return found


def libraries(*names: str) -> list[Any]:
    """Modules of pyarrow. Raises ConfigError if it is not installed."""
    try:
        return [import_module(name) for name in ("pyarrow", *names)]
    except ImportError as error:
        raise ConfigError(
            "files need pyarrow, which is not installed", actual=str(error), remedy="pip install 'torch-ps[data]'"
        ) from error


class RowPlace(NamedTuple):
    """Where rows come from, for messages."""

    #: File and row group.
    text: str
    #: The first of the rows in the row group.
    first: int = 0

    def column(self, name: str) -> RowPlace:
        """A column there."""
        return RowPlace(f"{self.text}, column '{name}'", self.first)


class Decoder:
    """Turns Arrow columns into tensors. Used by one thread at a time."""

    def __init__(self, columns: Mapping[str, ColumnSpec], schema: Any) -> None:
        """``schema``: of a file. Raises ConfigError for a column that it lacks or that cannot be what it is to be."""
        self._arrow, self._compute = libraries("pyarrow.compute")
        #: What a batch has, each of a known kind.
        self.columns = {name: self._of_kind(entry, _types(schema)) for name, entry in columns.items()}
        #: The columns that are read.
        self.names = list(dict.fromkeys(name for entry in self.columns.values() for name in entry.names))
        types = self._types = _types(schema)
        self._empty = self._arrow.schema([self._arrow.field(name, types[name]) for name in self.names]).empty_table()

    def nothing(self) -> dict[str, Value]:
        """No rows."""
        return self.decode(self._empty, None, RowPlace(""))

    def check(self, schema: Any, place: str) -> None:
        """Raise DamagedData if a file with this schema cannot be read like the first one."""
        types = _types(schema)
        for entry in self.columns.values():
            for name in entry.names:
                _check_once(schema, name, place)
                if name not in types:
                    raise DamagedData(
                        f"{place} has no column '{name}'", expected=f"'{name}'", actual=", ".join(types)[:200] or "none"
                    )
                if wrong := self._wrong(entry, types[name]):
                    raise DamagedData(f"{place}, column '{name}': {wrong}", actual=str(types[name]))
                if not self._goes_with(self._types[name], types[name]):
                    raise DamagedData(
                        f"{place}, column '{name}': another type than in other files",
                        expected=str(self._types[name]),
                        actual=str(types[name]),
                        remedy="write all files with one type",
                    )

    def check_names(self, schema: Any, place: str) -> None:
        """Raise DamagedData if a text file with this schema lacks a column."""
        for name in self.names:
            _check_once(schema, name, place)
            if name not in schema.names:
                raise DamagedData(
                    f"{place} has no column '{name}'",
                    expected=f"'{name}'",
                    actual=", ".join(schema.names)[:200] or "none",
                )

    def decode(self, table: Any, order: Tensor | None, place: RowPlace) -> dict[str, Value]:
        """The rows of a pyarrow Table, in ``order`` if one is given. Raises DamagedData, which names ``place``."""
        made: dict[str, Value] = {}
        for name, entry in self.columns.items():
            values = [self._values(entry, table.column(column), order, place.column(column)) for column in entry.names]
            made[name] = values[0] if len(values) == 1 else _side_by_side(values, f"{place.text}, columns of '{name}'")
        return made

    def _of_kind(self, entry: ColumnSpec, types: Mapping[str, Any]) -> ColumnSpec:
        for name in entry.names:
            if name not in types:
                raise ConfigError(
                    f"the files have no column '{name}'", expected=", ".join(types)[:400] or "none", actual=f"'{name}'"
                )
        if entry.kind == ANY:
            entry = self._inferred(entry, types[entry.names[0]])
        for name in entry.names:
            if wrong := self._wrong(entry, types[name]):
                raise ConfigError(f"column '{name}': {wrong}", actual=str(types[name]))
        return entry

    def _inferred(self, entry: ColumnSpec, type: Any) -> ColumnSpec:
        item = self._item(type)
        if self._is_text(item):
            raise ConfigError(
                f"column '{entry.names[0]}' has strings",
                expected="numbers",
                actual=str(type),
                remedy=f"name what they become: files.hashed('{entry.names[0]}') makes 64-bit ids",
            )
        kind = IDS if self._is_integer(item) else FLOATS
        return replace(entry, kind=kind, dtype=torch.int64 if kind == IDS else torch.float32)

    def _wrong(self, entry: ColumnSpec, type: Any) -> str:
        """Why a column of this type cannot be ``entry``; empty if it can."""
        types = self._arrow.types
        if types.is_null(type):
            return ""
        if entry.split is not None:
            return "" if self._is_text(self._plain(type)) else "only strings are split"
        item = self._item(type)
        if entry.kind == HASHED:
            return "" if self._is_text(item) else "only strings are hashed; files.ids() takes integers"
        if self._is_text(item):
            return "strings where numbers are due; files.hashed() makes ids of them"
        if entry.kind == IDS:
            return "" if self._is_integer(item) else "ids are integers"
        number = types.is_integer(item) or types.is_floating(item) or types.is_boolean(item) or types.is_decimal(item)
        return "" if number else "not numbers"

    def _goes_with(self, first: Any, second: Any) -> bool:
        """Whether columns of both types make the same tensors, in one batch and in two."""
        null = self._arrow.types.is_null
        if null(first) or null(second):
            return self._shape(first) == self._shape(second)
        if first == second:
            return True
        shapes, items = [self._shape(first), self._shape(second)], [self._item(first), self._item(second)]
        if shapes[0] != shapes[1] or any(map(self._arrow.types.is_temporal, items)):
            # Times are numbers in the unit of their type.
            return False
        try:
            fields = [self._arrow.schema([self._arrow.field("", type)]) for type in (first, second)]
            self._arrow.unify_schemas(fields, promote_options="permissive")
        except self._arrow.ArrowException:
            return False
        return True

    def _shape(self, type: Any) -> int:
        """Values of a row: 0 for one that is no list, -1 for lists of any lengths."""
        types, type = self._arrow.types, self._plain(type)
        if types.is_fixed_size_list(type):
            return int(type.list_size)
        return -1 if types.is_list(type) or types.is_large_list(type) else 0

    def _is_integer(self, type: Any) -> bool:
        types = self._arrow.types
        return bool(types.is_integer(type) or (types.is_temporal(type) and not types.is_interval(type)))

    def _is_text(self, type: Any) -> bool:
        types = self._arrow.types
        kinds = (types.is_string, types.is_large_string, types.is_binary, types.is_large_binary)
        views = (getattr(types, "is_string_view", None), getattr(types, "is_binary_view", None))
        return any(kind(type) for kind in (*kinds, *views, types.is_fixed_size_binary) if kind is not None)

    def _plain(self, type: Any) -> Any:
        return type.value_type if self._arrow.types.is_dictionary(type) else type

    def _item(self, type: Any) -> Any:
        """The type of a value, in lists the type of their values."""
        type = self._plain(type)
        types = self._arrow.types
        if types.is_list(type) or types.is_large_list(type) or types.is_fixed_size_list(type):
            return self._plain(type.value_type)
        return type

    def _values(self, entry: ColumnSpec, column: Any, order: Tensor | None, place: RowPlace) -> Value:
        arrow, types = self._arrow, self._arrow.types
        array = column.combine_chunks() if isinstance(column, arrow.ChunkedArray) else column
        if isinstance(array, arrow.ChunkedArray):
            # Of an empty table.
            array = arrow.concat_arrays(array.chunks) if array.num_chunks else arrow.array([], array.type)
        if types.is_null(array.type):
            text = entry.kind == HASHED or entry.split is not None
            array = array.cast(arrow.string() if text else arrow.int64())
        if entry.split is not None:
            array = self._split(entry, array, place)
        kind = array.type
        if not (types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)):
            flat = self._flat(entry, array, place)
            return _tensor(flat) if order is None else torch.from_numpy(flat[order.numpy()])
        within = RowPlace(f"{place.text}, in a list", -1)
        if array.null_count:
            # A list that is not given is an empty one.
            if entry.fill is None:
                raise _null(array, place)
            array = (
                self._compute.coalesce(array, arrow.scalar([], type=arrow.list_(kind.value_type)))
                if not (types.is_fixed_size_list(kind))
                else array
            )
        if order is not None:
            array = array.take(arrow.array(order.numpy()))
        if types.is_fixed_size_list(kind):
            if array.null_count:
                raise _null(array, place)
            return _tensor(self._flat(entry, array.flatten(), within)).view(len(array), kind.list_size)
        values = _tensor(self._flat(entry, array.flatten(), within))
        offsets = array.offsets.to_numpy(zero_copy_only=False)[: len(array)].astype(np.int64)
        return Ragged(values, torch.from_numpy(offsets - offsets[0] if len(offsets) else offsets))

    def _split(self, entry: ColumnSpec, array: Any, place: RowPlace) -> Any:
        if self._arrow.types.is_dictionary(array.type):
            array = array.dictionary_decode()
        if array.null_count:
            if entry.fill is None:
                raise _null(array, place)
            array = self._compute.fill_null(array, "")
        lists = self._compute.split_pattern(array, entry.split)
        # An empty string is an empty list, not a list of one empty string.
        empty = self._compute.equal(self._compute.binary_length(array), 0)
        if empty.true_count:
            lists = self._compute.if_else(empty, self._arrow.scalar([], type=lists.type), lists)
        if entry.kind == HASHED:
            return lists
        due = self._arrow.int64() if entry.kind == IDS else self._arrow.float64()
        try:
            return lists.cast(self._arrow.list_(due))
        except self._arrow.ArrowInvalid as error:
            raise DamagedData(f"{place.text}: strings where numbers are due", actual=str(error)[:200]) from error

    def _flat(self, entry: ColumnSpec, array: Any, place: RowPlace) -> Array:
        """Values without lists: int64, or of the dtype of ``entry``; perhaps memory of Arrow, which is read only."""
        types = self._arrow.types
        if entry.kind == HASHED:
            return self._hashes(entry, array, place)
        if types.is_dictionary(array.type):
            array = array.dictionary_decode()
        if types.is_boolean(array.type):
            array = array.cast(self._arrow.uint8())
        elif types.is_decimal(array.type):
            array = array.cast(self._arrow.float64())
        elif types.is_temporal(array.type):
            array = array.cast(self._arrow.int32() if array.type.bit_width == 32 else self._arrow.int64())
        if array.null_count:
            if entry.fill is None:
                raise _null(array, place)
            # First a type that has the value in place of null, as -1 or NaN.
            if entry.kind == FLOATS:
                array = array.cast(self._arrow.float64(), safe=False)
            elif types.is_uint64(array.type):
                array = array.view(self._arrow.int64())
            else:
                array = array.cast(self._arrow.int64())
            array = self._compute.fill_null(array, self._arrow.scalar(entry.fill, array.type))
        values: Array = array.to_numpy(zero_copy_only=False)
        if entry.kind == IDS:
            return values.view(np.int64) if values.dtype == np.uint64 else values.astype(np.int64, copy=False)
        return values.astype(_NUMPY[entry.dtype], copy=False)

    def _hashes(self, entry: ColumnSpec, array: Any, place: RowPlace) -> Array:
        from ps_worker.data.files.xxh64 import xxh64

        arrow, types = self._arrow, self._arrow.types
        if array.null_count and entry.fill is None:
            raise _null(array, place)
        if types.is_dictionary(array.type):
            of_values = self._hashes(replace(entry, fill=entry.fill or 0), array.dictionary, place)
            indices = array.indices
            if indices.null_count:
                of_values = np.append(of_values, np.int64(entry.fill or 0))
                # A dictionary may have as many values as its indices can count.
                indices = self._compute.fill_null(indices.cast(arrow.int64()), len(of_values) - 1)
            places: Array = indices.to_numpy(zero_copy_only=False)
            return of_values[places]
        if not (types.is_large_binary(array.type) or types.is_large_string(array.type)):
            array = array.cast(arrow.large_binary())
        valid = array.is_valid().to_numpy(zero_copy_only=False) if array.null_count else None
        _, offsets, data = array.buffers()
        edges = np.frombuffer(offsets, np.int64, len(array) + 1, array.offset * 8) if offsets else np.zeros(1, np.int64)
        found = xxh64(np.frombuffer(data or b"", np.uint8), edges, entry.seed)
        if valid is not None:
            found[~valid] = int(entry.fill or 0)
        return found


def _check_once(schema: Any, name: str, place: str) -> None:
    if (times := schema.names.count(name)) > 1:
        raise DamagedData(f"{place} has several columns '{name}'", expected="one", actual=str(times))


def _types(schema: Any) -> dict[str, Any]:
    return {field.name: field.type for field in schema}


_NUMPY: dict[torch.dtype, Any] = {
    torch.float16: np.float16,
    torch.float32: np.float32,
    torch.float64: np.float64,
}


def _tensor(array: Array) -> Tensor:
    """``array``, which others may own, as a tensor with memory of its own."""
    return torch.from_numpy(array if array.flags.writeable and array.flags.owndata else array.copy())


def _null(array: Any, place: RowPlace) -> DamagedData:
    row = int(np.argmin(array.is_valid().to_numpy(zero_copy_only=False)))
    return DamagedData(
        f"{place.text}: a null",
        expected="a value in every row",
        actual=f"{array.null_count} of {len(array)} values"
        + (f", the first in row {place.first + row}" if place.first >= 0 else ""),
        remedy="give a value for null, as in files.ids(…, fill=0), or leave such row groups out: on_bad_file='skip'",
    )


def _side_by_side(values: Sequence[Value], place: str) -> Tensor:
    """Columns [n] as one tensor [n, k]."""
    plain = [each.numpy() for each in values if isinstance(each, Tensor) and each.ndim == 1]
    if len(plain) < len(values):
        raise DamagedData(f"{place}: lists cannot stand side by side", expected="columns without lists")
    joined = np.empty((len(plain[0]), len(plain)), plain[0].dtype)
    for at, column in enumerate(plain):
        joined[:, at] = column
    return torch.from_numpy(joined)


def rows_of(value: Value) -> int:
    """How many rows it has."""
    return len(value.offsets) if isinstance(value, Ragged) else len(value)


def cut(value: Value, begin: int, end: int) -> Value:
    """Rows [begin, end), as views where possible."""
    if not isinstance(value, Ragged):
        return value[begin:end]
    edges = value.offsets
    first = int(edges[begin]) if begin < len(edges) else len(value.values)
    last = int(edges[end]) if end < len(edges) else len(value.values)
    return Ragged(value.values[first:last], edges[begin:end] - first)


def joined(values: Sequence[Value]) -> Value:
    """The rows of all."""
    if len(values) == 1:
        return values[0]
    plain = [value for value in values if not isinstance(value, Ragged)]
    if plain:
        return torch.cat(plain)
    lists = [value for value in values if isinstance(value, Ragged)]
    bases = np.cumsum([0, *(len(value.values) for value in lists[:-1])]).tolist()
    return Ragged(
        torch.cat([value.values for value in lists]),
        torch.cat([value.offsets + base for value, base in zip(lists, bases, strict=True)]),
    )
