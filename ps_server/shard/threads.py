"""Work that leaves the event loop for a thread and touches memory that its caller lends it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from contextlib import suppress


async def in_thread(
    work: Callable[[], None], threads: Executor | None = None, *, hurry: Callable[[], None] | None = None
) -> None:
    """Do ``work`` in a thread. A caller that is cancelled waits for its end: no memory is touched after the return.

    ``hurry`` is called then, to make it end soon.
    """
    future = asyncio.get_running_loop().run_in_executor(threads, work)
    try:
        await asyncio.shield(future)
    except asyncio.CancelledError:
        if hurry:
            hurry()
        while not future.done():
            with suppress(asyncio.CancelledError):  # again: the memory is lent all the same
                await asyncio.wait([future])
        future.exception()
        raise
    finally:
        del future  # its error refers to this frame: together they would keep lent memory until a garbage collection
