"""Reads the rows of a table from a checkpoint and those that it builds on, bucket by bucket."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from ps_protocol.errors import DamagedData
from ps_protocol.model.tables import Ids, TableSpec
from ps_server.checkpoint import table_columns as form
from ps_server.checkpoint.checkpoint import Checkpoint
from ps_server.checkpoint.files import CHECKED_BYTES
from ps_server.checkpoint.record import Piece
from ps_server.checkpoint.source import ModelFiles, opened
from ps_server.checkpoint.validation import MAX_FILE_BYTES
from ps_server.tables.bucket_contents import BucketContents

Array = npt.NDArray[Any]
T = TypeVar("T", bound=np.generic)


@contextmanager
def saved_table(checkpoint: Checkpoint, model: str, table: str) -> Iterator[SavedTable]:
    """A table of ``checkpoint``, open for reading by one thread.

    Raises ModelMismatch for an unknown model or table, DamagedData when a checkpoint that it builds on is missing.
    """
    with ExitStack() as files:
        yield SavedTable(checkpoint, model, table, files)


class SavedTable:
    """Made by ``saved_table``. Methods raise DamagedData, naming file and column, where bytes are not as written."""

    def __init__(self, checkpoint: Checkpoint, model: str, table: str, files: ExitStack) -> None:
        self.spec: TableSpec = checkpoint.table(model, table)
        self._layers = [_Layer(each, model, self.spec, files) for each in checkpoint.lineage(model, table)]
        #: Updates of the table so far.
        self.updates = max(part.updates for part in self._layers[0].parts)

    def contents(self, bucket: int) -> BucketContents:
        """The contents of ``bucket``."""
        layers = self._of(bucket)
        rows, waiting = _Kept(layers, form.IDS), _Kept(layers, form.WAITING_IDS)
        return BucketContents(
            bucket,
            self.updates,
            rows.ids,
            rows.of(lambda layer: layer.numbers(form.LAST_USE)),
            rows.of(lambda layer: layer.values(self.spec)),
            rows.of(lambda layer: layer.numbers(form.USES)).astype(np.uint32),
            waiting.ids,
            waiting.of(lambda layer: layer.numbers(form.WAITING_LAST_USE)),
            waiting.of(lambda layer: layer.numbers(form.WAITING_USES)).astype(np.uint32),
        )

    def count(self, bucket: int) -> int:
        """The number of rows in ``bucket``; reads at most the ids."""
        layers = self._of(bucket)
        return layers[0].items(form.Index.ROWS) if len(layers) == 1 else int(_Kept(layers, form.IDS).ids.size)

    def _of(self, bucket: int) -> list[_Bucket]:
        """The bucket in the newest checkpoint, and in older ones as far as needed."""
        found = []
        for layer in self._layers:
            found.append(layer.bucket(bucket))
            if found[-1].whole:
                break
        return found


class _Layer:
    """The files of one table in one checkpoint."""

    def __init__(self, checkpoint: Checkpoint, model: str, spec: TableSpec, files: ExitStack) -> None:
        record = checkpoint.model(model)
        source = files.enter_context(opened(checkpoint.folder, record, checkpoint.on_read))
        self.parts = record.parts_of(spec.name)
        self._buckets: dict[int, _Bucket] = {}
        names = [table.name for table in record.shard_map.spec.tables]
        owners = record.shard_map.tables[names.index(spec.name)]
        for part in self.parts:
            columns = {piece.state: _Column(source, piece) for piece in part.pieces}
            index = columns[form.INDEX].items(0, len(columns[form.INDEX])).reshape(-1, len(form.Index))
            here = [bucket for bucket, owner in enumerate(owners) if owner == part.shard]
            if (wrong := _wrong(index, columns, here)) is not None:
                raise DamagedData(
                    f"{checkpoint.folder / record.folder / part.file} is damaged: its index is not what was written",
                    variable=spec.name,
                    expected="the buckets of the shard, and as many items as its columns have",
                    actual=wrong,
                    remedy="restore another checkpoint, or a copy of this one",
                )
            begins = np.cumsum(index, 0) - index
            for counts, begin in zip(index, begins, strict=True):
                self._buckets[int(counts[form.Index.BUCKET])] = _Bucket(columns, counts, begin)

    def bucket(self, number: int) -> _Bucket:
        """The file with ``bucket``: ``commit`` has checked that there is one."""
        return self._buckets[number]


def _wrong(index: npt.NDArray[np.int64], columns: Mapping[str, _Column], here: Sequence[int]) -> str | None:
    """Why ``index`` does not fit these ``columns`` and the buckets ``here``; None: it fits."""
    if sorted(index[:, form.Index.BUCKET].tolist()) != list(here):
        return "other buckets"
    if index.size and (index.min() < 0 or index.max() > MAX_FILE_BYTES // max(1, len(index))):
        return "counts that cannot be"
    totals = index.sum(0)
    for name, column in columns.items():
        if name != form.INDEX and len(column) != int(totals[form.COUNTED_BY[name]]):
            return f"{totals[form.COUNTED_BY[name]]} items of column {name}, which has {len(column)}"
    return None


class _Column:
    """One tensor of a file, with a buffer of the bytes around the last items."""

    def __init__(self, source: ModelFiles, piece: Piece) -> None:
        self._source = source
        self._piece = piece
        self._block = memoryview(bytearray(min(CHECKED_BYTES, piece.nbytes)))
        self._first = -1

    def __len__(self) -> int:
        return self._piece.shape[0]

    def items(self, begin: int, count: int) -> Array:
        """``count`` items from ``begin``."""
        found = np.empty((count, *self._piece.shape[1:]), self._piece.dtype.value)
        size = math.prod(self._piece.shape[1:]) * found.itemsize
        into = memoryview(found.reshape(-1).view(np.uint8).data)
        self._read(begin * size, (begin + count) * size, into)
        return found

    def _read(self, begin: int, end: int, into: memoryview) -> None:
        for first in range(begin - begin % CHECKED_BYTES, end, CHECKED_BYTES):
            last = min(first + CHECKED_BYTES, self._piece.nbytes)
            if first != self._first:
                self._first = -1
                self._source.read(self._piece, first, last, self._block[: last - first])
                self._first = first
            low, high = max(begin, first), min(end, last)
            into[low - begin : high - begin] = self._block[low - first : high - first]


@dataclass(frozen=True, slots=True)
class _Bucket:
    """One bucket in one file."""

    columns: Mapping[str, _Column]
    #: Its row of the index, and the sums of the buckets before it.
    counts: npt.NDArray[np.int64]
    begins: npt.NDArray[np.int64]

    @property
    def whole(self) -> bool:
        return bool(self.counts[form.Index.WHOLE])

    def items(self, kind: form.Index) -> int:
        return int(self.counts[kind])

    def numbers(self, name: str) -> npt.NDArray[np.int64]:
        """A column of int64; zeros if the file does not have it, as for uses that the table does not count."""
        counted = form.COUNTED_BY[name]
        if name not in self.columns:
            return np.zeros(self.items(counted), np.int64)
        return self.columns[name].items(int(self.begins[counted]), self.items(counted))

    def values(self, spec: TableSpec) -> npt.NDArray[np.float32]:
        """Values and state of its rows. float32 [n, width]"""
        found = np.empty((self.items(form.Index.ROWS), spec.width), np.float32)
        begin = int(self.begins[form.Index.ROWS])
        for name, place in ((form.ROWS, slice(0, spec.dim)), (form.STATE, slice(spec.dim, spec.width))):
            if name in self.columns:
                found[:, place] = self.columns[name].items(begin, len(found))
        return found


class _Kept:
    """The valid items of the layers of a bucket, newest first; in the order of their ids."""

    def __init__(self, layers: Sequence[_Bucket], name: str) -> None:
        self._layers = layers
        self._kept: list[npt.NDArray[np.bool_]] = []
        ids = [layer.numbers(name) for layer in layers]
        covered: list[Ids] = []
        for items, layer in zip(ids, layers, strict=True):
            self._kept.append(~np.isin(items, np.concatenate(covered)) if covered else np.ones(items.size, np.bool_))
            if layer is not layers[-1]:
                covered += [layer.numbers(each) for each in _IDS]
        merged = self._joined(ids)
        self._order = np.argsort(merged)
        self.ids: Ids = merged[self._order]

    def of(self, read: Callable[[_Bucket], npt.NDArray[T]]) -> npt.NDArray[T]:
        """A column of the valid items."""
        return self._joined([read(layer) for layer in self._layers])[self._order]

    def _joined(self, columns: Sequence[npt.NDArray[T]]) -> npt.NDArray[T]:
        return np.concatenate([column[kept] for column, kept in zip(columns, self._kept, strict=True)])


#: An id in any of these replaces or removes the id in older layers.
_IDS = (form.IDS, form.DELETED, form.WAITING_IDS, form.WAITING_DELETED)
