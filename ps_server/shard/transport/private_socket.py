"""The Unix socket where shared memory is handed out: a path of mode 0600 in a folder of mode 0700 of its own."""

from __future__ import annotations

import logging
import os
import socket
import tempfile
from pathlib import Path

from ps_protocol.files import OwnFolder

logger = logging.getLogger(__name__)

PREFIX = "torch-ps-shm-"
"""Of the folders' names."""

NAME = "socket"

_MAX_PATH_BYTES = 107
"""Of the address of a Unix socket."""

_BASES = (tempfile.gettempdir, lambda: "/dev/shm")  # where the other is too long a path


class PrivateSocket:
    """A listener in a folder that it owns. The folder of a process that was killed is removed by the next shard."""

    def __init__(self, path: Path, listener: socket.socket, folder: OwnFolder) -> None:
        """See ``listen``."""
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
                folder = OwnFolder(PREFIX, Path(base()))
            except OSError as error:
                logger.debug("no socket for shared memory below %s: %s", base(), error)
                continue
            try:
                return cls(folder.path / NAME, _bound(folder.path / NAME, for_others), folder)
            except OSError as error:
                logger.debug("no socket for shared memory in %s: %s", folder.path, error)
                folder.close()
        return None

    def close(self) -> None:
        """Stop listening, and remove the folder."""
        self.listener.close()
        self._folder.close()


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
