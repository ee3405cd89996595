"""Reads what belongs to an event loop from another thread."""

from __future__ import annotations

import concurrent.futures
from asyncio import AbstractEventLoop, run_coroutine_threadsafe
from collections.abc import Callable, Iterable
from typing import TypeVar

from ps_protocol import times
from ps_protocol.errors import Unavailable

T = TypeVar("T")


def call_on_loop(loop: AbstractEventLoop, read: Callable[[], Iterable[T]]) -> Callable[[], tuple[T, ...]]:
    """A function for other threads that has ``read`` called on ``loop``, in one piece.

    It raises Unavailable when the loop does not answer in time, as when it is stuck or has ended.
    """

    async def on_loop() -> tuple[T, ...]:
        return tuple(read())

    def from_outside() -> tuple[T, ...]:
        reading = on_loop()
        try:
            asked = run_coroutine_threadsafe(reading, loop)
        except RuntimeError as error:
            reading.close()
            raise Unavailable("the process is ending") from error
        try:
            return asked.result(times.REPEATED_CALL_SECONDS)
        except concurrent.futures.CancelledError as error:
            raise Unavailable("the process is ending") from error
        except TimeoutError as error:
            asked.cancel()
            raise Unavailable(
                f"the process has not answered for {times.REPEATED_CALL_SECONDS:g} s",
                remedy="see its log: its event loop is busy or stuck",
            ) from error

    return from_outside
