"""Child processes of the benchmark: each holds one role, answers calls over a pipe, and never outlives the program."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import stat
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Self

import torch

START_SECONDS = 120.0

_LIBC = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1
_CONTEXT: multiprocessing.context.BaseContext = multiprocessing.get_context("spawn")


def fork_children() -> None:
    """From now on children are forked from this process, which has one thread and has not used gRPC.

    They begin at once and share the memory of what it has imported.
    """
    global _CONTEXT
    torch.set_num_threads(1)
    _CONTEXT = multiprocessing.get_context("fork")


class ChildFailed(Exception):
    """A child could not begin, raised, or ended; the text holds its traceback where there is one."""


class Child:
    """One process that holds one role. Used from the main thread, as a context manager; ended by its pid.

    ``role`` is a function, importable by name, that gives a context manager of an object; ``call`` runs that object's
    methods in the child. The child starts at once; ``ready`` waits until its object is there.
    """

    def __init__(self, role: Callable[..., AbstractContextManager[Any]], *arguments: Any) -> None:
        self._name = f"{role.__module__}.{role.__name__}"
        self._connection, theirs = _CONTEXT.Pipe()
        self._process = _CONTEXT.Process(target=_run, args=(theirs, os.getpid(), role, arguments), daemon=True)
        # Ctrl-C reaches the whole terminal: the parent alone decides, and closes the pipes. Masks are inherited.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self._process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        #: The child's process.
        self.pid = int(self._process.pid or 0)
        theirs.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # A role closes itself at the end of its pipe; one that is stopped or stuck is killed.
        self.wake()
        self._connection.close()
        self._process.join(5.0 if error is None else 0.5)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._process.close()

    def ready(self) -> Any:
        """Wait for the child's object; returns its ``address``, None where it has none. Raises ChildFailed."""
        if not self._connection.poll(START_SECONDS):
            raise ChildFailed(f"{self._name} was not ready within {START_SECONDS:g} s")
        return self.answer()

    def begin(self, method: str, *arguments: Any) -> None:
        """Start ``method`` in the child; ``answer`` gives what it returned."""
        self._connection.send((method, arguments))

    def answer(self) -> Any:
        """What the method begun last returned. Raises ChildFailed."""
        try:
            error, value = self._connection.recv()
        except (EOFError, ConnectionResetError):
            raise ChildFailed(f"{self._name} ended without an answer") from None
        if error:
            raise ChildFailed(f"{self._name}:\n{error}")
        return value

    def call(self, method: str, *arguments: Any) -> Any:
        """Run ``method`` in the child. Raises ChildFailed."""
        self.begin(method, *arguments)
        return self.answer()

    def rest(self) -> None:
        """Stop the process: some peers poll without sleeping, and would take a core from the row being measured."""
        self._signal(signal.SIGSTOP)

    def wake(self) -> None:
        """Let it go on."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        if self._process.is_alive():
            os.kill(self.pid, number)


def end_with_parent() -> None:
    """Called in a new process: the system kills it when the thread that started it is no more."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _run(
    connection: Connection,
    parent: int,
    role: Callable[..., AbstractContextManager[Any]],
    arguments: tuple[Any, ...],
) -> None:
    """In the child: make the role's object and answer calls until the pipe ends."""
    end_with_parent()
    if os.getppid() != parent:
        return
    if _CONTEXT.get_start_method() == "fork":
        _close_other_pipes(connection)
    torch.set_num_threads(1)
    try:
        with role(*arguments) as held:
            connection.send((None, getattr(held, "address", None)))
            _answer(connection, held)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return
    except Exception:  # noqa: BLE001 - whatever it is, the parent shows it
        connection.send((traceback.format_exc(), None))


def _close_other_pipes(connection: Connection) -> None:
    """Have no end of another child's pipe, nor the other end of this one's, for a child is told by their ends."""
    for descriptor in {*map(int, os.listdir("/proc/self/fd"))} - {connection.fileno()}:  # noqa: PTH208 - names
        with suppress(OSError):
            if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                os.close(descriptor)


def _answer(connection: Connection, held: object) -> None:
    while True:
        try:
            method, arguments = connection.recv()
        except EOFError:
            return
        connection.send((None, getattr(held, method)(*arguments)))
