"""The folders of a job: its data directory, one job at a time, also after a kill; its logs; its trace."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import time
from pathlib import Path

from ps_protocol.errors import ConfigError, PsError
from ps_protocol.files import FILE_MODE, make_private_folder
from ps_protocol.tracing.merge import MERGED, files_in, merge
from ps_protocol.tracing.trace_file import open_folder
from ps_server.coordinator.persistence.journal import FILE_NAME as JOURNAL

RUN_FOLDERS = "torch-ps-run-"
"""Prefix of the temporary folders of ps-run, and of its program on other hosts (``OwnFolder``)."""

LOCK = "ps-run.lock"


def lineage_of(path: Path) -> str:
    """The lineage of all jobs in the folder ``path``: each starts after the end of the previous one."""
    return hashlib.blake2b(str(path.resolve()).encode(), digest_size=16).hexdigest()


class JobFolder:
    """Opened by ps-run before it starts anything.

    The servers inherit ``lock``, so the folder is free when the last of them has ended: a ps-run that is started right
    after another was killed waits for that one's servers to be gone.
    """

    def __init__(self, path: Path, wait_seconds: float = 10.0, lock_name: str = LOCK) -> None:
        """Make and lock ``path``. Raises ConfigError when it cannot be written, or another ps-run uses it.

        ``lock_name``: each host of a job has its own, in a folder that they may share.
        """
        self.path = path
        try:
            make_private_folder(path)
            self.lock = os.open(path / lock_name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
        except OSError as error:
            raise ConfigError(
                f"the data directory {path} cannot be written: {error.strerror}",
                remedy="give as --data-dir a folder that this user may write to",
            ) from error
        deadline = time.monotonic() + wait_seconds
        while not self._taken():
            if time.monotonic() >= deadline:
                os.close(self.lock)
                raise ConfigError(
                    f"the data directory {path} is in use by another ps-run",
                    remedy="wait for that job or end it, or give this one another --data-dir",
                )
            time.sleep(0.05)
        #: Whether an earlier job has left state here.
        self.used_before = (path / JOURNAL).exists()

    def _taken(self) -> bool:
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


def make_log_folder(path: Path) -> None:
    """Raises ConfigError when the folder cannot be created or written to."""
    try:
        make_private_folder(path)
        reason = "" if os.access(path, os.W_OK | os.X_OK) else os.strerror(errno.EACCES)
    except OSError as error:
        reason = error.strerror or str(error)
    if reason:
        raise ConfigError(
            f"the folder {path} cannot be written: {reason}",
            remedy="give a --log-dir that this user may write to",
        )


class JobTrace:
    """Owns ``trace.json`` in one folder. Files of earlier jobs there stay, and are not part of it."""

    def __init__(self, folder: Path) -> None:
        """Makes the folder. Raises ConfigError."""
        open_folder(folder)
        self.folder = folder.absolute()
        self._earlier = set(files_in(self.folder))

    def finish(self) -> str:
        """Join the files of the job; returns what became of it, in words."""
        target = self.folder / MERGED
        found = [path for path in files_in(self.folder) if path not in self._earlier]
        try:
            merge(found, target)
        except (OSError, PsError) as error:
            return f"no trace: {error}"
        return f"trace of {len(found)} processes: {target}; open it in https://ui.perfetto.dev or chrome://tracing"
