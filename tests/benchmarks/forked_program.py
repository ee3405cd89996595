"""``python -m benchmarks`` whose processes are forked: run by ``test_bench`` from a process that has imported torch.

The process that calls ``main`` begins a session of its own, by which all of the program's processes are found.
"""

from __future__ import annotations

import multiprocessing
import os
import stat
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

from benchmarks import cluster, processes, program
from tests.recovery.zygote import python
from tests.support.forks import Program

_run = processes._run


class Popen(Program):
    """subprocess.Popen as ``benchmarks.cluster`` uses it."""

    def __init__(
        self, command: Sequence[str], *, preexec_fn: Callable[[], None], env: Mapping[str, str] | None = None
    ) -> None:
        def work() -> None:
            preexec_fn()
            python(command[1:])

        super().__init__(work, env or {})


def main() -> None:
    os.setsid()
    processes._CONTEXT = multiprocessing.get_context("fork")  # type: ignore[assignment]
    processes._run = _alone
    cluster.subprocess = SimpleNamespace(Popen=Popen, TimeoutExpired=subprocess.TimeoutExpired)  # type: ignore[assignment]
    program.main()


def _alone(connection: Connection, *arguments: Any) -> None:
    """In a child: have no end of another's pipe, nor the other end of its own, for it is told by their ends."""
    for descriptor in {*range(3, 256)} - {connection.fileno()}:
        with suppress(OSError):
            if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                os.close(descriptor)
    _run(connection, *arguments)
