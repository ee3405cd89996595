"""A change of the region is made on the event loop if it is known to be short and disturbs nobody. No I/O."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest

from ps_server.failpoints import Failpoints
from ps_server.log.entries import MemoryLog
from ps_server.shard.step import applier
from ps_server.shard.step.applier import Applier
from ps_server.shard.step.gate import Gate
from ps_server.state.model_state import new_model
from tests.support.shards import simple_spec, whole_map


class Executor:
    """Makes everything at once, and keeps where it was to be made."""

    def __init__(self) -> None:
        self.asked: list[bool] = []

    def submit(self, work, nbytes, *, quick=False):
        self.asked.append(quick)
        made = asyncio.get_running_loop().create_future()
        # As the executor's thread does, and waited for.
        with ThreadPoolExecutor(1) as thread:
            made.set_result(thread.submit(work).result())
        return made


def asked(monkeypatch, *, limit=1e9, numbers=1 << 17, taken=False, waits=False):
    """Whether the first and the second change of a model were to be made on the event loop."""
    monkeypatch.setattr(applier, "QUICK_SECONDS", limit)

    async def scenario():
        start = new_model(whole_map(simple_spec((numbers,))), 0)
        executor, log = Executor(), MemoryLog()
        log.waits = waits
        made = Applier(start.replica, start.tracker, executor, log, Gate(), None, Failpoints(), lambda error: None)
        made.change(1, lambda replica: None)
        if taken:
            made.newest.take(quick=True)
        made.change(2, lambda replica: None)
        return executor.asked

    return asyncio.run(scenario())


def test_the_second_of_two_short_changes_is_made_on_the_loop(monkeypatch):
    assert asked(monkeypatch) == [False, True]


@pytest.mark.parametrize(
    "why", [{"limit": 0.0}, {"numbers": 1 << 20}, {"taken": True}, {"waits": True}], ids=lambda why: next(iter(why))
)
def test_a_long_a_large_a_disturbing_and_a_logged_change_go_to_the_thread(monkeypatch, why):
    assert asked(monkeypatch, **why) == [False, False]
