"""Event loops: in a thread, for servers that live beside a synchronous test, and around an asynchronous test."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any, TypeVar

T = TypeVar("T")


def in_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run a test that is a coroutine on an event loop of its own."""

    @wraps(test)
    def run(*arguments: Any, **named: Any) -> None:
        asyncio.run(test(*arguments, **named))

    return run


class LoopThread:
    """A context manager; ``run`` executes a coroutine on the loop and returns its result."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="test-loop", daemon=True)

    def __enter__(self) -> LoopThread:
        self._thread.start()
        return self

    def run(self, coroutine: Coroutine[Any, Any, T], timeout_seconds: float = 120.0) -> T:
        """The first optimizer of a process imports much of torch here: on a busy machine that takes half a minute."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(timeout_seconds)

    def advance(self, seconds: float) -> None:
        """Set the clock of the loop ``seconds`` ahead: timers that would have run out by then have."""
        clock = self.loop.time

        async def later() -> None:
            self.loop.time = lambda: clock() + seconds  # type: ignore[method-assign]

        self.run(later())

    def __exit__(self, *_: object) -> None:
        self.run(self._drain())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()

    async def _drain(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.loop.shutdown_default_executor()
