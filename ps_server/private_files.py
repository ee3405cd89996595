"""Decides who may read what servers keep: folders and files are for their own user alone."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

FOLDER_MODE = 0o700
FILE_MODE = 0o600


def make_private_folder(path: Path) -> None:
    """Make ``path`` and what is missing above it, for this user alone; what exists stays as it is. Raises OSError."""
    if not path.parent.exists():
        make_private_folder(path.parent)
    path.mkdir(FOLDER_MODE, exist_ok=True)


def close_to_others(folder: Path) -> None:
    """Take a folder that an earlier version made away from other users; one of another owner stays. Raises OSError."""
    with suppress(PermissionError):
        folder.chmod(FOLDER_MODE)


def open_private(path: Path, buffering: int = -1) -> BinaryIO:
    """Open ``path`` to be written from its beginning; one that is made is for this user alone. Raises OSError."""
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, FILE_MODE), "wb", buffering)


def make_private_file(path: Path) -> None:
    """Make an empty file; one that exists is not opened, and stays as it is. Raises OSError."""
    with suppress(FileExistsError):
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE))
