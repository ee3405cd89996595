"""Programs of peers that need an interpreter with packages of their own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Self

from benchmarks.processes import ChildFailed, end_with_parent

PROGRAMS = Path(__file__).with_name("peers")


class Program:
    """``program`` of ``peers`` under another interpreter: it answers each line of JSON with one, the first when ready.

    Used from the main thread, as a context manager; ended by its pid.
    """

    def __init__(
        self, python: Path, program: str, *sizes: int, environment: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        self._name = program
        self._process = subprocess.Popen(
            [python, PROGRAMS / program, *map(str, sizes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **environment},
            preexec_fn=end_with_parent,
        )
        #: Its process.
        self.pid = self._process.pid

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with self._process:
            self._process.kill()

    def send(self, request: object) -> None:
        """Ask for something; ``answer`` gives what comes of it."""
        if self._process.stdin is not None:
            print(json.dumps(request), file=self._process.stdin, flush=True)

    def answer(self) -> Any:
        """Its next line. Raises ChildFailed when it ends instead of answering."""
        line = self._process.stdout.readline() if self._process.stdout is not None else ""
        if not line:
            raise ChildFailed(f"{self._name} has ended with code {self._process.wait()}; its last words are above")
        return json.loads(line)

    def rest(self) -> None:
        """Stop the process, if it lives."""
        self._process.send_signal(signal.SIGSTOP)

    def wake(self) -> None:
        """Let it go on."""
        self._process.send_signal(signal.SIGCONT)


@contextmanager
def running(python: Path, program: str, *sizes: int) -> Iterator[Callable[[int], Any]]:
    """Gives a function that has ``program`` of ``peers`` make so many steps, and returns what it answers.

    It is ready. Raises ChildFailed when it ends instead of answering.
    """
    with Program(python, program, *sizes) as child:

        def steps(count: int) -> Any:
            child.send(count)
            return child.answer()

        child.answer()
        yield steps
