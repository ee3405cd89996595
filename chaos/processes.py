"""Owns the processes of one run: starts them, and starts them again when they end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ps_protocol.launch.life import LifePipe

RESTART_SECONDS = 0.2
"""Between the end of a process and its next start."""


@dataclass
class Process:
    """One place in the cluster and the processes that fill it one after another. Used by one thread."""

    name: str
    #: Arguments of python for life 1, 2, ….
    command: Callable[[int], Sequence[str]]
    log: Path
    environment: dict[str, str] = field(default_factory=dict)
    #: It is a coordinator: one that hangs shows that by its silence.
    shows_life: bool = False
    lives: int = 0
    #: How often it hung and was killed for that.
    hung: int = 0
    #: Exit codes of the lives that were not killed from here.
    ends: list[int] = field(default_factory=list)
    _running: subprocess.Popen[bytes] | None = None
    _killed: bool = False
    _ended_at: float = float("-inf")
    _life: LifePipe | None = None

    def start(self) -> None:
        """Begin the next life."""
        self.lives += 1
        self._killed = False
        life = LifePipe(time.monotonic()) if self.shows_life else None
        variables = life.variables if life else {}
        with self.log.open("ab") as log:
            self._running = subprocess.Popen(
                [sys.executable, *self.command(self.lives)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, "TF_CONFIG": "", "OMP_NUM_THREADS": "1", **self.environment, **variables},
                pass_fds=life.inherited if life else (),
            )
        self._watch(life)

    def _watch(self, life: LifePipe | None) -> None:
        if self._life is not None:
            self._life.close()
        if life is not None:
            life.started()
        self._life = life

    def hangs(self) -> str:
        """Why it hangs; empty: it does not, or does not show it."""
        if self._life is None or self._running is None or not self.alive:
            return ""
        return self._life.hangs(self._running.pid, time.monotonic())

    def replace(self, why: str) -> None:
        """Kill one that hangs."""
        self.hung += 1
        with self.log.open("a") as log:
            log.write(f"it hangs, and is killed: {why}\n")
        self.send(signal.SIGKILL)

    @property
    def pid(self) -> int | None:
        """Of the process that runs now; None where there is none."""
        return self._running.pid if self._running is not None and self.alive else None

    @property
    def alive(self) -> bool:
        """Whether it runs; a frozen one does."""
        return self._running is not None and self._running.poll() is None

    def look_after(self) -> None:
        """Start it again when it has ended."""
        if self.alive:
            return
        if self._running is not None:
            if not self._killed:
                self.ends.append(self._running.returncode)
            self._running, self._ended_at = None, time.monotonic()
        if time.monotonic() - self._ended_at >= RESTART_SECONDS:
            self.start()

    def send(self, number: signal.Signals) -> None:
        """Send a signal, if it is there."""
        if self._running is not None and self.alive:
            self._killed |= number is signal.SIGKILL
            self._running.send_signal(number)

    def stop(self, number: signal.Signals = signal.SIGTERM, patience_seconds: float = 20.0) -> None:
        """End it, in good order where it can."""
        self.send(signal.SIGCONT)
        self.send(number)
        if self._running is not None:
            try:
                self._running.wait(patience_seconds)
            except subprocess.TimeoutExpired:
                self.ends.append(-signal.SIGKILL)
                self._running.kill()
                self._running.wait()
            self._running = None
        self._watch(None)
