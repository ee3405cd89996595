"""What is awaited on an event loop: conditions, and the first of several ends."""

from __future__ import annotations

import asyncio

import pytest

from ps_server.tasks import Conditions, cancelled, first_of


def test_who_is_cancelled_while_a_condition_comes_true_is_cancelled() -> None:
    async def run() -> None:
        conditions = Conditions()
        waiting = asyncio.create_task(conditions.until(lambda: False, 60.0))
        await asyncio.sleep(0)
        conditions.wake()
        waiting.cancel()
        await asyncio.wait([waiting])
        assert waiting.cancelled()

    asyncio.run(asyncio.wait_for(run(), 10.0))


def test_a_condition_is_waited_for_until_it_is_true_or_the_time_is_over() -> None:
    async def run() -> None:
        conditions, now = Conditions(), list[int]()
        waiting = asyncio.create_task(conditions.until(lambda: len(now) == 2))
        for number in range(2):
            await asyncio.sleep(0)
            assert not waiting.done()
            now.append(number)
            conditions.wake()
        assert await waiting
        assert not await conditions.until(lambda: False, 0.001)

    asyncio.run(asyncio.wait_for(run(), 10.0))


def test_the_first_end_ends_coroutines_and_leaves_tasks_to_their_owners() -> None:
    async def run() -> None:
        event, ended = asyncio.Event(), list[str]()

        async def waits() -> None:
            try:
                await event.wait()
            except asyncio.CancelledError:
                ended.append("cancelled")
                raise

        async def fails() -> None:
            raise ValueError

        task, failing = asyncio.create_task(event.wait()), asyncio.create_task(fails())
        await first_of(task, waits(), failing)
        await asyncio.sleep(0)
        assert (ended, task.done()) == (["cancelled"], False)
        with pytest.raises(ValueError):
            await failing
        await first_of(task, seconds=0.001)
        await cancelled(task)
        assert task.cancelled()

    asyncio.run(asyncio.wait_for(run(), 10.0))
