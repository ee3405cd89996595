"""Files that are written whole, renamed in one step, their folders synced; a full disk has its own error."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ps_protocol.errors import ConfigError, StorageFull
from ps_server.private_files import FILE_MODE, make_private_folder, open_private


def replace_file(path: Path, data: bytes) -> None:
    """Replace the content of the file ``path`` by ``data`` atomically. Raises OSError."""
    partial = path.with_name(path.name + ".part")
    with open_private(partial) as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make renames and new files in ``folder`` survive a power loss."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def told_when_full(shard: int, folder: Path) -> Iterator[None]:
    """Turn "no space left" into StorageFull; other errors pass."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise StorageFull(
            f"shard {shard} has no room for its log: {error.strerror}",
            shard=str(shard),
            expected="free space in the shard's data directory",
            actual=str(folder),
            remedy="free some space; pushes are accepted again as soon as there is room",
        ) from error


def writable_folder(folder: Path) -> None:
    """Create ``folder`` and check that it can be written. Raises ConfigError."""
    try:
        make_private_folder(folder)
        probe = folder / ".writable"
        probe.touch(FILE_MODE)
        probe.unlink()
    except OSError as error:
        raise ConfigError(
            f"the data directory {folder} cannot be written: {error.strerror}",
            remedy="give --data-dir a folder this process may write",
        ) from error
