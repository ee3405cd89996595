"""A program of ``benchmarks`` that the first argument names; its processes are forked from one that has imported torch.

The process that calls ``main`` begins a session of its own, by which all of the program's processes are found.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace

from benchmarks import cluster, processes
from tests.recovery.zygote import python
from tests.support.forks import Program


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
    processes.fork_children()
    cluster.subprocess = SimpleNamespace(Popen=Popen, TimeoutExpired=subprocess.TimeoutExpired)  # type: ignore[assignment]
    name = sys.argv.pop(1)
    importlib.import_module(f"benchmarks.{name}").main()
