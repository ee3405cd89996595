"""Stands for Python's threads: greenlets."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from greenlet import getcurrent, greenlet

from simulation.runtime.kernel import Killed, Violation
from simulation.runtime.locks import Event
from simulation.runtime.wait import kernel, process


class Thread:
    """As ``threading.Thread``."""

    def __init__(
        self,
        group: None = None,
        target: Callable[..., object] | None = None,
        name: str | None = None,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        daemon: bool | None = None,
    ) -> None:
        self.name = name or "thread"
        self.daemon = daemon
        self._target, self._args, self._kwargs = target, args, kwargs or {}
        self._kernel, self._process = kernel(), process()
        self._greenlet = greenlet(self._run)
        self._started = False
        self._ended = Event()

    @property
    def ident(self) -> int | None:
        """A number, from ``start`` on."""
        return id(self) if self._started else None

    def start(self) -> None:
        """Begin to run, soon."""
        self._kernel.check_alive()
        self._started = True
        self._greenlet.parent = self._kernel.hub
        self._process.threads[self._greenlet] = None
        _threads[self._greenlet] = self
        delay = self._kernel.random.random() * 0.0005
        self._kernel.schedule(delay, self._process, self._greenlet.switch).in_thread = True

    def is_alive(self) -> bool:
        """Whether it has begun and not ended."""
        return self._started and not self._ended.is_set()

    def join(self, timeout: float | None = None) -> None:
        """Wait for its end."""
        self._ended.wait(timeout)

    def _run(self) -> None:
        torch.set_grad_enabled(True)  # as in a thread that begins; the one before may have been within ``no_grad``
        try:
            if self._target:
                self._target(*self._args, **self._kwargs)
        except Killed:
            pass
        except Violation as error:
            self._kernel.violate(str(error))
        except SystemExit:
            pass
        except BaseException as error:  # noqa: BLE001 -- what a thread raises ends the run, not the simulation
            self._kernel.defect(self._process, error)
        finally:
            self._process.threads.pop(self._greenlet, None)
            _threads.pop(self._greenlet, None)
            if self._process.alive:
                self._ended.set()


_threads: dict[greenlet, Thread] = {}


class _Loop:
    """Stands for the thread of a process's event loop."""

    name = "loop"
    ident = 1


_LOOP = _Loop()


def current_thread() -> Thread | _Loop:
    """As ``threading.current_thread``."""
    return _threads.get(getcurrent(), _LOOP)


def get_ident() -> int:
    """As ``threading.get_ident``."""
    return current_thread().ident or 0
