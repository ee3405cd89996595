"""Keeps the clocks of a worker's models going while it has nothing to train, so that nobody waits for it in a step."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Protocol

from ps_protocol.errors import Unavailable

_PAUSE_SECONDS = 0.01
_LAST_STEP_SECONDS = 0.2
_AGAIN_SECONDS = 0.1


class Standing(Protocol):
    """One model's optimizer."""

    def finish(self) -> None:
        """End the exchange under way."""
        ...

    def stand_in(self) -> None:
        """Make one step without gradients. Called from a thread of its own."""
        ...

    def interrupt(self) -> None:
        """From another thread: a step that waits for others raises Unavailable, until ``resume``."""
        ...

    def resume(self) -> None:
        """Go on as usual."""
        ...

    def pull(self) -> None:
        """Take the newest parameters."""
        ...


@contextmanager
def standing_in(optimizers: Sequence[Standing], others_wait: Callable[[], bool]) -> Iterator[None]:
    """Make empty steps of every model during the block, one thread each, while ``others_wait()``; then pull.

    As the join context of torch's DDP does for uneven inputs: an empty step moves the clock, so that synchronous rounds
    and ssp bounds go on for workers that still train, and changes no parameter. Models step at their own pace; one
    whose last empty step waits for others when the block ends is interrupted. Raises what such a step raised.
    """
    for optimizer in optimizers:
        optimizer.finish()
    stop = threading.Event()

    def steps(optimizer: Standing) -> None:
        while not stop.wait(_PAUSE_SECONDS):
            if others_wait():
                optimizer.stand_in()

    with ThreadPoolExecutor(max(1, len(optimizers)), "ps-stand-in") as threads:
        running = {threads.submit(steps, optimizer): optimizer for optimizer in optimizers}
        try:
            yield
        finally:
            stop.set()
            error = end_empty_steps(running)
    if error is not None:
        raise error
    for optimizer in optimizers:
        optimizer.pull()


def end_empty_steps(running: Mapping[Future[None], Standing]) -> BaseException | None:
    """Wait for the empty steps under way, interrupting the late; what another than an interrupted one raised.

    Whether a push of an interrupted one arrived is not known: its model is to be pulled.
    """
    late = wait(running, _LAST_STEP_SECONDS).not_done
    waiting = late
    while waiting:
        for future in waiting:
            running[future].interrupt()
        waiting = wait(waiting, _AGAIN_SECONDS).not_done
    for future in late:
        running[future].resume()
    errors = (future.exception() for future in running if not _was_interrupted(future, late))
    return next((error for error in errors if error is not None), None)


def _was_interrupted(future: Future[None], late: set[Future[None]]) -> bool:
    return future in late and isinstance(future.exception(), Unavailable)
