"""The file operations of checkpoints, in an order that survives a crash; a full disk is its own error.

New data is synced before anything names it: files, then their folder, then the manifest by rename, then its folder.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import xxhash

from ps_protocol.errors import ConfigError, DamagedData
from ps_protocol.files import FILE_MODE, FOLDER_MODE, full_disk, sync

MANIFEST_NAME = "manifest.json"

#: A checksum covers this many bytes of a tensor, or the rest of it. Part of the format.
CHECKED_BYTES = 1 << 20


def _ignore(written_bytes: int) -> None:
    """Ignore progress."""


class Output:
    """One file being written, by one thread; other processes may write other ranges of it at the same time."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def write(self, data: memoryview, position: int, wrote: Callable[[int], None] = _ignore) -> tuple[str, ...]:
        """Write bytes at ``position``; returns the checksum of each CHECKED_BYTES. Raises OSError.

        ``wrote`` is called with the bytes of each part written.
        """
        checksums = []
        for begin in range(0, len(data), CHECKED_BYTES):
            part = data[begin : begin + CHECKED_BYTES]
            # The checksum first: the write then finds the bytes in the processor's cache.
            checksums.append(checksum(part))
            written = 0
            while written < len(part):
                written += os.pwrite(self._descriptor, part[written:], position + begin + written)
            wrote(len(part))
        return tuple(checksums)


def checksum(data: bytes | bytearray | memoryview) -> str:
    """xxh3_64 of ``data``, 16 hexadecimal digits."""
    return xxhash.xxh3_64_hexdigest(data)


@contextmanager
def output(path: Path, size_bytes: int) -> Iterator[Output]:
    """Open ``path`` for writing, make it if need be, set its size; sync and close it at the end.

    Bytes that are there stay: other processes write to the same file. It is as open as its folder. Raises OSError.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, mode_in(path.parent))
    try:
        # Not fallocate: on file systems without it, libc overwrites bytes of other processes with zeros.
        os.ftruncate(descriptor, size_bytes)
        yield Output(descriptor)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def mode_in(folder: Path) -> int:
    """The mode of a new file in ``folder``: with the folder's read and write permissions for group and others. Raises
    OSError.
    """
    return FILE_MODE | (folder.stat().st_mode & 0o066)


def write_file(path: Path, data: bytes) -> None:
    """Write a whole file and sync it. Raises OSError."""
    with output(path, len(data)) as file:
        file.write(memoryview(data), 0)


def make_folder(path: Path) -> bool:
    """Make a folder; False where it exists. Its own entry is synced. Raises OSError.

    It is accessible to this user, and to the group if the parent folder is.
    """
    try:
        path.mkdir(FOLDER_MODE | (path.parent.stat().st_mode & 0o070))
    except FileExistsError:
        return False
    sync(path.parent)
    return True


def check_writable(folder: Path) -> None:
    """Make ``folder`` if it is missing, write a file there, and remove it. Raises ConfigError, StorageFull."""
    probe = folder / f".probe-{os.getpid()}-{secrets.token_hex(4)}"
    with storage_errors(folder):
        make_folders(folder)
        try:
            write_file(probe, b"probe")
        finally:
            remove_file(probe)


def make_folders(path: Path) -> None:
    """Make a folder and its missing parents. Raises OSError."""
    if not path.is_dir():
        make_folders(path.parent)
        make_folder(path)


def rename_folder(path: Path, target: Path) -> None:
    """Rename a folder to its final name; ``target`` does not exist or is empty. Raises OSError."""
    path.rename(target)
    sync(target.parent)


def remove_file(path: Path) -> None:
    """Remove a file if it is there, and sync its folder. Raises OSError."""
    try:
        path.unlink()
    except FileNotFoundError:
        return
    sync(path.parent)


def remove_tree(path: Path) -> None:
    """Remove a folder and all in it. Raises OSError."""
    for folder, folders, names in os.walk(path, topdown=False):
        for name in names:
            Path(folder, name).unlink()
        for name in folders:
            Path(folder, name).rmdir()
    path.rmdir()


@contextmanager
def storage_errors(path: Path, who: str = "") -> Iterator[None]:
    """Turn OSError into StorageFull when there is no room, into ConfigError otherwise."""
    remedy = "free some space, or keep fewer checkpoints; those that are complete stay as they are"
    try:
        with full_disk(f"no room to write the checkpoint at {path}", shard=who, remedy=remedy):
            yield
    except OSError as error:
        raise ConfigError(
            f"the checkpoint files at {error.filename or path} cannot be used: {error.strerror}",
            shard=who,
            remedy="give a checkpoint directory that the coordinator and every shard can read and write",
        ) from error


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
