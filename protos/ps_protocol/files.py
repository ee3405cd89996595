"""Files and folders: private to their user, replaced in one step, and on the disk before anything counts on them."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

from ps_protocol.errors import StorageFull

FOLDER_MODE = 0o700
FILE_MODE = 0o600

PUBLIC_MODE = 0o666
"""Of a file that is as open as the umask of its process allows."""

_MARK = "made-by-torch-ps"


def make_private_folder(path: Path) -> None:
    """Make ``path`` and what is missing above it, for this user alone; what exists stays as it is. Raises OSError."""
    if not path.parent.exists():
        make_private_folder(path.parent)
    path.mkdir(FOLDER_MODE, exist_ok=True)


def open_private(path: Path, buffering: int = -1) -> BinaryIO:
    """Open ``path`` to be written from its beginning; one that is made is for this user alone. Raises OSError."""
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, FILE_MODE), "wb", buffering)


def make_private_file(path: Path) -> None:
    """Make an empty file; one that exists is not opened, and stays as it is. Raises OSError."""
    with suppress(FileExistsError):
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE))


def replace_file(path: Path, data: bytes, mode: int = FILE_MODE, *, durable: bool = True) -> None:
    """Replace the content of the file ``path`` by ``data``, as ``replacing``. Raises OSError."""
    with _partial(path, mode, durable=durable) as descriptor:
        written = 0
        while written < len(data):
            written += os.pwrite(descriptor, data[written:], written)


@contextmanager
def replacing(path: Path, mode: int = FILE_MODE, *, durable: bool = True) -> Iterator[BinaryIO]:
    """A file to be written, which takes the place of ``path`` in one step at the end of the block.

    A reader finds the old content or the new, and the old stays where the block raises. ``durable``: the new content
    survives a loss of power from then on. Raises OSError.
    """
    with _partial(path, mode, durable=durable) as descriptor, os.fdopen(descriptor, "wb", closefd=False) as file:
        yield file


@contextmanager
def _partial(path: Path, mode: int, *, durable: bool) -> Iterator[int]:
    partial = path.with_name(f"{path.name}.{os.getpid()}.part")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, mode)
    try:
        try:
            yield descriptor
            if durable:
                os.fsync(descriptor)
        finally:
            os.close(descriptor)
        partial.rename(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    if durable:
        sync(path.parent)


def sync(path: Path) -> None:
    """Have a file, or the entries of a folder, on the disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def full_disk(what: str, *, shard: str = "", expected: str = "", actual: str = "", remedy: str) -> Iterator[None]:
    """Raise StorageFull with these texts in place of an OSError that says that there is no space; others pass."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        text = f"{what}: {error.strerror}"
        raise StorageFull(text, shard=shard, expected=expected, actual=actual, remedy=remedy) from error


class OwnFolder:
    """A temporary folder of one process, which holds its lock. A context: the folder goes with its end.

    One whose process was killed is removed by the next of the same kind and user: its lock is free then.
    """

    def __init__(self, prefix: str, base: Path | None = None) -> None:
        """Make one below ``base``, by default where temporary files are. ``prefix``: of its name, and of those that are
        removed; nobody makes such a folder without a lock. Raises OSError.
        """
        base = base or Path(tempfile.gettempdir())
        sweep(base.glob(f"{prefix}*"))
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=base))
            self._lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            with suppress(FileNotFoundError):
                make_private_file(self.path / _MARK)
                return
            os.close(self._lock)  # another process swept it before it was locked

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Remove the folder, then give up its lock."""
        _remove(self.path)
        os.close(self._lock)


def sweep(folders: Iterable[Path], remove: Callable[[Path], None] | None = None) -> None:
    """``remove`` those of ``folders`` that are of this user and that no process has locked: theirs have ended without
    doing so. By default those that OwnFolder made are removed.
    """
    for path in folders:
        with suppress(OSError):
            if path.is_symlink() or path.stat().st_uid != os.geteuid():
                continue
            folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
                (remove or _remove)(path)
            finally:
                os.close(folder)


def _remove(path: Path) -> None:
    """Remove a folder that is locked; of one that was not made here nothing but itself, where it is empty."""
    if (path / _MARK).is_file():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.rmdir()
