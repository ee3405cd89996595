"""Steps without gradients while a worker has no data, so that no other worker waits for its steps."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager

from ps_protocol.errors import Unavailable
from ps_worker import times
from ps_worker.step.remote_model import RemoteModel


@contextmanager
def no_op_steps(models: Sequence[RemoteModel], others_wait: Callable[[], bool]) -> Iterator[None]:
    """Make no-op steps of every model during the block, one thread each, while ``others_wait()``; then catch up.

    As the join context of torch's DDP does for uneven inputs: a no-op step moves the clock, so that workers that still
    train are not blocked, and changes no parameter. Models step at their own pace. A no-op step that waits for others
    when the block ends is interrupted. Raises what such a step raised.
    """
    for model in models:
        model.begin_waiting()
    stop = threading.Event()

    def steps(model: RemoteModel) -> None:
        while not stop.wait(times.NO_OP_PAUSE_SECONDS):
            if others_wait():
                model.no_op_step()

    with ThreadPoolExecutor(max(1, len(models)), "ps-no-op") as threads:
        running = {threads.submit(steps, model): model for model in models}
        try:
            yield
        finally:
            stop.set()
            error = end_no_op_steps(running)
    if error is not None:
        raise error
    for model in models:
        model.catch_up()


def end_no_op_steps(running: Mapping[Future[None], RemoteModel]) -> BaseException | None:
    """Wait for the no-op steps under way and interrupt late ones; the first error of one that was not interrupted.

    Whether the push of an interrupted step arrived is not known: its model has to be pulled.
    """
    late = wait(running, 0.2).not_done
    waiting = late
    while waiting:
        for future in waiting:
            running[future].interrupt()
        waiting = wait(waiting, 0.1).not_done
    for future in late:
        running[future].resume()
    errors = (future.exception() for future in running if not _was_interrupted(future, late))
    return next((error for error in errors if error is not None), None)


def _was_interrupted(future: Future[None], late: set[Future[None]]) -> bool:
    return future in late and isinstance(future.exception(), Unavailable)
