"""Work runs on the event loop where that takes less time, and never before what was queued earlier. Costs no second."""

from __future__ import annotations

import asyncio
import threading

import pytest

from ps_server.shard.execution.executor import INLINE_WORK_BYTES, ShardExecutor


def thread_of(nbytes: int, *, quick: bool, behind: bool) -> bool:
    """Whether work runs on the loop's thread; ``behind``: other work is on the executor's thread."""

    async def scenario() -> bool:
        executor, go = ShardExecutor(1), threading.Event()
        try:
            first = executor.submit(go.wait, INLINE_WORK_BYTES) if behind else None
            work = executor.submit(threading.get_ident, nbytes, quick=quick)
            was_done = work.done()
            go.set()
            if first is not None:
                await first
            found = await work == threading.get_ident()
            assert was_done == found
            return found
        finally:
            go.set()
            executor.close()

    return asyncio.run(scenario())


@pytest.mark.parametrize(("nbytes", "quick"), [(INLINE_WORK_BYTES - 1, False), (INLINE_WORK_BYTES, True)])
def test_small_and_quick_work_is_done_at_once_unless_other_work_is_queued(nbytes, quick):
    assert thread_of(nbytes, quick=quick, behind=False)
    assert not thread_of(nbytes, quick=quick, behind=True)


def test_other_work_goes_to_the_thread():
    assert not thread_of(INLINE_WORK_BYTES, quick=False, behind=False)
