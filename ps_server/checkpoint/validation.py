"""Validates a manifest: types, ranges, names, and that its parts are complete models.

A checksum proves that a manifest is as it was written, not who wrote it. A reader relies on all that is checked here.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import pairwise
from pathlib import PurePosixPath

from ps_protocol.model.row_optimizers import ROW_OPTIMIZERS
from ps_protocol.model.spec import Kind, ModelSpec, ShardMap, Slice, Variable
from ps_protocol.model.tables import MAX_BUCKETS, MAX_DIM, TableSpec
from ps_server.checkpoint import table_columns as form
from ps_server.checkpoint.file_plan import model_folder
from ps_server.checkpoint.files import CHECKED_BYTES
from ps_server.checkpoint.record import FileRecord, ModelRecord, Piece, TablePart

MAX_FILE_BYTES = 1 << 60
"""Far above any real file, and far below the limits of arithmetic and system calls."""

MAX_HEAD_BYTES = 256 << 20
"""Of a safetensors file: it names every tensor of the file once."""

MAX_TEXT = 4096
"""Characters of a name."""

_MOST = (1 << 62) - 1
_CHECKSUM = re.compile(r"[0-9a-f]{16}")
_MOST_AXES = 64
_MOST_FOLDERS = 4


def check_models(models: Mapping[str, ModelRecord]) -> None:
    """Raises ValueError for models that cannot be from ``commit``."""
    for name, model in models.items():
        _require(model.shard_map.spec.name == name, "a model is stored under the name of another one")
        _require(model.folder == model_folder(name), f"the folder of a model is {model.folder!r}")
        check_record(model)


def check_record(model: ModelRecord) -> None:
    """Raises ValueError for an incomplete model, or impossible files."""
    _check_spec(model.shard_map.spec)
    _check_map(model.shard_map)
    files = {file.name: file for file in model.files}
    _require(len(files) == len(model.files), "a file is there twice")
    for file in model.files:
        _check_file(file)
    _require(all(isinstance(facts, dict) for facts in model.facts), "facts are no objects")
    _check_dense(model, files)
    _check_tables(model, files)
    filled = Counter({file.name: file.head_bytes for file in model.files})
    for piece in (*model.pieces, *(piece for part in model.tables for piece in part.pieces)):
        filled[piece.file] += piece.nbytes
    _require(all(filled[file.name] == file.size_bytes for file in model.files), "a file has bytes of no tensor")


def plain_name(name: object) -> bool:
    """Whether ``name`` is a single plain component of a path."""
    return (
        isinstance(name, str)
        and 0 < len(name.encode(errors="replace")) <= 255
        and name not in (".", "..")
        and not any(c in "/\0" or "\ud800" <= c <= "\udfff" for c in name)
    )


def below(path: object) -> bool:
    """Whether ``path`` is relative and has plain components only."""
    if not isinstance(path, str):
        return False
    steps = path.split("/")
    return len(steps) <= _MOST_FOLDERS and all(map(plain_name, steps)) and str(PurePosixPath(path)) == path


def whole_number(value: object, most: int = _MOST) -> bool:
    """Whether ``value`` is a number from 0 to ``most``."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= most


def is_checksum(value: object) -> bool:
    """Whether ``value`` looks like one."""
    return isinstance(value, str) and _CHECKSUM.fullmatch(value) is not None


def _require(true: bool, otherwise: str) -> None:
    if not true:
        raise ValueError(otherwise)


def _check_spec(spec: ModelSpec) -> None:
    names = [variable.name for variable in spec.variables] + [table.name for table in spec.tables]
    _require(len(set(names)) == len(names), "a name is there twice")
    for variable in spec.variables:
        elements = _elements(variable.shape)
        _require(elements * variable.dtype.itemsize <= MAX_FILE_BYTES, f"'{variable.name}' has {variable.shape}")
        grouped = variable.kind is Kind.BUFFER or variable.group < len(spec.group_options)
        _require(grouped, f"'{variable.name}' is in no group")
    for table in spec.tables:
        fine = table.name and 1 <= table.dim <= MAX_DIM and 1 <= table.buckets <= MAX_BUCKETS
        _require(bool(fine) and table.buckets & (table.buckets - 1) == 0, f"table '{table.name}' cannot be")
        _require(table.optimizer in ROW_OPTIMIZERS, f"row optimizer {table.optimizer!r}")


def _elements(shape: Iterable[object]) -> int:
    """The number of elements of a tensor of ``shape``. Raises ValueError for an invalid shape."""
    found, lengths = 1, tuple(shape)
    _require(len(lengths) <= _MOST_AXES, f"a shape of {len(lengths)} axes")
    for length in lengths:
        _require(whole_number(length, MAX_FILE_BYTES), f"a shape with {length!r}")
        found *= length  # type: ignore[operator]
    _require(found <= MAX_FILE_BYTES, f"a shape {lengths}")
    return found


def _check_map(shard_map: ShardMap) -> None:
    spec = shard_map.spec
    _require(shard_map.shards >= 1, "a job of no shard")
    by_variable: dict[int, list[Slice]] = {number: [] for number in range(len(spec.variables))}
    for piece in shard_map.slices:
        _require(piece.variable in by_variable, f"a slice of variable {piece.variable}")
        _require(piece.shard < shard_map.shards, f"a slice on shard {piece.shard}")
        _require(0 <= piece.row_begin <= piece.row_end, f"rows {piece.row_begin} to {piece.row_end}")
        by_variable[piece.variable].append(piece)
    for number, slices in by_variable.items():
        _check_rows(spec.variables[number], sorted(slices, key=lambda s: (s.row_begin, s.row_end)))
    _require(len(shard_map.tables) == len(spec.tables), "tables without places")
    for table, owners in zip(spec.tables, shard_map.tables, strict=True):
        _require(len(owners) == table.buckets, f"{len(owners)} buckets of table '{table.name}'")
        _require(max(owners) < shard_map.shards, f"a bucket of '{table.name}' on shard {max(owners)}")


