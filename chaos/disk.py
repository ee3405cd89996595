"""The disk of the shards: a small file system of its own where this may be made, so that it can be full."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

SIZE_MB = 1024

_INSIDE = "CHAOS_PRIVATE_MOUNTS"


class Disk:
    """A folder to be filled. Used by one thread."""

    def __init__(self, folder: Path) -> None:
        """Mount a file system on ``folder``, seen by this process and its children only."""
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={SIZE_MB}m", "none", str(folder)], check=True)
        self.folder = folder
        self._filler = folder / "filler"

    def fill(self) -> None:
        """Leave no room."""
        with self._filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                if not file.write(bytes(1 << 20)):
                    raise OSError(errno.ENOSPC, "full")

    def free(self) -> None:
        """Give the room back."""
        self._filler.unlink(missing_ok=True)

    def close(self) -> None:
        """Forget everything on it."""
        subprocess.run(["umount", "-l", str(self.folder)], check=False)


def why_no_mounts(arguments: Sequence[str]) -> str:
    """Why this program may mount no file systems; empty where it may.

    It is run again with ``arguments``, and does not come back from here, where it may then.
    """
    if os.environ.get(_INSIDE):
        return ""
    if os.geteuid() != 0:
        return "only root can mount a small file system"
    if subprocess.run(["unshare", "-m", "true"], check=False, capture_output=True).returncode == 0:
        command = ["unshare", "-m", sys.executable, "-m", "chaos", *arguments]
        os.execvpe(command[0], command, {**os.environ, _INSIDE: "1"})
    return "this system allows no mount namespace"
