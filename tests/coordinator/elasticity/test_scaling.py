"""Scaling a job, over fake shards: the engine is asked, slices move before a shard ends and after one has started, and
what is waited for is told.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from types import SimpleNamespace

import pytest

from ps_protocol.cluster.scaling import ScaleAsk, ScaleOrder
from ps_protocol.cluster.view import JoinRequest, Role
from ps_protocol.errors import InvalidRequest, NotReady, PsError, Unavailable, UnknownShard
from ps_server.coordinator.elasticity.engines import kept_request
from ps_server.coordinator.elasticity.engines.find import find_engine
from ps_server.coordinator.elasticity.engines.kept_request import KeptRequest
from ps_server.coordinator.elasticity.runner import look_of
from ps_server.coordinator.elasticity.scaling import JobScaling
from ps_server.coordinator.membership.scaling import awaited
from ps_server.coordinator.placement.move_plan import MoveRequest
from tests.coordinator.moving_job import Job, on_job


class FakeEngine:
    """Starts and ends nothing by itself."""

    scales = frozenset({"workers", "shards"})
    by_count = False

    def __init__(self) -> None:
        self.orders: list[ScaleOrder] = []
        self.error: Exception | None = None

    def request(self, wanted: int, ranks: tuple[int, ...]) -> str:
        raise AssertionError("nothing was lost")

    def scale(self, order: ScaleOrder) -> str:
        self.orders.append(order)
        if self.error:
            raise self.error
        return "it is told"

    def describe(self) -> str:
        return "a fake"


async def until(condition: Callable[[], bool], what: str) -> None:
    for _ in range(5000):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError(what)


class Scaled:
    """``job`` with its scaling under way."""

    def __init__(self, job: Job, engine: object) -> None:
        self.scaling = JobScaling(job.driver, job.moves, engine, asyncio.get_running_loop().time)  # type: ignore[arg-type]
        self.running = asyncio.create_task(self.scaling.run())
        self.told: list[str] = []

    async def ask(self, **numbers: int) -> None:
        async with aclosing(self.scaling.scale(ScaleAsk(**numbers))) as steps:
            async for step in steps:
                self.told.append(step.text)

    async def close(self) -> None:
        self.running.cancel()
        await asyncio.wait([self.running])


def leave(job: Job, role: Role, index: int, why: str) -> None:
    job.driver.leave(role, index, job.driver.view.live(role)[index].incarnation, why)


@on_job
async def test_slices_leave_a_shard_before_it_may_end_and_go_to_one_that_has_started(job: Job) -> None:
    engine = FakeEngine()
    scaled = Scaled(job, engine)
    # Shard 2 is there already, and spare.
    await scaled.ask(shards=3)
    assert min(job.held) >= 2
    assert scaled.told[0] == "slices have to move to shard 2"
    assert scaled.told[-1] == "the job has 1 worker and 3 shards"
    fewer = asyncio.create_task(scaled.ask(shards=1))
    await until(lambda: job.held == [8, 0, 0], "all is on shard 0")
    await until(lambda: bool(engine.orders) and engine.orders[-1].shards == {0}, "two may end")
    # Before that none of them may.
    assert [order.shards for order in engine.orders] == [{0, 1, 2}, {0, 1, 2}, {0}]
    assert not fewer.done()
    leave(job, Role.SHARD, 1, "stopped")
    leave(job, Role.SHARD, 2, "stopped")
    await fewer
    assert scaled.told[-2:] == ["shards 1 and 2 have to end", "the job has 1 worker and 1 shard"]
    await scaled.close()


@on_job
async def test_what_is_moved_by_hand_afterwards_stays_where_it_is(job: Job) -> None:
    scaled = Scaled(job, FakeEngine())
    await scaled.ask(shards=3)
    wish = MoveRequest(drain=(0,))
    scaled.scaling.moved_by_hand(wish)
    await job.reshard(wish)
    before = job.held
    assert before[0] == 0
    for _ in range(3):
        await scaled.scaling.look()
    assert job.held == before
    assert job.driver.wanted.shards == {1, 2}
    assert awaited(job.driver.wanted, job.driver.view) == "shard 0 has to end"
    with pytest.raises(UnknownShard):
        scaled.scaling.moved_by_hand(MoveRequest(to=(7,)))
    assert job.driver.wanted.shards == {1, 2}
    await scaled.close()


@on_job
async def test_workers_are_waited_for_and_one_that_is_ended_is_not_asked_for_again(job: Job) -> None:
    engine = FakeEngine()
    scaled = Scaled(job, engine)
    more = asyncio.create_task(scaled.ask(workers=2))
    await until(lambda: bool(scaled.told), "it waits")
    assert engine.orders[-1].ranks == {0, 1}
    job.driver.join(JoinRequest(Role.WORKER, 1, "", "second"))
    await more
    assert scaled.told == ["worker 1 has to join", "the job has 2 workers and 2 shards"]
    fewer = asyncio.create_task(scaled.ask(workers=1))
    await until(lambda: len(scaled.told) == 3, "it waits")
    leave(job, Role.WORKER, 1, "Terminated: the process received SIGTERM")
    await fewer
    look = look_of(job.driver.status())
    assert (look.wanted, look.lost, len(look.speeds)) == (1, frozenset(), 1)
    await scaled.close()


@on_job
async def test_it_goes_on_when_nobody_waits_for_it_and_after_a_move_that_failed(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    scaled = Scaled(job, FakeEngine())
    monkeypatch.setattr(job.moves, "_running", True)
    asked = asyncio.create_task(scaled.ask(shards=3))
    await until(lambda: any("slices are being moved already" in text for text in scaled.told), "it is told")
    asked.cancel()
    monkeypatch.setattr(job.moves, "_running", False)
    await until(lambda: not awaited(job.driver.wanted, job.driver.view), "it has moved")
    assert any("scaling has failed and is tried again" in event.text for event in job.driver.events.all)
    await scaled.close()


@on_job
async def test_another_call_for_shards_does_not_end_one_for_workers(job: Job) -> None:
    scaled = Scaled(job, FakeEngine())
    first = asyncio.create_task(scaled.ask(workers=3))
    await until(lambda: bool(scaled.told), "it waits")
    second = asyncio.create_task(scaled.ask(shards=3))
    await until(lambda: job.driver.wanted.number == 2, "both are wanted")
    await job.driver.wait_for_change(0.1)
    assert not first.done()
    for task in (first, second):
        task.cancel()
    await scaled.close()


@on_job
async def test_another_call_that_changes_it_ends_the_first(job: Job) -> None:
    scaled = Scaled(job, FakeEngine())
    first = asyncio.create_task(scaled.ask(workers=3))
    await until(lambda: bool(scaled.told), "it waits")
    await scaled.ask(workers=1)
    with pytest.raises(NotReady, match="scaled again meanwhile; actual: 1 workers"):
        await first
    await scaled.close()


@on_job
async def test_a_job_that_finishes_ends_the_call(job: Job) -> None:
    scaled = Scaled(job, FakeEngine())
    asked = asyncio.create_task(scaled.ask(workers=3))
    await until(lambda: bool(scaled.told), "it waits")
    leave(job, Role.WORKER, 0, "")
    with pytest.raises(NotReady, match="finished before it was scaled"):
        await asked
    await scaled.close()


@on_job
async def test_that_a_worker_has_trained_to_its_end_is_not_told_to_an_engine_that_would_end_another(
    job: Job,
) -> None:
    class ByCount(FakeEngine):
        by_count = True

    engine = ByCount()
    scaled = Scaled(job, engine)
    job.driver.join(JoinRequest(Role.WORKER, 1, "", "second"))
    job.driver.join(JoinRequest(Role.WORKER, 2, "", "third"))
    await scaled.ask(workers=3)
    leave(job, Role.WORKER, 1, "")
    assert job.driver.view.wanted_workers == 2
    again = Scaled(job, engine)
    for _ in range(3):
        await scaled.scaling.look()
        await again.scaling.look()
    assert [len(order.ranks or ()) for order in engine.orders] == [3]
    await scaled.close()
    await again.close()


class Forbidding(FakeEngine):
    def __init__(self) -> None:
        super().__init__()
        self.error = Unavailable("the API does not answer")


class OnlyWorkers(FakeEngine):
    scales = frozenset({"workers"})


class OnlyAsked:
    """As a class of users was before engines could scale."""

    def request(self, wanted: int, ranks: tuple[int, ...]) -> str:
        return ""

    def describe(self) -> str:
        return "a class"


def gone() -> KeptRequest:
    """The program that started the processes asked 75 s ago; the clock stands."""
    engine = KeptRequest()
    engine.asked_at -= 75.0
    return engine


@pytest.mark.parametrize(
    ("engine", "ask", "error", "text"),
    [
        (lambda: None, {"workers": 2}, NotReady, "nobody starts and ends processes.*ps-server --add"),
        (OnlyAsked, {"workers": 2}, NotReady, "nobody starts and ends processes"),
        (OnlyWorkers, {"shards": 3}, InvalidRequest, "a fake cannot start and end shards.*psctl move --to"),
        (lambda: find_engine("launcher:workers", 0), {"shards": 3}, InvalidRequest, "cannot start and end shards"),
        (Forbidding, {"workers": 2}, Unavailable, "the API does not answer"),
        (gone, {"workers": 2}, NotReady, "does not ask any more.*none for 75 s"),
    ],
)
@on_job
async def test_where_nobody_can_do_it_nothing_is_wanted(
    job: Job,
    engine: Callable[[], object],
    ask: dict[str, int],
    error: type[PsError],
    text: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kept_request, "time", SimpleNamespace(monotonic=lambda: 1000.0))
    scaled = Scaled(job, engine())
    with pytest.raises(error, match=text):
        await scaled.ask(**ask)
    assert job.driver.wanted.number == 0
    await scaled.close()


@on_job
async def test_a_coordinator_that_was_started_again_tells_its_engine_and_goes_on(job: Job) -> None:
    job.driver.scale(ScaleAsk(shards=3))
    engine = FakeEngine()
    scaled = Scaled(job, engine)
    await until(lambda: not awaited(job.driver.wanted, job.driver.view), "it has moved")
    assert [order.shards for order in engine.orders] == [{0, 1, 2}]
    await scaled.close()
