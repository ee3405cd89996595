"""What a test has a process do to itself, told by its environment: stand still at a file, live in a namespace."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
from collections.abc import MutableMapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from ps_worker.step.host_exchange import HostExchange
from tests.checkpoint.faults import watched

STOPS_AT = "TESTS_STOP_AT"
"""``operation path``: the process stops itself ahead of this file operation on a path with these characters in it."""

NAMESPACE = "TESTS_NAMESPACE"
"""The file of a namespace, of the network or of mounts, that the process enters."""

ON_HOST = "TESTS_ON_HOST"
"""``point=kill@count`` or ``point=stop@count``: what the process does to itself at that point of an exchange that it
makes together with other workers of its host, for the ``count``-th time.
"""


def obey(environment: MutableMapping[str, str], held: ExitStack) -> None:
    """Called in a process before its program; what is patched stays so until ``held`` is closed."""
    if place := environment.pop(STOPS_AT, ""):
        held.enter_context(watched(_Stop(*place.split(" ", 1)).before))
    if place := environment.pop(ON_HOST, ""):
        point, _, rest = place.partition("=")
        action, _, count = rest.partition("@")
        at, HostExchange.at = HostExchange.at, staticmethod(_AtPoint(point, action, int(count)))
        held.callback(setattr, HostExchange, "at", at)
    if path := environment.pop(NAMESPACE, ""):
        here = Path.cwd()
        with Path(path).open() as namespace:
            if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), 0):
                raise OSError(ctypes.get_errno(), f"cannot enter {path}")
        os.chdir(here)


class _Stop:
    """Half of the data is written before a ``pwrite``; none of it, and nothing else, happens before the others."""

    def __init__(self, operation: str, part: str) -> None:
        self._operation = operation
        self._part = part
        self._write = os.pwrite

    def before(self, operation: str, arguments: tuple[Any, ...]) -> None:
        if operation != self._operation:
            return
        first = arguments[0]
        path = Path(f"/proc/self/fd/{first}").readlink() if isinstance(first, int) else first
        if self._part not in str(path):
            return
        if operation == "pwrite":
            self._write(first, arguments[1][: len(arguments[1]) // 2], arguments[2])
        # To this thread: sent to the process, it might come when the operation is done.
        signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)


class _AtPoint:
    """Ends or stops the process at a point that it passes for the n-th time."""

    def __init__(self, point: str, action: str, count: int) -> None:
        self._point, self._action, self._left = point, action, count

    def __call__(self, point: str) -> None:
        self._left -= point == self._point
        if self._left or point != self._point:
            return
        if self._action == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        else:
            # To this thread: sent to the process, it might come when the point is passed.
            signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
