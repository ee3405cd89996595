"""Writes the copy of one table of one shard to a checkpoint, bucket by bucket."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ps_protocol.files import sync
from ps_protocol.model.ids import buckets_of
from ps_protocol.model.layout import Layout
from ps_protocol.model.tables import Ids
from ps_server.checkpoint import table_columns as form
from ps_server.checkpoint.file_plan import FileForm, TensorForm, model_folder
from ps_server.checkpoint.files import (
    CHECKED_BYTES,
    Output,
    checksum,
    make_folders,
    output,
    storage_errors,
)
from ps_server.checkpoint.record import FileRecord, Piece, TablePart
from ps_server.checkpoint.table_copy import TableCapture
from ps_server.tables.store import Columns

Numbers = npt.NDArray[np.int64]


def write_table(folder: Path, layout: Layout, copy: TableCapture) -> tuple[TablePart, FileRecord]:
    """Write ``copy`` below ``folder``, and sync it; returns what ``commit`` needs.

    Called from any thread, at the same time for other tables and shards. Takes the memory of one bucket beside that of
    ``copy``. What is left behind by an error is without meaning. Raises StorageFull, ConfigError.
    """
    shard_map, spec = layout.shard_map, copy.spec
    target = folder / model_folder(shard_map.spec.name)
    name = form.table_file(spec.name, layout.shard, shard_map.shards)
    rows, waiting = _Order(copy.rows.ids, spec.buckets), _Order(copy.waiting.ids, spec.buckets)
    index = _index(copy, rows, waiting)
    file_form, tensors = form.file_form(name, spec, _items(copy, index))
    with storage_errors(target, str(layout.shard)):
        make_folders((target / name).parent)
        with output(target / name, file_form.size_bytes) as file:
            file.write(memoryview(file_form.head), 0)
            columns = _Columns(file, file_form, tensors, spec.name)
            columns.put(form.INDEX, index)
            for bucket in index[:, form.Index.BUCKET].tolist():
                _put_rows(columns, copy, rows.of(bucket))
                _put_waiting(columns, copy.waiting, waiting.of(bucket))
            for column, ids in ((form.DELETED, copy.deleted), (form.WAITING_DELETED, copy.waiting_deleted)):
                columns.put(column, ids[_Order(ids, spec.buckets).all])
            pieces = columns.end()
        sync((target / name).parent)
    record = FileRecord(name, file_form.size_bytes, len(file_form.head), checksum(file_form.head))
    return TablePart(spec.name, layout.shard, copy.updates, copy.base, name, pieces), record


class _Order:
    """Ids grouped by bucket, ascending in each."""

    def __init__(self, ids: Ids, buckets: int) -> None:
        self._ids = ids
        # 16 bits: numpy sorts them by radix.
        found = buckets_of(ids, buckets).astype(np.uint16)
        self._order = np.argsort(found, kind="stable")
        self.counts = np.bincount(found, minlength=buckets)
        self._ends = np.cumsum(self.counts)

    def of(self, bucket: int) -> Numbers:
        """The ids of one bucket."""
        end = self._ends[bucket]
        numbers = self._order[end - self.counts[bucket] : end]
        return numbers[np.argsort(self._ids[numbers])]

    @property
    def all(self) -> Numbers:
        """All ids, ascending in each bucket."""
        return self._order


def _index(copy: TableCapture, rows: _Order, waiting: _Order) -> Numbers:
    here = np.flatnonzero(copy.here)
    index = np.zeros((here.size, len(form.Index)), np.int64)
    index[:, form.Index.BUCKET], index[:, form.Index.WHOLE] = here, copy.whole[here]
    for column, order in (
        (form.Index.ROWS, rows),
        (form.Index.WAITING, waiting),
        (form.Index.DELETED, _Order(copy.deleted, copy.spec.buckets)),
        (form.Index.WAITING_DELETED, _Order(copy.waiting_deleted, copy.spec.buckets)),
    ):
        index[:, column] = order.counts[here]
    return index


def _items(copy: TableCapture, index: Numbers) -> dict[str, int]:
    totals = index.sum(0)
    items = {column: int(totals[counted]) for column, counted in form.COUNTED_BY.items()}
    if not copy.spec.state_width:
        items[form.STATE] = 0
    if not copy.rows.uses.size:
        items[form.USES] = 0
    return {form.INDEX: len(index), **items}


def _put_rows(columns: _Columns, copy: TableCapture, numbers: Numbers) -> None:
    rows, dim, values = copy.rows, copy.spec.dim, copy.values(numbers)
    columns.put(form.IDS, np.take(rows.ids, numbers))
    columns.put(form.LAST_USE, np.take(rows.touched, numbers))
    columns.put(form.ROWS, values[:, :dim])
    columns.put(form.STATE, values[:, dim:])
    if rows.uses.size:
        columns.put(form.USES, np.take(rows.uses, numbers))


def _put_waiting(columns: _Columns, waiting: Columns, numbers: Numbers) -> None:
    columns.put(form.WAITING_IDS, np.take(waiting.ids, numbers))
    columns.put(form.WAITING_LAST_USE, np.take(waiting.touched, numbers))
    if waiting.uses.size:
        columns.put(form.WAITING_USES, np.take(waiting.uses, numbers))


class _Columns:
    """The columns of one file, each written sequentially; used by one ``write_table``."""

    def __init__(self, file: Output, file_form: FileForm, tensors: Sequence[TensorForm], table: str) -> None:
        self._table, self._name = table, file_form.name
        self._columns = {tensor.name: _Column(file, file_form.at[tensor.name], tensor) for tensor in tensors}

    def put(self, column: str, items: npt.NDArray[np.generic]) -> None:
        """Write the next items of a column."""
        if items.size:
            self._columns[column].put(items)

    def end(self) -> tuple[Piece, ...]:
        """Write the rest; returns the records of the columns for the manifest."""
        return tuple(
            Piece(
                self._table,
                0,
                each.tensor.shape[0],
                each.tensor.name,
                each.tensor.dtype,
                each.tensor.shape,
                self._name,
                each.at,
                each.end(),
            )
            for each in self._columns.values()
        )


class _Column:
    """One tensor, written in pieces of CHECKED_BYTES with a checksum each."""

    def __init__(self, file: Output, at: int, tensor: TensorForm) -> None:
        self._file = file
        self.at = at
        self.tensor = tensor
        self._buffer = bytearray(min(CHECKED_BYTES, tensor.nbytes))
        self._filled = self._written = 0
        self._checksums: list[str] = []

    def put(self, items: npt.NDArray[np.generic]) -> None:
        dtype = np.dtype(self.tensor.dtype.value)
        data = memoryview(np.ascontiguousarray(items, dtype).reshape(-1).view(np.uint8).data)
        while len(data):
            taken = min(len(data), len(self._buffer) - self._filled)
            self._buffer[self._filled : self._filled + taken] = data[:taken]
            data, self._filled = data[taken:], self._filled + taken
            if self._filled == len(self._buffer):
                self._flush()

    def end(self) -> tuple[str, ...]:
        self._flush()
        return tuple(self._checksums)

    def _flush(self) -> None:
        self._checksums += self._file.write(memoryview(self._buffer)[: self._filled], self.at + self._written)
        self._written += self._filled
        self._filled = 0
