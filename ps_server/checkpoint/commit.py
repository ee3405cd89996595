"""Commits the parts that shards wrote as a checkpoint: checks that models are complete, and writes the manifest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

from ps_protocol.errors import ConfigError, DamagedData, InvalidRequest
from ps_protocol.files import replace_file, sync
from ps_protocol.model.spec import ShardMap
from ps_server.checkpoint.file_plan import INDEX_NAME, index_json, model_folder
from ps_server.checkpoint.files import MANIFEST_NAME, checksum, mode_in, storage_errors, write_file
from ps_server.checkpoint.manifest import MAX_MANIFEST_BYTES, Manifest, read_seal
from ps_server.checkpoint.record import Facts, FileRecord, ModelRecord, ShardPart


def commit(
    folder: Path, shard_maps: Sequence[ShardMap], parts: Sequence[ShardPart], facts: Facts, now: float
) -> Manifest:
    """Turn ``folder`` into a checkpoint of the models in ``shard_maps``; it is complete after the last rename.

    ``parts`` holds one part of every model from every shard that holds anything of it, all written with these shard
    maps. ``facts`` is what the job wants back; ``now`` is Unix time in seconds. Raises InvalidRequest when the parts do
    not make whole models, DamagedData when a file is not there or has another size, ConfigError when the folder is a
    checkpoint already or cannot be written, StorageFull; then the folder is not a checkpoint.
    """
    if (folder / MANIFEST_NAME).exists():
        raise ConfigError(f"{folder} is a checkpoint already", remedy="begin a new one: none is ever overwritten")
    models = {m.spec.name: assemble(m, [part for part in parts if part.model == m.spec.name]) for m in shard_maps}
    if strays := {part.model for part in parts} - models.keys():
        raise InvalidRequest("a part is of a model that is not in this checkpoint", actual=", ".join(sorted(strays)))
    with storage_errors(folder):
        for model in models.values():
            _check_bases(folder, model)
            for file in model.files:
                _check_size(folder / model.folder / file.name, file.size_bytes)
        models = {name: _with_index(folder, model) for name, model in models.items()}
        manifest = Manifest(version("torch-ps"), now, facts, models)
        data = manifest.encode()
        if len(data) > MAX_MANIFEST_BYTES:
            raise InvalidRequest(
                f"the manifest of {folder} is larger than readers take",
                expected=f"at most {MAX_MANIFEST_BYTES} bytes",
                actual=f"{len(data)} bytes",
                remedy="declare fewer and larger variables, or several jobs",
            )
        replace_file(folder / MANIFEST_NAME, data, mode_in(folder))
        sync(folder.parent)
    return manifest


def assemble(shard_map: ShardMap, parts: Sequence[ShardPart]) -> ModelRecord:
    """The model of which these are the ``parts``; touches no file.

    Raises InvalidRequest unless every shard that holds anything is there once, at the epoch of ``shard_map``, every
    slice is in exactly one part, every table of every shard that has buckets of it in one file, and every byte of every
    file belongs to a head or to one tensor. Empty parts of others mean nothing.
    """
    name, holders = shard_map.spec.name, shard_map.holders
    ordered = [p for p in sorted(parts, key=lambda p: p.shard) if p.pieces or p.tables or p.shard in holders]
    _same(name, "shards", holders, [part.shard for part in ordered])
    _same(name, "epochs of the shard map", [shard_map.epoch] * len(holders), [part.epoch for part in ordered])
    pieces = tuple(piece for part in ordered for piece in part.pieces)
    variables = shard_map.spec.variables
    slices = [(variables[s.variable].name, s.row_begin, s.row_end) for s in shard_map.slices]
    _same(name, "slices", sorted(slices), sorted((p.variable, *p.rows) for p in pieces if not p.state))
    tables = tuple(table for part in ordered for table in part.tables)
    held = zip(shard_map.spec.tables, shard_map.tables, strict=True)
    wanted = [(spec.name, shard) for spec, shards in held for shard in set(shards)]
    _same(name, "tables", sorted(wanted), sorted((table.table, table.shard) for table in tables))
    files: dict[str, FileRecord] = {}
    for part in ordered:
        for file in part.files:
            _same(name, f"forms of {file.name}", [files.setdefault(file.name, file)], [file])
    filled = Counter({file.name: file.head_bytes for file in files.values()})
    for piece in (*pieces, *(piece for table in tables for piece in table.pieces)):
        filled[piece.file] += piece.nbytes
    _same(name, "files and their bytes", sorted((f.name, f.size_bytes) for f in files.values()), sorted(filled.items()))
    facts = tuple(part.facts for part in ordered)
    return ModelRecord(model_folder(name), shard_map, tuple(files.values()), facts, pieces, tables)


def _same(model: str, what: str, expected: Sequence[Hashable], actual: Sequence[Hashable]) -> None:
    if expected == actual:
        return
    wanted, found = Counter(expected), Counter(actual)
    missing, extra = list((wanted - found).elements()), list((found - wanted).elements())
    raise InvalidRequest(
        f"the parts do not make a whole model '{model}': the {what} differ",
        expected=_shown(missing),
        actual=_shown(extra),
        remedy="take the checkpoint again",
    )


def _shown(items: Sequence[Hashable]) -> str:
    return ", ".join(map(str, items[:5])) + (f" and {len(items) - 5} more" if len(items) > 5 else "") or "none"


def _check_bases(folder: Path, model: ModelRecord) -> None:
    """Check that the checkpoints it builds on exist; none is removed before this one is complete."""
    for base in dict.fromkeys(table.base for table in model.tables if table.base):
        if read_seal(folder.parent / base.folder) != base.seal:
            raise InvalidRequest(
                f"rows of {folder} build on another checkpoint than {base.folder}", remedy="take the checkpoint again"
            )


def _check_size(path: Path, expected: int) -> None:
    actual = path.stat().st_size if path.exists() else None
    if actual != expected:
        raise DamagedData(
            f"{path} is not the file that the shards have written",
            expected=f"{expected} bytes",
            actual="no such file" if actual is None else f"{actual} bytes",
            remedy="give the coordinator and every shard the same checkpoint directory",
        )


def _with_index(folder: Path, model: ModelRecord) -> ModelRecord:
    """``model`` with the index that loaders read, now written."""
    values = [piece for piece in model.pieces if not piece.state]
    index = index_json({p.variable: p.file for p in values}, {"total_size": sum(p.nbytes for p in values)})
    write_file(folder / model.folder / INDEX_NAME, index)
    sync(folder / model.folder)
    record = FileRecord(INDEX_NAME, len(index), len(index), checksum(index))
    return replace(model, files=(*model.files, record))
