"""The Unix socket where shared memory is handed out: a path of mode 0600 in a folder of mode 0700 of its own."""

from __future__ import annotations

import fcntl
import logging
import os
import socket
import tempfile
from contextlib import suppress
from pathlib import Path

logger = logging.getLogger(__name__)

PREFIX = "torch-ps-shm-"
"""Of the folders' names."""

NAME = "socket"

_MAX_PATH_BYTES = 107
"""Of the address of a Unix socket."""

_BASES = (tempfile.gettempdir, lambda: "/dev/shm")  # where the other is too long a path


class PrivateSocket:
    """A listener in a folder that it owns. The folder of a process that was killed is removed by the next shard."""

    def __init__(self, path: Path, listener: socket.socket, folder: int) -> None:
        """``folder``: a descriptor that holds the folder's lock. See ``listen``."""
        self.path = path
        self.listener = listener
        self._folder = folder

    @classmethod
    def listen(cls, *, for_others: bool = False) -> PrivateSocket | None:
        """Listen on a new path; None where the system has no room for one.

        ``for_others``: other users may connect too, and are asked who they are; the path is still a secret.
        """
        for base in _BASES:
            try:
                made = _made_folder(Path(base()))
            except OSError as error:
                logger.debug("no socket for shared memory below %s: %s", base(), error)
                continue
            try:
                return cls(made[0] / NAME, _bound(made[0] / NAME, for_others), made[1])
            except OSError as error:
                logger.debug("no socket for shared memory in %s: %s", made[0], error)
                _remove(*made)
        return None

    def close(self) -> None:
        """Stop listening, and remove the folder."""
        self.listener.close()
        _remove(self.path.parent, self._folder)


def _made_folder(base: Path) -> tuple[Path, int]:
    """A new folder below ``base``, and a descriptor that holds its lock. Raises OSError."""
    _sweep(base)
    while True:
        path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=base))
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        fcntl.flock(folder, fcntl.LOCK_EX)
        if path.exists():
            return path, folder
        os.close(folder)  # another shard swept it before it was locked


def _bound(path: Path, for_others: bool) -> socket.socket:
    if len(os.fsencode(path)) > _MAX_PATH_BYTES:
        raise OSError(f"{path} is longer than a socket's path may be")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(str(path))
        path.chmod(0o666 if for_others else 0o600)
        path.parent.chmod(0o711 if for_others else 0o700)
        listener.listen(128)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener


def _sweep(base: Path) -> None:
    """Remove the folders of processes of this user that have ended without doing so."""
    for path in base.glob(f"{PREFIX}*"):
        with suppress(OSError):
            if path.is_symlink() or path.stat().st_uid != os.geteuid():
                continue
            folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                os.close(folder)  # in use
            else:
                _remove(path, folder)


def _remove(path: Path, folder: int) -> None:
    """Remove the folder, then give up its lock."""
    with suppress(OSError):
        (path / NAME).unlink(missing_ok=True)
        path.rmdir()
    os.close(folder)
