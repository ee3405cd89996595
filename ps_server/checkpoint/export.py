"""Exports one model of a checkpoint to plain safetensors files, and the rows of its tables."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

from ps_protocol.errors import ConfigError
from ps_protocol.files import sync
from ps_server.checkpoint.checkpoint import Checkpoint
from ps_server.checkpoint.file_plan import (
    INDEX_NAME,
    MAX_FILE_BYTES,
    FileForm,
    TensorForm,
    grouped,
    index_json,
    model_folder,
    numbered,
)
from ps_server.checkpoint.files import (
    CHECKED_BYTES,
    output,
    remove_tree,
    rename_folder,
    storage_errors,
    write_file,
)
from ps_server.checkpoint.record import ModelRecord
from ps_server.checkpoint.row_files import SUFFIX, ParquetFile, RowWriter, SafetensorsFile, file_form, libraries
from ps_server.checkpoint.source import ModelFiles, opened
from ps_server.checkpoint.table_columns import FOLDER
from ps_server.checkpoint.table_reader import SavedTable, saved_table

SINGLE_NAME = "model.safetensors"


class RowFormat(enum.Enum):
    """File format of rows."""

    SAFETENSORS = "safetensors"
    PARQUET = "parquet"


def export(
    checkpoint: Checkpoint,
    target: Path,
    model: str,
    max_file_bytes: int = MAX_FILE_BYTES,
    rows: RowFormat = RowFormat.SAFETENSORS,
) -> list[Path]:
    """Write parameters, buffers and tables of ``model`` into the new folder ``target``; returns the files.

    As Hugging Face's save_pretrained: ``model.safetensors`` where all fits into ``max_file_bytes``, else numbered files
    of at most that many bytes of tensors (one tensor may be larger) and an index; rows by ``export_tables``. The
    folder appears with all of it or not at all. Raises ConfigError when ``target`` exists, or without pyarrow for
    Parquet, DamagedData, ModelMismatch, StorageFull.
    """
    record = checkpoint.model(model)
    if rows is RowFormat.PARQUET:
        libraries()
    if target.exists():
        raise ConfigError(f"{target} exists", expected="a folder that is not there yet", remedy="name another one")
    partial = target.with_name(target.name + ".partial")
    groups = grouped(record.shard_map.spec.variables, max_file_bytes)
    forms = [
        FileForm.of(
            SINGLE_NAME if len(groups) == 1 else numbered("model", number, len(groups)),
            [TensorForm(v.name, v.dtype, v.shape) for v in group],
        )
        for number, group in enumerate(groups, 1)
    ]
    with opened(checkpoint.folder, record) as source, storage_errors(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            partial.mkdir()
        except FileExistsError:
            raise ConfigError(f"{partial} exists: another export runs, or died", remedy="remove it, or wait") from None
        try:
            _write(source, record, forms, partial)
            files = [partial / form.name for form in forms]
            files += export_tables(checkpoint, model, partial, max_file_bytes, rows)
            sync(partial)
        except BaseException:
            remove_tree(partial)
            raise
        rename_folder(partial, target)
    return [target / file.relative_to(partial) for file in files]


def _write(source: ModelFiles, record: ModelRecord, forms: Sequence[FileForm], folder: Path) -> None:
    for form in forms:
        _copy(source, record, form, folder / form.name)
    if len(forms) > 1:
        files = {name: form.name for form in forms for name in form.at}
        total = sum(v.nbytes for v in record.shard_map.spec.variables)
        write_file(folder / INDEX_NAME, index_json(files, {"total_size": total}))


def _copy(source: ModelFiles, record: ModelRecord, form: FileForm, path: Path) -> None:
    row_bytes = {v.name: v.row_bytes for v in record.shard_map.spec.variables}
    buffer = memoryview(bytearray(CHECKED_BYTES))
    with output(path, form.size_bytes) as file:
        file.write(memoryview(form.head), 0)
        for piece in record.pieces:
            if piece.state or piece.variable not in form.at:
                continue
            at = form.at[piece.variable] + piece.row_begin * row_bytes[piece.variable]
            for begin in range(0, piece.nbytes, CHECKED_BYTES):
                part = buffer[: min(CHECKED_BYTES, piece.nbytes - begin)]
                source.read(piece, begin, begin + len(part), part)
                file.write(part, at + begin)


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
    return name if rows is RowFormat.SAFETENSORS else name.removesuffix(".safetensors") + SUFFIX


@contextmanager
def _writer(path: Path, saved: SavedTable, buckets: Sequence[int], rows: RowFormat) -> Iterator[RowWriter]:
    if rows is RowFormat.PARQUET:
        with closing(ParquetFile(path, saved.spec.dim, saved.spec.state_width)) as file:
            yield file
        return
    form = file_form(path.name, saved.spec, sum(saved.count(bucket) for bucket in buckets))
    with output(path, form.size_bytes) as opened:
        yield SafetensorsFile(opened, form)
