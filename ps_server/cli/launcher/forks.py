"""Shards of this machine that are forked from one process, which imports their modules while the coordinator starts.

``ForkServer`` owns that process (``ps_server/shard/fork_server.py``). A ``ForkedChild`` waits for it, is forked from
it, and is then a child of ps-run like any other.
"""

from __future__ import annotations

import ctypes
import enum
import json
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import BinaryIO

from ps_protocol import times
from ps_protocol.launch import child
from ps_protocol.launch.child import Child
from ps_protocol.launch.commands import SHARD
from ps_protocol.launch.life import StopWatch
from ps_server.cli.launcher.events import ProcessName

MODULE = "ps_server.shard.fork_server"

ROOM_BYTES = 4096
"""What the arguments of the process are padded with: room for the command lines of the shards that it forks."""


_PR_SET_CHILD_SUBREAPER = 36
_MAX_PRINTED_BYTES = 1 << 16


class ForkState(enum.Enum):
    """What can be asked of it."""

    IMPORTING = "imports modules"
    READY = "forks"
    LOST = "has ended, or did not answer"


class ForkServer:
    """Used by the main thread of ps-run, with which it ends. A lost one stays lost."""

    def __init__(self, environment: Mapping[str, str], say: Callable[[str], None]) -> None:
        """Start it. ``environment``: what an interpreter and libraries read as they start. ``say``: shows its end."""
        self._say = say
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setblocking(False)
        #: What it prints; nobody waits for that.
        self._printed = os.memfd_create("ps-servers")
        program = [sys.executable, "-P", "-m", MODULE, str(theirs.fileno()), " " * ROOM_BYTES]
        with theirs:
            self._popen = child.start(program, environment, self._printed, (theirs.fileno(),))
        self._state = ForkState.IMPORTING

    @property
    def pid(self) -> int:
        """Of its process."""
        return self._popen.pid

    def look(self) -> ForkState:
        """What it is now."""
        if self._state is ForkState.LOST:
            return self._state
        try:
            if self._socket.recv(16):
                self._state = ForkState.READY
            else:
                self._lose("")
        except BlockingIOError:
            pass
        except OSError as error:
            self._lose(str(error))
        return self._state

    def fork(
        self, program: Sequence[str], arguments: Sequence[str], environment: Mapping[str, str], files: Sequence[int]
    ) -> int | None:
        """The number of a new child of this process: a shard with ``arguments`` and ``environment``.

        ``program``: what it shows before its arguments. ``files``: its output, and what else it keeps open. None where
        there is none: then the fork server is lost. Waits for the fork.
        """
        ours, theirs = socket.socketpair()
        with ours, _adopting():
            ours.settimeout(times.CALL_SECONDS)
            try:
                with theirs:
                    socket.send_fds(self._socket, [b"1"], [theirs.fileno(), *files])
                if pid := int.from_bytes(ours.recv(8), "big"):
                    ours.sendall(json.dumps([list(program), list(arguments), dict(environment)]).encode())
                    return pid
                self._lose("")
            except OSError as error:
                self._lose(str(error) or f"no answer within {times.CALL_SECONDS:.0f} s")
        return None

    def end(self) -> None:
        """Kill it, and do not wait. Repeatable."""
        self._state = ForkState.LOST
        self._popen.kill()

    def close(self) -> None:
        """End it, and wait for that."""
        self.end()
        self._popen.wait()
        self._socket.close()
        os.close(self._printed)

    def _lose(self, why: str) -> None:
        self._state = ForkState.LOST
        self._popen.kill()
        lines = os.pread(self._printed, _MAX_PRINTED_BYTES, 0).decode(errors="replace").splitlines()
        why = why or (lines[-1] if lines else "")
        self._say(
            f"the process that shards are forked from is lost{f' ({why})' if why else ''}; shards go on without it"
        )


@contextmanager
def _adopting() -> Iterator[None]:
    """Processes whose parent ends become children of this one meanwhile, if they descend from it."""
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


class ForkedChild(Child):
    """Forked from ``forks`` as soon as that has imported its modules; started as a program where that is lost."""

    def __init__(
        self,
        name: ProcessName,
        command: Sequence[str],
        environment: Mapping[str, str],
        log: BinaryIO | None,
        inherited: Sequence[int],
        forks: ForkServer,
    ) -> None:
        """``command`` begins with ``SHARD``; the process keeps ``inherited`` open, under any numbers."""
        self._forks = forks
        #: The signal that ended it before it was started.
        self._ended_by: signal.Signals | None = None
        self._told_end = False
        super().__init__(name, command, environment, log, inherited, StopWatch)

    @property
    def waits(self) -> bool:
        """Whether it is not started yet, and a later ``poll`` starts it or reports its end."""
        return self.pid is None and not self._told_end

    def send(self, signum: signal.Signals) -> None:
        """As of every child; one that is not started yet will not be."""
        if self.pid is None:
            self._ended_by = signum
        super().send(signum)

    def poll(self) -> int | None:
        """As of every child; starts it, if it waits and can be."""
        if self.pid is None:
            if self._ended_by is not None:
                os.close(self._write_end)
                self._told_end = True
                return -self._ended_by
            self._begin()
        return super().poll()

    def kill(self) -> None:
        """As of every child."""
        if self.pid is None:
            os.close(self._write_end)
        super().kill()

    def _begin(self) -> None:
        state = self._forks.look()
        if state is ForkState.IMPORTING:
            return
        if state is ForkState.READY:
            files = (self._write_end, *self._inherited)
            arguments = self._command[len(SHARD) :]
            if (pid := self._forks.fork(SHARD, arguments, self._environment, files)) is not None:
                self._begun(pid)
                return
        super()._begin()
