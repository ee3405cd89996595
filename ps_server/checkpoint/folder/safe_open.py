"""Opens the files of a checkpoint for reading: only plain files below its folder, up to an expected size."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from ps_protocol.errors import DamagedData

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
# To open a FIFO would wait for its writer.
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def open_below(folder: Path, name: str) -> int:
    """A descriptor of the plain file ``name``, a relative path, below ``folder``. Links in the path are not followed.

    Raises OSError, and DamagedData for anything that is no plain file.
    """
    *steps, last = name.split("/")
    path, at = folder / name, os.open(folder, _FOLDER)
    try:
        for step in steps:
            at, before = os.open(step, _FOLDER | os.O_NOFOLLOW, dir_fd=at), at
            os.close(before)
        descriptor = os.open(last, _FILE, dir_fd=at)
    except OSError as error:
        error.filename = str(path)
        if error.errno in (errno.ELOOP, errno.ENOTDIR, errno.ENXIO):
            raise _no_file(path, error.strerror or str(error)) from error
        raise
    finally:
        os.close(at)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise _no_file(path, "a folder, a device or a pipe")
    return descriptor


def read_below(folder: Path, name: str, most_bytes: int) -> bytes:
    """All of a file. Raises as ``open_below``, and DamagedData for one of more than ``most_bytes``."""
    descriptor = open_below(folder, name)
    with os.fdopen(descriptor, "rb") as file:
        size = os.fstat(descriptor).st_size
        if size > most_bytes:
            raise DamagedData(
                f"{folder / name} is larger than it can be",
                expected=f"at most {most_bytes} bytes",
                actual=f"{size} bytes",
                remedy="restore another checkpoint, or a copy of this one",
            )
        return file.read(most_bytes)


def _no_file(path: Path, actual: str) -> DamagedData:
    return DamagedData(
        f"{path} is no plain file",
        expected="a plain file in the checkpoint's own folder, and no link",
        actual=actual,
        remedy="restore another checkpoint, or copy this one with what its links point at",
    )
