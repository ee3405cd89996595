"""Functions that run in processes forked from this one, and what they return."""

from __future__ import annotations

import json
import os
import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

#: Id of a process, and where its answer can be read.
Forked = tuple[int, int]


def forked(function: Callable[..., Any], *arguments: Any, **named: Any) -> Forked:
    """Have a process of its own call ``function``, whose result is JSON. gRPC must not have been used before."""
    reader, writer = os.pipe()
    child = os.fork()
    if child:
        os.close(writer)
        return child, reader
    code = 1
    try:
        with ExitStack() as stack:
            stack.callback(traceback.print_exc)
            os.close(reader)
            with os.fdopen(writer, "w") as pipe:
                json.dump(function(*arguments, **named), pipe)
            code = 0
            stack.pop_all()
    finally:
        os._exit(code)


def answers(children: Sequence[Forked]) -> list[Any]:
    """What they return, in order. Raises ChildProcessError where one has failed."""
    found = []
    for child, reader in children:
        with os.fdopen(reader) as pipe:
            text = pipe.read()
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if code:
            raise ChildProcessError(f"process {child} has ended with code {code}; its last words are above")
        found.append(json.loads(text))
    return found
