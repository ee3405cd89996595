"""Programs of peers that need an interpreter with packages of their own."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PROGRAMS = Path(__file__).with_name("peers")


@contextmanager
def running(python: Path, program: str, *sizes: int) -> Iterator[Callable[[int], Any]]:
    """Gives a function that has ``program`` of ``peers`` make so many steps, and returns what it answers.

    It is ready. Raises ValueError when it ends instead of answering.
    """
    command = [python, PROGRAMS / program, *map(str, sizes)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:

        def answer() -> Any:
            line = child.stdout.readline() if child.stdout else ""
            if not line:
                raise ValueError(f"{program} has ended with code {child.wait()}; its last words are above")
            return json.loads(line)

        def steps(count: int) -> Any:
            print(count, file=child.stdin, flush=True)
            return answer()

        answer()
        yield steps
        if child.stdin:
            child.stdin.close()
