"""How the program that started a server notices that it hangs.

A coordinator shows its life: its event loop writes a byte into a pipe each second. Nobody else can notice that a
coordinator hangs, and a pipe needs no network, certificate or free connection. Other servers have a lease on the
coordinator; here it is noticed that a signal has stopped one.
"""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import Coroutine, Mapping, MutableMapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ps_protocol import times
from ps_protocol.errors import ConfigError

VARIABLE = "PS_LIFE_FD"
"""Set by the program that starts a coordinator: the descriptor of the end of the pipe that is written to."""


class LifeWatch:
    """Decides whether a process hangs. Pure; called at least each second with a steady clock.

    Of the time between two looks no more than two seconds count: a watcher that was stopped, or that a busy machine
    keeps waiting, takes its own standing still for nobody's death.
    """

    def __init__(self, now: float) -> None:
        """The process is started ``now``."""
        self._looked = now
        self._limit_seconds = times.STARTS_SECONDS
        #: Time without a sign, as far as this has looked.
        self.silent_seconds = 0.0

    def look(self, *, shown: bool, now: float) -> bool:
        """Whether it hangs. ``shown``: it has shown life since the last look."""
        self.silent_seconds += min(now - self._looked, 2.0)
        self._looked = now
        if shown:
            self.silent_seconds, self._limit_seconds = 0.0, times.HANGS_SECONDS
        return self.silent_seconds >= self._limit_seconds


class StopWatch:
    """Notices a server that a signal has stopped, also before it has joined: no lease ends then. Used by one thread."""

    #: What the server has of this: descriptors that it inherits, and variables that name them.
    inherited: tuple[int, ...] = ()
    variables: Mapping[str, str] = MappingProxyType({})

    def __init__(self, now: float) -> None:
        """The server is started ``now``, in seconds of a steady clock."""
        self._watch = LifeWatch(now)
        # There is nothing to wait for.
        self._watch.look(shown=True, now=now)

    def started(self) -> None:
        """The server has what it inherits."""

    def hangs(self, pid: int, now: float) -> str:
        """Why the server, child ``pid`` of this process, hangs; empty: it does not. Called at least each second."""
        if self._watch.look(shown=not _is_stopped(pid), now=now):
            return f"it has been stopped for {self._watch.silent_seconds:.0f} s"
        return ""

    def close(self) -> None:
        """Watch no more."""


def _is_stopped(pid: int) -> bool:
    """Whether a signal stops it; a debugger does not count."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b") ")[2][:1] == b"T"
    except OSError:
        return False


class LifePipe:
    """Notices a coordinator that shows no life. Used by one thread; methods as of ``StopWatch``."""

    def __init__(self, now: float) -> None:
        """The coordinator is started ``now``."""
        self._read_end, self._write_end = os.pipe()
        os.set_blocking(self._read_end, False)
        self._watch = LifeWatch(now)
        self.inherited = (self._write_end,)
        self.variables: Mapping[str, str] = {VARIABLE: str(self._write_end)}

    def started(self) -> None:
        """The coordinator has its end, and this process does not need it."""
        os.close(self._write_end)

    def hangs(self, pid: int, now: float) -> str:
        """Why the coordinator hangs; empty: it does not. Called at least each second."""
        if self._watch.look(shown=self._shown(), now=now):
            return f"it has shown no life for {self._watch.silent_seconds:.0f} s"
        return ""

    def close(self) -> None:
        """Watch no more."""
        os.close(self._read_end)

    def _shown(self) -> bool:
        shown = False
        try:
            while os.read(self._read_end, 4096):
                shown = True
        except BlockingIOError:
            pass
        return shown


def take_life_pipe(environ: MutableMapping[str, str]) -> int | None:
    """The descriptor that ``environ`` names, which no child of this process gets; None: nobody watches.

    Raises ConfigError when it is no pipe.
    """
    text = environ.pop(VARIABLE, "")
    if not text:
        return None
    try:
        descriptor = int(text)
        if not stat.S_ISFIFO(os.fstat(descriptor).st_mode):
            raise ValueError(text)
        os.set_inheritable(descriptor, False)
        os.set_blocking(descriptor, False)
    except (ValueError, OSError, OverflowError) as error:
        raise ConfigError(
            f"{VARIABLE} names no open pipe",
            expected="the descriptor of a pipe, set by the program that starts this one",
            actual=repr(text),
            remedy=f"unset {VARIABLE}",
        ) from error
    return descriptor


async def showing_life(work: Coroutine[Any, Any, None], descriptor: int | None) -> None:
    """Do ``work``, and meanwhile write to the pipe each second. Raises what ``work`` does."""
    shows = None if descriptor is None else asyncio.create_task(_show(descriptor), name="sign of life")
    try:
        await work
    finally:
        if shows is not None:
            shows.cancel()


async def _show(descriptor: int) -> None:
    while True:
        try:
            os.write(descriptor, b".")
        except BlockingIOError:
            pass  # the watching program is stopped
        except OSError:
            return
        await asyncio.sleep(times.LIFE_SECONDS)
