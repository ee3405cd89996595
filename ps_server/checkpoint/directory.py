"""The numbered checkpoints of a directory: creating, finding, keeping and removing them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from ps_protocol.errors import ConfigError, DamagedData, InvalidRequest
from ps_protocol.files import replace_file, sync
from ps_protocol.sealed import seal, unseal
from ps_server.checkpoint.files import (
    MANIFEST_NAME,
    make_folder,
    make_folders,
    mode_in,
    read_below,
    remove_file,
    remove_tree,
    storage_errors,
)
from ps_server.checkpoint.manifest import read_manifest
from ps_server.checkpoint.validation import plain_name

_NAME = re.compile(r"checkpoint-(\d{8,})")

MARK_NAME = "kept.json"
"""In a checkpoint that is kept beside the newest ones: why. Without it, it is removed like others."""

MARKS = 2
"""So many checkpoints are kept for what members of one role report: the last ones."""

NEAREST = 4
"""Of more steps than this, the nearest are named."""

_MARK_FORMAT = 1
_MARK_BYTES = 4096


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


def of_step(directory: Path, step: int) -> Path:
    """The newest complete checkpoint of ``step``. Raises ConfigError, which names the nearest steps."""
    found = [(read_manifest(folder).step, folder) for folder in committed(directory) if _readable(folder)]
    alike = [folder for other, folder in found if other == step]
    if alike:
        return alike[-1]
    steps = sorted({other for other, _ in found})
    near = sorted(sorted(steps, key=lambda other: abs(other - step))[:NEAREST])
    more = f", of {len(steps)} from {steps[0]} to {steps[-1]}" if len(steps) > NEAREST else ""
    raise ConfigError(
        f"no complete checkpoint in {directory} is of step {step}",
        expected=(", ".join(map(str, near)) + more) if near else "a checkpoint: there is none",
        actual=str(step),
        remedy="psctl checkpoints FOLDER lists them",
    )


@dataclass(frozen=True, slots=True)
class KeptMark:
    """Why a checkpoint is kept beside the newest ones."""

    why: str
    #: The role of the members that reported it.
    role: str


def mark_of(folder: Path) -> KeptMark | None:
    """Why the checkpoint is kept; None: it is not. One whose mark cannot be read is kept."""
    path = folder / MARK_NAME
    if not path.exists():
        return None
    try:
        return unseal(read_below(folder, MARK_NAME, _MARK_BYTES), _MARK_FORMAT, path, _mark, "remove this file")
    except (DamagedData, OSError):
        return KeptMark(f"{MARK_NAME} cannot be read", "")


def _mark(body: Mapping[str, Any]) -> KeptMark:
    return KeptMark(str(body["why"]), str(body["role"]))


def protect(directory: Path, since_seconds: float, mark: KeptMark) -> Path | None:
    """Keep the newest checkpoint that was complete by ``since_seconds``, else the oldest there is; returns it.

    Of the marks of one role the last ``MARKS`` stay. None: there is no checkpoint. Raises ConfigError, StorageFull.
    """
    complete = [folder for folder in committed(directory) if _readable(folder)]
    if not complete:
        return None
    before = [folder for folder in complete if read_manifest(folder).committed_seconds <= since_seconds]
    chosen = before[-1] if before else complete[0]
    if mark_of(chosen) is None:
        with storage_errors(chosen):
            data = seal(_MARK_FORMAT, {"why": mark.why, "role": mark.role})
            replace_file(chosen / MARK_NAME, data, mode_in(chosen))
    marks = {folder: mark_of(folder) for folder in complete}
    alike = [folder for folder, known in marks.items() if known and known.role == mark.role and folder != chosen]
    for folder in alike[: -(MARKS - 1)]:
        with storage_errors(folder):
            remove_file(folder / MARK_NAME)
    return chosen


def prune(directory: Path, keep: int, spared: Path | None = None) -> list[Path]:
    """Remove all but the newest ``keep`` checkpoints, ``spared``, those with a mark, and those they build on, and
    attempts older than the newest; returns what was removed.

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
    used += [folder for folder in complete if mark_of(folder) is not None]
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


@dataclass(frozen=True, slots=True)
class Listed:
    """One complete checkpoint of a directory. The numbers are None where its manifest cannot be read."""

    folder: Path
    step: int | None
    size_bytes: int | None
    #: When it was complete, in seconds since 1970.
    at_seconds: float | None
    #: Why it is kept beside the newest ones; empty: it is not.
    kept: str


def listed(directory: Path) -> list[Listed]:
    """The complete checkpoints, oldest first."""
    found = []
    for folder in committed(directory):
        mark = mark_of(folder)
        kept = mark.why if mark else ""
        if _readable(folder):
            manifest = read_manifest(folder)
            found.append(Listed(folder, manifest.step, manifest.size_bytes, manifest.committed_seconds, kept))
        else:
            found.append(Listed(folder, None, None, None, kept))
    return found


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
