"""The folder that a run keeps its files in: in memory, where the machine has room for files there."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_MEMORY = Path("/dev/shm")
_PREFIX = "torch-ps-simulation-"


def _place() -> Path:
    return _MEMORY if _MEMORY.is_dir() else Path(tempfile.gettempdir())


@contextmanager
def new_folder() -> Iterator[Path]:
    """An empty folder until the end of the block. Its name says whose it is, at a fixed length: records hold paths."""
    folder = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid():07}_", dir=_place()))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def remove_left_behind() -> None:
    """Remove the folders of processes that were killed: they take memory."""
    for folder in _place().glob(f"{_PREFIX}*"):
        if (owner := re.match(rf"{_PREFIX}(\d+)_", folder.name)) and not _is_alive(int(owner[1])):
            shutil.rmtree(folder, ignore_errors=True)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
