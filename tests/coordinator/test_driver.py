import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any

import pytest

from ps_protocol.cluster.view import ClusterView, JoinRequest, MemberStats, Role
from ps_protocol.errors import Unavailable
from ps_server.coordinator.driver import Driver
from ps_server.coordinator.persistence.journal import Journal
from ps_server.coordinator.settings import ClusterSettings
from ps_worker.session.terminate import Terminated, leave_reason


def driven(body: Callable[[Driver], Coroutine[Any, Any, None]], settings: ClusterSettings) -> None:
    async def run() -> None:
        driver = Driver(settings)
        driver.start()
        try:
            await asyncio.wait_for(body(driver), 60)
        finally:
            await driver.close()

    asyncio.run(run())


def worker(rank: int) -> JoinRequest:
    return JoinRequest(Role.WORKER, rank, "", f"worker {rank}")


SHORT = ClusterSettings(lease_seconds=0.3, heartbeat_seconds=0.1)


def test_a_parked_barrier_opens_when_the_lease_of_the_missing_worker_ends() -> None:
    async def body(driver: Driver) -> None:
        driver.join(JoinRequest(Role.SHARD, 0, "host:1", "shard"))
        alive = driver.join(worker(0)).member
        driver.join(worker(1))
        parked = asyncio.create_task(driver.barrier(0, alive.incarnation, 0, 60.0))
        while not parked.done():
            driver.heartbeat(alive.role, alive.index, alive.incarnation, MemberStats())
            await asyncio.sleep(0.02)
        assert (await parked).released

    driven(body, SHORT)


def test_a_pause_of_the_whole_process_ends_no_lease() -> None:
    now = 0.0

    async def run() -> None:
        nonlocal now
        driver = Driver(ClusterSettings(lease_seconds=5.0, heartbeat_seconds=0.05), clock=lambda: now)
        member = driver.join(worker(0)).member
        driver.start()
        # The timer begins to wait; then an hour passes at once, as after a suspend.
        await asyncio.sleep(0)
        now = 3600.0
        for _ in range(1000):
            status = driver.status().members[0]
            if status.seconds_since_heartbeat < 1.0 or status.gone:
                break
            await asyncio.sleep(0.01)
        assert driver.status().view.members == (member,)
        driver.heartbeat(member.role, member.index, member.incarnation, MemberStats())
        await driver.close()

    asyncio.run(run())


def test_a_disk_that_is_slow_to_take_the_end_of_one_lease_ends_no_other(tmp_path: Path) -> None:
    now, takes = 0.0, 0.0

    class SlowJournal(Journal):
        def write(self, rows: Mapping[str, bytes | None]) -> None:
            nonlocal now
            now += takes
            super().write(rows)

    async def run() -> None:
        nonlocal now, takes
        with SlowJournal.open(tmp_path) as journal:
            settings = ClusterSettings(lease_seconds=5.0, heartbeat_seconds=0.05)
            driver = Driver(settings, clock=lambda: now, journal=journal)
            driver.join(worker(0))
            now = 4.0
            alive = driver.join(worker(1)).member
            now, takes = 5.0, 3600.0
            driver.start()
            for _ in range(6000):
                # An hour was over when the end of the lease of worker 0 was on disk.
                status = driver.status().members[0]
                if now > 3600.0 and (status.seconds_since_heartbeat < 5.0 or status.gone):
                    break
                await asyncio.sleep(0.01)
            assert driver.view.members == (alive,)
            driver.heartbeat(alive.role, alive.index, alive.incarnation, MemberStats())
            await driver.close()

    asyncio.run(run())


def test_a_lease_lasts_longer_by_all_that_a_busy_machine_makes_its_timer_late(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    sleep = asyncio.sleep

    async def late(seconds: float) -> None:
        nonlocal now
        now += 1.4 * seconds  # Never so late at once that anybody would say that the process stood still.
        await sleep(0)

    async def run() -> float:
        driver = Driver(ClusterSettings(lease_seconds=1.0, heartbeat_seconds=0.05), clock=lambda: now)
        member = driver.join(worker(0)).member
        monkeypatch.setattr(asyncio, "sleep", late)
        driver.start()
        while member in driver.status().view.members:
            await sleep(0)
        await driver.close()
        return now

    assert asyncio.run(run()) == pytest.approx(1.4, abs=0.08)


def test_a_slow_watcher_gets_the_newest_view_and_not_every_one() -> None:
    async def body(driver: Driver) -> None:
        views = driver.views(0)
        driver.join(worker(0))
        assert len((await anext(views)).members) == 1
        for rank in range(1, 50):
            driver.join(worker(rank))
        assert len((await anext(views)).members) == 50
        await views.aclose()

    driven(body, ClusterSettings())


def test_a_watcher_that_knows_a_later_revision_of_an_earlier_coordinator_is_answered_at_once() -> None:
    async def body(driver: Driver) -> None:
        assert await anext(driver.views(99)) is driver.status().view

    driven(body, ClusterSettings())


def test_a_barrier_call_ends_at_its_time_and_names_the_missing() -> None:
    async def body(driver: Driver) -> None:
        driver.join(JoinRequest(Role.SHARD, 0, "host:1", "shard"))
        member = driver.join(worker(0)).member
        driver.join(worker(1))
        state = await driver.barrier(0, member.incarnation, 0, 0.05)
        assert (state.released, state.missing_ranks) == (False, (1,))

    driven(body, ClusterSettings())


def test_closing_ends_watchers_and_parked_barriers() -> None:
    async def body(driver: Driver) -> None:
        member = driver.join(worker(0)).member
        driver.join(worker(1))
        known = driver.status().view.revision

        async def watch() -> ClusterView:
            return await anext(driver.views(known))

        waiting = [asyncio.create_task(watch()), asyncio.create_task(driver.barrier(0, member.incarnation, 0, 10.0))]
        await asyncio.sleep(0)
        await driver.close()
        for task in waiting:
            with pytest.raises(Unavailable, match="stopping"):
                await task

    driven(body, ClusterSettings())


def test_losses_are_warnings_and_what_was_asked_for_is_not(caplog: pytest.LogCaptureFixture) -> None:
    async def body(driver: Driver) -> None:
        for rank, why in enumerate(("StateLost: gone", "KeyboardInterrupt: ", "", leave_reason(Terminated()))):
            member = driver.join(worker(rank)).member
            driver.leave(member.role, member.index, member.incarnation, why)
        silent = driver.join(worker(4)).member
        async for view in driver.views(0):
            if silent not in view.members:
                return

    caplog.set_level(logging.INFO)
    driven(body, SHORT)
    levels = {record.getMessage(): record.levelno for record in caplog.records if "worker" in record.getMessage()}
    losses = [text for text, level in levels.items() if level == logging.WARNING]
    assert any("worker 0 left: StateLost" in text for text in losses)
    assert any("lease ended: worker 4" in text for text in losses)
    assert not any(f"worker {rank}" in text for rank in (1, 2, 3) for text in losses)
