"""Execs another program that dies with its parent; the first code of a process that ps-run or a script starts.

Usage: shim.py PARENT_PID PROGRAM ARGUMENTS…. The parent is the thread that started it (prctl(2)). A ``preexec_fn``
would run between fork and exec of a process with threads, where a lock held by another thread stops it for ever; a
program of its own cannot be stopped that way.
"""

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

PR_SET_PDEATHSIG = 1


def main() -> None:
    """Request SIGKILL at the parent's death, then exec; the request survives exec (prctl(2))."""
    parent, program, *arguments = sys.argv[1:]
    if not dies_with(int(parent)):
        sys.exit(1)
    try:
        os.execvp(program, [program, *arguments])
    except OSError as error:
        sys.exit(f"cannot run {program}: {error.strerror}")


def dies_with(parent: int) -> bool:
    """Request SIGKILL at the death of the parent; whether ``parent`` is, and with that still lives."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    return os.getppid() == parent


def command(program: Sequence[str]) -> list[str]:
    """What to start for ``program`` to die with the thread that starts it."""
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), *program]


if __name__ == "__main__":
    main()
