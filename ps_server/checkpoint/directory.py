"""The numbered checkpoints of a directory: creating, finding and removing them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from ps_protocol.errors import ConfigError, DamagedData, InvalidRequest
from ps_protocol.files import sync
from ps_server.checkpoint.files import (
    MANIFEST_NAME,
    make_folder,
    make_folders,
    remove_file,
    remove_tree,
    storage_errors,
)
from ps_server.checkpoint.manifest import read_manifest
from ps_server.checkpoint.validation import plain_name

_NAME = re.compile(r"checkpoint-(\d{8,})")


def begin(directory: Path) -> Path:
    """Make the folder of the next checkpoint, and ``directory`` if need be.

    Its number is one above the highest there, complete or not: an attempt that failed, and a shard that still writes
    for it, share no file with a later one. Numbers rise in order of time, also after an older checkpoint was restored.
    Raises ConfigError, StorageFull.
    """
    with storage_errors(directory):
        make_folders(directory)
        number = max((_number(folder) for folder in _folders(directory)), default=0) + 1
        while not make_folder(path := directory / f"checkpoint-{number:08d}"):
            number += 1
    return path


def committed(directory: Path) -> list[Path]:
    """The complete checkpoints, oldest first; empty if the directory does not exist."""
    return [folder for folder in _folders(directory) if (folder / MANIFEST_NAME).is_file()]


def latest(directory: Path) -> Path | None:
    """The newest complete checkpoint."""
    return next(reversed(committed(directory)), None)


def discard(folder: Path) -> None:
    """Remove the files of a failed attempt. Raises ConfigError for a complete checkpoint."""
    if (folder / MANIFEST_NAME).exists():
        raise ConfigError(f"{folder} is a checkpoint and stays", remedy="remove it by hand if you must")
    with storage_errors(folder):
        remove_tree(folder)
        sync(folder.parent)


def prune(directory: Path, keep: int, spared: Path | None = None) -> list[Path]:
    """Remove all but the newest ``keep`` checkpoints, ``spared``, and those they build on, and attempts older than the
    newest; returns what was removed.

    Called by the one process that commits. A checkpoint whose manifest cannot be read is neither counted nor removed.
    A crash on the way leaves each of them whole or without a manifest. Raises InvalidRequest when ``keep`` is below 1.
    """
    if keep < 1:
        raise InvalidRequest("at least one checkpoint is kept", expected="keep ≥ 1", actual=str(keep))
    complete = [folder for folder in committed(directory) if _readable(folder)]
    if not complete:
        return []
    attempts = [
        f for f in _folders(directory) if not (f / MANIFEST_NAME).exists() and _number(f) < _number(complete[-1])
    ]
    used = [] if spared is None else [folder for folder in complete if folder.resolve() == spared.resolve()]
    needed = _with_bases(complete[-keep:] + used)
    gone = sorted(attempts + [folder for folder in complete if folder.name not in needed], key=_number)
    # The newest first: so no remaining checkpoint builds on a removed one.
    for folder in reversed(gone):
        with storage_errors(folder):
            # The manifest first: without it the folder is not a checkpoint.
            remove_file(folder / MANIFEST_NAME)
            remove_tree(folder)
    if gone:
        with storage_errors(directory):
            sync(directory)
    return gone


def _with_bases(kept: Iterable[Path]) -> set[str]:
    """The names of ``kept``, and of every checkpoint that holds rows of one of these."""
    needed: set[str] = set()
    open_ends = list(kept)
    while open_ends:
        folder = open_ends.pop()
        if folder.name in needed or not _readable(folder):
            continue
        needed.add(folder.name)
        models = read_manifest(folder).models.values()
        bases = [part.base for model in models for part in model.tables if part.base]
        open_ends += [folder.parent / base.folder for base in bases]
    return needed


def _folders(directory: Path) -> list[Path]:
    if not directory.is_dir():
        return []
    return sorted((p for p in directory.iterdir() if _NAME.fullmatch(p.name) and p.is_dir()), key=_number)


def _number(folder: Path) -> int:
    found = _NAME.fullmatch(folder.name)
    return int(found[1]) if found else 0


def _readable(folder: Path) -> bool:
    try:
        read_manifest(folder)
    except (DamagedData, ConfigError):
        return False
    return True


@dataclass(frozen=True, slots=True)
class CheckpointRoots:
    """The directories of ``--checkpoint-dir``, resolved. Used from any thread; touches the disk."""

    folders: tuple[Path, ...] = ()

    @classmethod
    def of(cls, folders: Iterable[Path]) -> Self:
        """``folders`` need not exist yet."""
        return cls(tuple(folder.absolute().resolve() for folder in folders))

    def confine(self, text: str) -> Path:
        """The folder of a checkpoint, given by another process.

        Raises InvalidRequest unless it is below one of these folders and is not a link.
        """
        path = Path(text).absolute() if "\0" not in text else Path()
        folder = path.parent.resolve() / path.name
        inside = any(folder.parent == root or root in folder.parent.parents for root in self.folders)
        if not (plain_name(path.name) and inside) or folder.is_symlink():
            raise InvalidRequest(
                "a checkpoint is to be in a folder that this shard does not use",
                expected="a folder below " + " or ".join(map(str, self.folders))
                if self.folders
                else "no folder: this shard was started without --checkpoint-dir",
                actual=text[:500],
                remedy="start ps-server with --checkpoint-dir, the same as ps-coordinator's",
            )
        return folder