def _check_rows(variable: Variable, slices: list[Slice]) -> None:
    """Every row is in one slice."""
    _require(bool(slices), f"no rows of '{variable.name}'")
    meet = all(one.row_end == next_one.row_begin for one, next_one in pairwise(slices))
    _require(
        meet and slices[0].row_begin == 0 and slices[-1].row_end == variable.rows,
        f"rows of '{variable.name}' are missing or in two slices",
    )


def _check_file(file: FileRecord) -> None:
    _require(below(file.name), f"a file {file.name!r}")
    _require(
        whole_number(file.size_bytes, MAX_FILE_BYTES) and whole_number(file.head_bytes, MAX_HEAD_BYTES),
        f"{file.name} has {file.size_bytes!r} bytes",
    )
    _require(file.head_bytes <= file.size_bytes and is_checksum(file.head_checksum), f"the head of {file.name}")


def _check_piece(piece: Piece, files: Mapping[str, FileRecord]) -> None:
    _require(isinstance(piece.variable, str) and isinstance(piece.state, str), "a tensor without a name")
    _require(len(piece.state) <= MAX_TEXT, "a name that is too long")
    _require(isinstance(piece.file, str) and piece.file in files, f"a tensor in {piece.file!r}")
    _require(whole_number(piece.row_begin) and whole_number(piece.row_end), f"rows of {piece.variable!r}")
    _require(_elements(piece.shape) * piece.dtype.itemsize <= MAX_FILE_BYTES, f"a tensor of {piece.shape}")
    file = files[piece.file]
    _require(
        whole_number(piece.at, MAX_FILE_BYTES) and file.head_bytes <= piece.at <= file.size_bytes - piece.nbytes,
        f"{piece} is not inside {piece.file}",
    )
    count = -(-piece.nbytes // CHECKED_BYTES)
    _require(len(piece.checksums) == count and all(map(is_checksum, piece.checksums)), f"the checksums of {piece}")


def _check_dense(model: ModelRecord, files: Mapping[str, FileRecord]) -> None:
    variables = {variable.name: variable for variable in model.shard_map.spec.variables}
    named = model.shard_map.spec.variables
    slices = Counter((named[s.variable].name, s.row_begin, s.row_end) for s in model.shard_map.slices)
    dtypes: dict[tuple[str, str], object] = {}
    seen: set[tuple[str, str, int, int]] = set()
    for piece in model.pieces:
        _check_piece(piece, files)
        _require((piece.variable, *piece.rows) in slices, f"{piece} belongs to no slice")
        variable = variables[piece.variable]
        if not piece.state:
            shape = (piece.row_end - piece.row_begin, *variable.shape[1:]) if variable.shape else ()
            _require((piece.shape, piece.dtype) == (shape, variable.dtype), f"{piece} has shape {piece.shape}")
        key = (piece.variable, piece.state, *piece.rows)
        # Slices without rows may occur several times.
        _require(key not in seen or piece.row_begin == piece.row_end, f"{piece} is there twice")
        seen.add(key)
        _require(
            dtypes.setdefault(key[:2], piece.dtype) == piece.dtype, f"{piece} has another dtype than its other rows"
        )
    values = Counter((piece.variable, *piece.rows) for piece in model.pieces if not piece.state)
    _require(values == slices, "the values of a slice are missing, or there twice")


def _check_tables(model: ModelRecord, files: Mapping[str, FileRecord]) -> None:
    known = {spec.name: spec for spec in model.shard_map.spec.tables}
    wanted = {
        (spec.name, shard)
        for spec, owners in zip(known.values(), model.shard_map.tables, strict=True)
        for shard in set(owners)
    }
    found = [(part.table, part.shard) for part in model.tables]
    _require(len(set(found)) == len(found) and set(found) == wanted, "the parts of a table are missing, or there twice")
    for part in model.tables:
        _check_part(part, known[part.table], files)


def _check_part(part: TablePart, spec: TableSpec, files: Mapping[str, FileRecord]) -> None:
    _require(whole_number(part.updates), f"updates of table '{part.table}'")
    _require(isinstance(part.file, str) and part.file in files, f"table '{part.table}' in {part.file!r}")
    if part.base:
        _require(plain_name(part.base.folder) and is_checksum(part.base.seal), f"table '{part.table}' builds on")
    columns = [piece.state for piece in part.pieces]
    _require(len(set(map(str, columns))) == len(columns), f"a column of '{part.table}' is there twice")
    _require({form.INDEX, form.IDS, form.ROWS} <= set(columns) <= form.COLUMNS, f"the columns of '{part.table}'")
    for piece in part.pieces:
        _check_piece(piece, files)
        same = (piece.variable, piece.file, piece.shape[1:]) == (
            spec.name,
            part.file,
            form.item_shape(piece.state, spec),
        )
        _require(same and len(piece.shape) >= 1, f"{piece} is no column of table '{spec.name}'")
        _require(piece.dtype is form.dtype_of(piece.state), f"{piece} has dtype {piece.dtype.value}")
        _require(piece.rows == (0, piece.shape[0]), f"the rows of {piece}")
        most = spec.buckets if piece.state == form.INDEX else MAX_FILE_BYTES
        _require(piece.shape[0] <= most, f"{piece} is too long")
