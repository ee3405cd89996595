"""Dense steps of MXNet's ``dist_async``, whose interpreter is another one where this one has no MXNet."""

from __future__ import annotations

import importlib.util
import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from benchmarks.crew import Crowd
from benchmarks.other_python import Program
from benchmarks.rows import Key, Subject

SYSTEM, STEP = "MXNet", "step"

_PROGRAM = "mxnet_steps.py"
_THREADS = {"OMP_NUM_THREADS": "1", "MXNET_CPU_WORKER_NTHREADS": "1"}


def interpreter() -> Path | None:
    """The interpreter of this process, if it has MXNet."""
    return Path(sys.executable) if importlib.util.find_spec("mxnet") else None


def subject(python: Path, nbytes: int, workers: int, seconds: float) -> Subject:
    """A step pushes one array, which one server applies with SGD, and pulls it. ``seconds``: of a visit."""

    @contextmanager
    def opened() -> Iterator[Crowd]:
        with ExitStack() as stack:
            job = {**_job(workers), **_THREADS}
            roles = {role: {**job, "DMLC_ROLE": role} for role in ("scheduler", "server", "worker")}
            scheduler, server = (
                stack.enter_context(Program(python, _PROGRAM, nbytes, environment=roles[role]))
                for role in ("scheduler", "server")
            )
            own = [
                stack.enter_context(_Worker(python, _PROGRAM, nbytes, environment=roles["worker"]))
                for _ in range(workers)
            ]
            for child in own:
                child.answer()
            yield Crowd(own, [server.pid], seconds, rests=[scheduler, server, *own])

    return Subject((Key(SYSTEM, STEP, nbytes, workers=workers),), opened)


class _Worker(Program):
    """A worker of a ``Crowd``."""

    def begin(self, method: str, *arguments: Any) -> None:
        """Its program has one operation, and runs it between two times."""
        self.send(arguments[-2:])


def _job(workers: int) -> dict[str, str]:
    """What every process of a job with one server is told."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    names = {"DMLC_PS_ROOT_URI": "127.0.0.1", "DMLC_PS_ROOT_PORT": str(port), "DMLC_NODE_HOST": "127.0.0.1"}
    return {**names, "DMLC_NUM_SERVER": "1", "DMLC_NUM_WORKER": str(workers)}
