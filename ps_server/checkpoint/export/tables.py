"""Exports the tables of a checkpoint to files with ids, rows and optimizer state."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

from ps_protocol.files import sync
from ps_server.checkpoint.export import parquet
from ps_server.checkpoint.export.parquet import ParquetFile
from ps_server.checkpoint.export.row_files import RowWriter, SafetensorsFile, file_form
from ps_server.checkpoint.folder.files import output
from ps_server.checkpoint.format.file_plan import model_folder, numbered
from ps_server.checkpoint.format.table_columns import FOLDER
from ps_server.checkpoint.read.checkpoint import Checkpoint
from ps_server.checkpoint.read.table_reader import SavedTable, saved_table


class RowFormat(enum.Enum):
    """File format of rows."""

    SAFETENSORS = "safetensors"
    PARQUET = "parquet"


def export_tables(
    checkpoint: Checkpoint, model: str, folder: Path, max_file_bytes: int, rows: RowFormat
) -> Iterator[Path]:
    """Write every table of ``model`` below ``folder``/tables, bucket by bucket; yields the files.

    A table gets several files where one would have more than ``max_file_bytes``, unless that is one bucket. Raises
    DamagedData, ConfigError without pyarrow, OSError.
    """
    specs = checkpoint.model(model).shard_map.spec.tables
    if specs:
        (folder / FOLDER).mkdir()
    for spec in specs:
        with saved_table(checkpoint, model, spec.name) as saved:
            groups = _groups(saved, max_file_bytes)
            for number, buckets in enumerate(groups, 1):
                path = folder / FOLDER / _name(spec.name, number, len(groups), rows)
                with _writer(path, saved, buckets, rows) as writer:
                    for bucket in buckets:
                        contents = saved.contents(bucket)
                        if contents.ids.size:
                            values = contents.rows
                            writer.put(contents.ids, values[:, : spec.dim], values[:, spec.dim :])
                yield path
    if specs:
        sync(folder / FOLDER)


def _groups(saved: SavedTable, max_file_bytes: int) -> list[list[int]]:
    row_bytes = 8 + 4 * saved.spec.width
    groups: list[list[int]] = [[]]
    room = max_file_bytes
    for bucket in range(saved.spec.buckets):
        size = saved.count(bucket) * row_bytes
        if size > room and groups[-1]:
            groups.append([])
            room = max_file_bytes
        groups[-1].append(bucket)
        room -= size
    return groups


def _name(table: str, number: int, of: int, rows: RowFormat) -> str:
    stem = model_folder(table)
    name = f"{stem}.safetensors" if of == 1 else numbered(stem, number, of)
    return name if rows is RowFormat.SAFETENSORS else name.removesuffix(".safetensors") + parquet.SUFFIX


@contextmanager
def _writer(path: Path, saved: SavedTable, buckets: Sequence[int], rows: RowFormat) -> Iterator[RowWriter]:
    if rows is RowFormat.PARQUET:
        with closing(ParquetFile(path, saved.spec.dim, saved.spec.state_width)) as file:
            yield file
        return
    form = file_form(path.name, saved.spec, sum(saved.count(bucket) for bucket in buckets))
    with output(path, form.size_bytes) as opened:
        yield SafetensorsFile(opened, form)
