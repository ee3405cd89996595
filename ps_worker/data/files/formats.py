"""Reads the rows of pieces of files as Arrow record batches."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ps_protocol.errors import DamagedData
from ps_worker.data.files.columns import HASHED, IDS, ColumnSpec, libraries
from ps_worker.data.files.layout import Group
from ps_worker.data.files.sources import Source, csv_options

_BUFFER_BYTES = 1 << 20
_LINE_BYTES = 1 << 16
_MOST_LINE_BYTES = 64 << 20
"""A line that is longer is none."""


@dataclass(frozen=True, slots=True)
class GroupRows:
    """Rows of one group that follow each other."""

    #: pyarrow RecordBatch or Table.
    data: Any
    group: Group
    #: Of the first one in its group.
    first: int


class FileReader:
    """Reads pieces in turn. Used by one thread; keeps the file open that it read last, and its place in it."""

    def __init__(self, sources: Sequence[Source], columns: Mapping[str, ColumnSpec], batch_rows: int) -> None:
        """``columns``: each of a known kind. ``batch_rows``: the most rows that are read at a time."""
        self._arrow, self._parquet, self._csv = libraries("pyarrow.parquet", "pyarrow.csv")
        self._sources = sources
        self._columns = columns
        self._names = list(dict.fromkeys(name for entry in columns.values() for name in entry.names))
        self._batch_rows = batch_rows
        self._file: tuple[int, Any] | None = None
        #: What is left of the group that was read last, and the row where it goes on.
        self._open: tuple[Group, int, Iterator[Any]] | None = None

    def place(self, group: Group) -> str:
        """A group, for messages."""
        source = self._sources[group.file]
        if source.text is None:
            return f"{source.path}, row group {group.number}"
        if source.text.codec or source.text.quoted_lines:
            return str(source.path)
        begin = group.number * source.block_bytes
        return f"{source.path}, lines from byte {begin} to {min(source.size, begin + source.block_bytes) - 1}"

    def read(self, group: Group, begin: int) -> Iterator[GroupRows]:
        """The rows of ``group`` from ``begin`` on. Raises DamagedData for a file that has changed or cannot be read."""
        source = self._sources[group.file]
        at = begin
        try:
            source.check_unchanged()
            for batch in self._from(group, begin):
                yield GroupRows(self._with_partitions(batch, source), group, at)
                at += len(batch)
        except (OSError, self._arrow.ArrowException) as error:
            column = self._column_of(error, source)
            self._open = self._file = None
            raise DamagedData(
                f"{self.place(group)}{column} cannot be read: {error}"[:600],
                remedy="write the file again, or leave out what cannot be read: on_bad_file='skip'",
            ) from error
        except DamagedData:
            self._open = self._file = None
            raise
        if group.rows is not None and at < group.rows:
            raise DamagedData(
                f"{self.place(group)} has fewer rows than its footer says", expected=str(group.rows), actual=str(at)
            )

    def _from(self, group: Group, begin: int) -> Iterator[Any]:
        """Batches of the group, from row ``begin`` on."""
        if self._open is None or self._open[0] != group or self._open[1] > begin:
            source = self._sources[group.file]
            batches = self._row_group(source, group) if source.text is None else self._text(source, group)
            self._open = group, 0, batches
        while self._open is not None:
            _, at, batches = self._open
            batch = next(batches, None)
            if batch is None:
                self._open = None
                return
            self._open = group, at + len(batch), batches
            if at + len(batch) > begin:
                yield batch[max(0, begin - at) :]

    def _row_group(self, source: Source, group: Group) -> Iterator[Any]:
        if self._file is None or self._file[0] != group.file:
            self._file = (
                group.file,
                # Column chunks are read as they are decoded, not whole: a row group may be larger than the memory.
                self._parquet.ParquetFile(
                    source.path, pre_buffer=False, buffer_size=_BUFFER_BYTES, page_checksum_verification=True
                ),
            )
        file = self._file[1]
        names = [name for name in self._names if name in file.schema_arrow.names]
        batches = file.iter_batches(self._batch_rows, row_groups=[group.number], columns=names, use_threads=True)
        return iter(batches)

    def _text(self, source: Source, group: Group) -> Iterator[Any]:
        assert source.text is not None
        if source.text.codec or source.text.quoted_lines:
            yield from self._stream(source)
            return
        data, first = _lines_of(source, group.number * source.block_bytes)
        if not first and source.text.header is None:
            data = data[data.find(b"\n") + 1 :] if b"\n" in data else b""
        if data.strip(b"\r\n"):
            in_file = self._in_file(source)
            yield self._csv.read_csv(
                self._arrow.BufferReader(data),
                **csv_options(self._csv, source.text, in_file, self._types(source)),
            )

    def _stream(self, source: Source) -> Iterator[Any]:
        assert source.text is not None
        with self._arrow.OSFile(os.fspath(source.path)) as raw:
            stream = self._arrow.CompressedInputStream(raw, source.text.codec) if source.text.codec else raw
            options = csv_options(self._csv, source.text, source.text.header, self._types(source))
            with self._csv.open_csv(stream, **options) as batches:
                yield from batches

    def _in_file(self, source: Source) -> list[str]:
        return [name for name in source.schema.names if name not in source.partitions] if source.schema else []

    def _types(self, source: Source) -> dict[str, Any]:
        """The columns that are read of a text file, as they are to be converted."""
        in_file = set(self._in_file(source))
        arrow = self._arrow
        types: dict[str, Any] = {}
        for entry in self._columns.values():
            text = entry.kind == HASHED or entry.split is not None
            due = arrow.large_string() if text else arrow.int64() if entry.kind == IDS else arrow.float64()
            types |= {name: due for name in entry.names if name in in_file}
        return types

    def _with_partitions(self, batch: Any, source: Source) -> Any:
        arrow = self._arrow
        for name in self._names:
            if name not in batch.schema.names:
                value = source.partitions.get(name)
                kind = source.schema.field(name).type
                scalar = arrow.scalar(None if value is None else int(value) if kind == arrow.int64() else value, kind)
                table = batch if isinstance(batch, arrow.Table) else arrow.Table.from_batches([batch])
                batch = table.append_column(name, arrow.repeat(scalar, len(batch)))
        return batch

    def _column_of(self, error: Exception, source: Source) -> str:
        """The column that an error of the CSV reader is about, as ", column 'x'"; empty if it says none."""
        found = re.search(r"In CSV column #(\d+)", str(error))
        if not found:
            return ""
        names = self._in_file(source)
        number = int(found[1])
        return f", column '{names[number]}'" if number < len(names) else ""


def _lines_of(source: Source, begin: int) -> tuple[bytes, int]:
    """The lines that begin in a range of bytes, and where the first one begins."""
    end = begin + source.block_bytes
    with source.path.open("rb") as file:
        first = begin
        if begin:
            # The line before ends with the first line end from the byte before the range on.
            file.seek(begin - 1)
            first = begin - 1 + len(_to_line_end(file, source))
            if first >= end:
                return b"", first
        data = file.read(end - first)
        if data and not data.endswith(b"\n"):
            data += _to_line_end(file, source)
    return data, first


def _to_line_end(file: Any, source: Source) -> bytes:
    read = b""
    while chunk := file.readline(_LINE_BYTES):
        read += chunk
        if chunk.endswith(b"\n"):
            break
        if len(read) > _MOST_LINE_BYTES:
            raise DamagedData(
                f"{source.path} has a line of more than {_MOST_LINE_BYTES >> 20} MiB", expected="lines of text"
            )
    return read
