"""One server as a child process of this one: its address, its output, and how it ended."""

from __future__ import annotations

import os
import selectors
import signal
import sys
import threading
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress

from ps_protocol.launch.child import Child
from ps_protocol.launch.life import LifePipe, StopWatch

_LINES = 5
"""How many lines of its log an error quotes."""

_WATCH_SECONDS = 1.0
_REAP_SECONDS = 0.02
"""The same interval once its output has ended."""


class OwnServer:
    """A server that dies with this process. Called by any thread.

    A thread of its own starts it, passes its output on to standard error, kills it when it hangs, and ends with it.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        watch: type[LifePipe | StopWatch] | None = None,
    ) -> None:
        """Start it. Raises OSError when there is no process for it.

        ``name``: for errors, such as "shard 0". ``command``: without --ready-file. ``watch``: notices that it hangs.
        """
        self._name = name
        self._lines: deque[str] = deque(maxlen=_LINES)
        self._child: Child | None = None
        self._not_started: OSError | None = None
        self._ending = False
        #: Its exit code, once it is reaped. Nothing is sent to its process number from then on.
        self._code: int | None = None
        self._reaping = threading.Lock()
        self._settled = threading.Event()
        #: host:port, once it serves; empty before, and where it ended before.
        self.address = ""
        #: How it ended by itself, or that it hung; empty: it runs, or was ended by ``end``.
        self.ended = ""
        started = threading.Event()
        arguments = (command, environment, watch, started)
        self._thread = threading.Thread(target=self._run, args=arguments, name=name, daemon=True)
        self._thread.start()
        started.wait()
        if self._not_started is not None:
            raise self._not_started

    @property
    def pid(self) -> int:
        """Its process number."""
        assert self._child is not None
        return self._child.pid or 0

    @property
    def last_lines(self) -> str:
        """The end of its log, for an error."""
        lines = " | ".join(self._lines)
        return f"its log ends with: {lines}" if lines else "its log is empty"

    def settle(self, timeout_seconds: float | None = None) -> bool:
        """Whether it serves or has ended, after at most ``timeout_seconds``; None: however long that takes."""
        return self._settled.wait(timeout_seconds)

    def join(self, timeout_seconds: float | None = None) -> bool:
        """Whether it has ended, after at most ``timeout_seconds``; None: however long it runs."""
        self._thread.join(timeout_seconds)
        return not self._thread.is_alive()

    def end(self, grace_seconds: float) -> int:
        """SIGTERM, and SIGKILL where it lives ``grace_seconds`` later; its exit code, when it has ended."""
        self._ending = True
        self._send(signal.SIGTERM)
        if not self.join(grace_seconds):
            self._send(signal.SIGKILL)
            self.join()
        assert self._code is not None
        return self._code

    def _send(self, signum: signal.Signals) -> None:
        with self._reaping:
            if self._code is None and self._child is not None:
                self._child.send(signum)

    def _run(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        watch: type[LifePipe | StopWatch] | None,
        started: threading.Event,
    ) -> None:
        try:
            self._child = Child(self._name, command, environment, watch=watch, serves=True)
        except OSError as error:
            self._not_started = error
            return
        finally:
            started.set()
        hung = self._attend(self._child)
        self._pass_on(self._child.read_rest())
        if hung:
            self.ended = f"{self._name} hung and was killed: {hung}"
        elif not self._ending:
            code = self._code or 0
            how = f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"
            self.ended = f"{self._name} {how}"
        self._settled.set()

    def _attend(self, child: Child) -> str:
        """Return when it has ended: why it hung and was killed; empty: it was not."""
        hung = ""
        with selectors.DefaultSelector() as selector:
            for descriptor in (child.output, child.ready):
                selector.register(descriptor, selectors.EVENT_READ)  # type: ignore[arg-type]  # it serves
            while not self._has_ended(child):
                prints = child.output in selector.get_map()
                for key, _ in selector.select(_WATCH_SECONDS if prints else _REAP_SECONDS):
                    if key.fd == child.ready:
                        # In one piece.
                        selector.unregister(key.fd)
                        if address := child.address():
                            self.address = address
                            self._settled.set()
                    elif (lines := child.read()) is None:
                        selector.unregister(key.fd)
                    else:
                        self._pass_on(lines)
                if not hung and (hung := child.hangs()):
                    child.send(signal.SIGKILL)
        return hung

    def _has_ended(self, child: Child) -> bool:
        with self._reaping:
            self._code = child.poll()
        return self._code is not None

    def _pass_on(self, lines: Iterable[str]) -> None:
        for line in lines:
            self._lines.append(line.rstrip())
            # What servers print is no output of the script.
            with suppress(OSError, ValueError, AttributeError):
                os.write(sys.stderr.fileno(), f"{line}\n".encode())
