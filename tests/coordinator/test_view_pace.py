"""When watchers are told: at once, or later where they are many; none misses the last view. In this process; 1 s."""

import asyncio
import math
from collections.abc import Callable
from dataclasses import replace

import pytest

from ps_protocol.cluster.view import ClusterView, JoinRequest, Member, Role
from ps_protocol.errors import Unavailable
from ps_protocol.model.spec import Consistency, Mode
from ps_server.coordinator import views as view_pace
from ps_server.coordinator.driver import Driver
from ps_server.coordinator.settings import ClusterSettings
from ps_server.coordinator.times import VIEW_SECONDS
from ps_server.coordinator.views import UNBOUND_WATCHERS, ViewPace, is_urgent
from tests.support.seeds import seeded

MANY = UNBOUND_WATCHERS + 10
SHARD, WORKER = Member(Role.SHARD, 0, 1, "host:1"), Member(Role.WORKER, 0, 2)
STARTED = ClusterView(7, (SHARD, WORKER), models={"model": 1}, started=True)


@pytest.mark.parametrize(
    "change",
    [
        {"consistency": Consistency(Mode.SSP, 3)},
        {"models": {"model": 2}},
        {"moving": "move"},
        {"started": False},
        {"finished": True},
        {"released": True},
        {"expected_shards": 2},
        {"spare": frozenset({1})},
        {"released_models": {"model": 1}},
        {"members": (replace(SHARD, incarnation=9), WORKER)},
        {"members": (WORKER,)},
    ],
)
def test_what_steps_depend_on_is_urgent(change):
    assert is_urgent(STARTED, replace(STARTED, revision=8, **change))


@pytest.mark.parametrize("members", [(SHARD,), (SHARD, WORKER, Member(Role.WORKER, 1, 3))])
def test_workers_that_come_and_go_are_not_urgent(members):
    assert not is_urgent(STARTED, replace(STARTED, revision=8, members=members, journal_mark=b"new"))


def test_shards_are_not_urgent_before_the_job_starts():
    waiting = replace(STARTED, started=False)
    assert not is_urgent(waiting, replace(waiting, revision=8, members=(WORKER,)))


def test_the_first_change_is_told_at_once_and_the_next_after_the_interval():
    pace = ViewPace()
    assert pace.wait(10.0, 1000, urgent=False) == 0.0
    pace.sent(10.0)
    assert pace.wait(10.05, 1000, urgent=False) == pytest.approx(0.15)
    assert pace.wait(10.2, 1000, urgent=False) == 0.0
    assert pace.wait(10.0, 1_000_000, urgent=False) == VIEW_SECONDS
    assert pace.wait(10.05, 1000, urgent=True) == 0.0
    assert pace.wait(10.05, UNBOUND_WATCHERS, urgent=False) == 0.0


def test_a_clock_that_goes_back_makes_nobody_wait_longer():
    pace = ViewPace()
    pace.sent(math.inf)
    assert pace.wait(0.0, 1000, urgent=False) == pytest.approx(0.2)


def joining(rank: int) -> JoinRequest:
    return JoinRequest(Role.WORKER, rank, "", f"worker {rank}")


class Watchers:
    """Follow the views of a driver, each in a task."""

    def __init__(self, driver: Driver, count: int) -> None:
        self.seen: list[list[ClusterView]] = [[] for _ in range(count)]
        self._told = asyncio.Condition()
        self._tasks = [asyncio.create_task(self._follow(driver, seen)) for seen in self.seen]

    async def _follow(self, driver: Driver, seen: list[ClusterView]) -> None:
        async for view in driver.views(0):
            async with self._told:
                seen.append(view)
                self._told.notify_all()

    async def until(self, holds: Callable[[ClusterView], bool]) -> None:
        """Until the last view of each is one for which ``holds``."""
        async with asyncio.timeout(60.0), self._told:
            await self._told.wait_for(lambda: all(seen and holds(seen[-1]) for seen in self.seen))

    async def ended(self) -> list[BaseException | None]:
        """What each ended with."""
        async with asyncio.timeout(60.0):
            return await asyncio.gather(*self._tasks, return_exceptions=True)


def test_many_watchers_wait_for_workers_and_not_for_what_is_urgent(monkeypatch):
    monkeypatch.setattr("ps_server.coordinator.times.VIEW_SECONDS", 3600.0)
    monkeypatch.setattr(view_pace, "SECONDS_PER_WATCHER", 60.0)

    async def run() -> None:
        driver = Driver(ClusterSettings(lease_seconds=600))
        driver.join(joining(0))
        watchers = Watchers(driver, MANY)
        await watchers.until(lambda view: len(view.members) == 1)
        driver.join(joining(1))
        driver.join(joining(2))
        later = driver.views(0)
        # One that comes now is told all that is known.
        assert len((await anext(later)).members) == 3
        assert all(len(seen) == 1 for seen in watchers.seen)
        changed = driver.set_consistency(Consistency(Mode.SSP, 3))
        await watchers.until(lambda view: view.revision == changed.revision)
        assert all(len(seen) == 2 and len(seen[-1].members) == 3 for seen in watchers.seen)
        driver.join(joining(3))
        assert (await anext(later)).revision == changed.revision
        await later.aclose()
        await driver.close()
        assert all(isinstance(end, Unavailable) for end in await watchers.ended())

    asyncio.run(run())


def test_every_watcher_is_told_the_last_of_many_changes_and_not_each_of_them(monkeypatch):
    rng = seeded()

    async def run() -> None:
        driver = Driver(ClusterSettings(lease_seconds=600))
        driver.join(joining(99))
        watchers = Watchers(driver, MANY)
        await watchers.until(lambda view: True)
        held = {}
        for burst in range(10):
            for _ in range(rng.randrange(1, 40)):
                rank = rng.randrange(30)
                if rank in held:
                    driver.leave(Role.WORKER, rank, held.pop(rank), "")
                else:
                    held[rank] = driver.join(joining(rank)).member.incarnation
            if burst % 3:
                await asyncio.sleep(0)
            else:
                await watchers.until(lambda view: view.revision == driver.view.revision)
        await watchers.until(lambda view: view.revision == driver.view.revision)
        for seen in watchers.seen:
            revisions = [view.revision for view in seen]
            assert revisions == sorted(set(revisions))
            assert len(seen) <= 25 < 100 < driver.view.revision
        await driver.close()
        await watchers.ended()

    asyncio.run(run())
