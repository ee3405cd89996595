"""Exports one model of a checkpoint to plain safetensors files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ps_protocol.errors import ConfigError
from ps_protocol.files import sync
from ps_protocol.model.spec import Variable
from ps_server.checkpoint.export.parquet import libraries
from ps_server.checkpoint.export.tables import RowFormat, export_tables
from ps_server.checkpoint.folder.files import (
    CHECKED_BYTES,
    output,
    remove_tree,
    rename_folder,
    storage_errors,
    write_file,
)
from ps_server.checkpoint.format.file_plan import INDEX_NAME, numbered
from ps_server.checkpoint.format.record import ModelRecord
from ps_server.checkpoint.format.tensor_header import FileForm, TensorForm, index_json
from ps_server.checkpoint.read.checkpoint import Checkpoint
from ps_server.checkpoint.read.source import ModelFiles, opened

SINGLE_NAME = "model.safetensors"

#: The limit that Hugging Face's save_pretrained uses.
MAX_FILE_BYTES = 5_000_000_000


def export(
    checkpoint: Checkpoint,
    target: Path,
    model: str,
    max_file_bytes: int = MAX_FILE_BYTES,
    rows: RowFormat = RowFormat.SAFETENSORS,
) -> list[Path]:
    """Write parameters, buffers and tables of ``model`` into the new folder ``target``; returns the files.

    As Hugging Face's save_pretrained: ``model.safetensors`` where all fits into ``max_file_bytes``, else numbered files
    of at most that many bytes of tensors (one tensor may be larger) and an index. Rows as ``export_tables`` says. The
    folder appears with all of it or not at all. Raises ConfigError when ``target`` exists, or without pyarrow for
    Parquet, DamagedData, ModelMismatch, StorageFull.
    """
    record = checkpoint.model(model)
    if rows is RowFormat.PARQUET:
        libraries()
    if target.exists():
        raise ConfigError(f"{target} exists", expected="a folder that is not there yet", remedy="name another one")
    partial = target.with_name(target.name + ".partial")
    groups = _grouped(record.shard_map.spec.variables, max_file_bytes)
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
        write_file(folder / INDEX_NAME, index_json(files, total))


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


def _grouped(variables: Sequence[Variable], max_file_bytes: int) -> list[list[Variable]]:
    """Variables in their order, in groups up to the size limit; no group for no variables."""
    if not variables:
        return []
    groups: list[list[Variable]] = [[]]
    room = max_file_bytes
    for variable in variables:
        if variable.nbytes > room and groups[-1]:
            groups.append([])
            room = max_file_bytes
        groups[-1].append(variable)
        room -= variable.nbytes
    return groups
