"""How a thread waits: it gives the turn to the kernel, until it is woken or its time is over."""

from __future__ import annotations

from greenlet import getcurrent
from torch import is_grad_enabled, set_grad_enabled

from simulation.runtime.kernel import Handle, Kernel, Process

_current: Kernel | None = None


def use(kernel: Kernel | None) -> None:
    """All threads made from now on are those of ``kernel``."""
    global _current
    _current = kernel


def kernel() -> Kernel:
    """The kernel of the run under way."""
    assert _current is not None, "no simulation is running"
    return _current


def running() -> Process | None:
    """The process whose code runs now; None also where no simulation runs, as when memory is freed after its end."""
    return _current.process if _current is not None else None


def process() -> Process:
    """The process whose code runs now."""
    found = kernel().process
    assert found is not None, "no process is running"
    return found


class Wait:
    """One thread that waits until ``wake``, or for some time."""

    __slots__ = ("_kernel", "_process", "_thread", "_timer", "_woken", "done")

    def __init__(self) -> None:
        self._kernel = here = kernel()
        self._thread = getcurrent()
        self._process = here.process
        self._timer: Handle | None = None
        self._woken = False
        self.done = False

    def pause(self, seconds: float | None = None) -> bool:
        """Give the turn away; whether ``wake`` was called in time. Raises Killed when the process dies meanwhile."""
        here = self._kernel
        here.check_alive()
        if seconds is not None:
            self._timer = here.schedule(max(seconds, 1e-9), self._process, self._time_out)
            self._timer.in_thread = True
        if self._thread is here.hub:
            here.block(lambda: self.done)
        else:
            gradients = is_grad_enabled()  # one mode for all greenlets of a thread
            here.hub.switch()
            if is_grad_enabled() is not gradients:
                set_grad_enabled(gradients)
            here.check_alive()
        return self._woken

    def wake(self) -> None:
        """Let the thread go on, soon."""
        if self.done:
            return
        self.done = True
        if self._timer is not None:
            self._timer.cancel()
        self._woken = True
        here = self._kernel
        if self._thread is here.hub:
            return
        draw = here.random.random()
        # Most threads go on at once; some have to wait for a processor.
        delay = 0.0 if draw < 0.9 else (draw - 0.9) * 0.02
        here.schedule(delay, self._process, self._thread.switch).in_thread = True

    def _time_out(self) -> None:
        self.done = True
        if self._thread is not self._kernel.hub:
            self._thread.switch()


def sleep(seconds: float) -> None:
    """As ``time.sleep``."""
    Wait().pause(seconds)
