"""The name and command line under which the system lists a process that was forked."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from pathlib import Path

ROOM_BYTES = 4096
"""What the arguments of a process that forks are padded with: room for the command lines of those it forks."""

_PR_SET_NAME = 15

_ARGUMENTS_BEGIN, _ARGUMENTS_END = 45, 46
"""Places in /proc/PID/stat after the name of the process: fields 48 and 49 of proc(5)."""


def show(name: str, command: Sequence[str]) -> None:
    """List this process as ``name``, up to 15 bytes, with the command line ``command``.

    The memory of the arguments is written, as daemons do: Python has copied them. What has no room is left out.
    """
    ctypes.CDLL(None).prctl(_PR_SET_NAME, os.fsencode(name)[:15])
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    begin, end = int(fields[_ARGUMENTS_BEGIN]), int(fields[_ARGUMENTS_END])
    if not begin or begin >= end:  # the kernel does not tell
        return
    shown = b"\0".join(map(os.fsencode, command))[: end - begin - 1]
    ctypes.memset(begin, 0, end - begin)
    ctypes.memmove(begin, shown, len(shown))
