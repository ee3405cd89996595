"""A round over two shards, seen from one: it waits for the other's norm, and every way that can end. Costs 1 s."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
import torch

from ps_protocol.cluster.model_status import ModelPosition
from ps_protocol.errors import InternalError, InvalidRequest, Unavailable
from ps_protocol.model.spec import Consistency, Mode, NonFinite, ShardMap, Slice
from ps_server.consistency import Position, PushInfo, Verdict, WorkerKey
from ps_server.failpoints import Failpoints
from ps_server.shard import quiesce
from ps_server.shard.context import ShardContext
from ps_server.shard.execution.executor import ShardExecutor
from ps_server.shard.registry import Registry
from ps_server.shard.step.model import ShardModel
from ps_server.shard.step.push import IncomingPush, require_norm
from ps_server.state.model_state import new_model
from ps_server.state.region import Region
from tests.support.loops import in_loop
from tests.support.shards import RecordingLog, simple_spec

CLIP = 1.0
SPEC = replace(simple_spec((4, 3), (5,)), clip_grad_norm=CLIP)
#: The second variable is on shard 1, which is asked and never there.
MAP = ShardMap(1, SPEC, 2, (Slice(0, 0, 4, 0), Slice(1, 0, 5, 1)))
SYNC = Consistency(Mode.SYNC)
WORKERS = {0: 1, 1: 2, 2: 3}


class Peer:
    """The other shard: what it answers, when the test lets it."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, str, int, Position]] = []
        self.answer: asyncio.Future[float] = asyncio.get_running_loop().create_future()

    async def ask(self, *question: object) -> float:
        self.asked.append(question)  # type: ignore[arg-type]
        return await asyncio.shield(self.answer)


class Shard:
    """The model on shard 0, its other shard, and pushes with gradients of one value."""

    def __init__(self, consistency: Consistency, workers: int) -> None:
        self.peer, self.log, self.failpoints = Peer(), RecordingLog(), Failpoints()
        self.executor = ShardExecutor(1)
        self.model = ShardModel(
            new_model(MAP, 0), self.executor, consistency, self.log, self.failpoints, ask_norm=self.peer.ask
        )
        self.model.members({rank: WORKERS[rank] for rank in range(workers)})
        self._sequences = dict.fromkeys(WORKERS, 0)

    async def push(self, rank: int, clock: int = 1, value: float = 1.0, **fields: object) -> Verdict:
        self._sequences[rank] += 1
        info = PushInfo(WorkerKey(rank, WORKERS[rank]), self._sequences[rank], Position(0, clock), 0)
        region = self.model.pool.take()
        region.slice(0).fill_(value)
        given = {"finite": True, "squared_norm": 12.0 * value * value} | fields
        push = IncomingPush(info, region, frozenset(), SPEC.group_options, **given)
        return (await self.model.push(push)).verdict

    async def until(self, true: Callable[[], object]) -> None:
        async with asyncio.timeout(30):
            while not true():  # noqa: ASYNC110 -- what it waits for has no event
                await asyncio.sleep(0.001)

    async def closed(self) -> None:
        """Until the other shard has been asked."""
        await self.until(lambda: self.peer.asked)

    def applied(self) -> torch.Tensor:
        """The gradient of the last update, as logged."""
        region = Region(self.model.layout)
        region.data.copy_(self.log.updates[-1][1])
        return region.slice(0).clone()


@asynccontextmanager
async def shard(consistency: Consistency = SYNC, workers: int = 2) -> AsyncIterator[Shard]:
    made = Shard(consistency, workers)
    try:
        await made.model.values.load(Region(made.model.layout), None, only_first=True)
        yield made
        assert made.model.gate.closed or made.model.pool.in_use == 0
    finally:
        made.model.stop(Unavailable("the test is over"))
        await asyncio.sleep(0)
        made.executor.close()


@in_loop
async def test_a_round_is_scaled_by_the_norm_over_both_shards_and_the_log_holds_the_part_of_this_one() -> None:
    async with shard() as at:
        await at.push(0, value=1.0)
        await at.push(1, value=3.0)
        await at.closed()
        assert at.peer.asked == [(1, "model", 1, Position(0, 1))]
        assert (at.model.tracker.version, at.log.updates) == (0, [])
        assert at.model.tracker.blocker(Position(0, 1)) == "the gradient norm of step 1 on shard 1"
        at.peer.answer.set_result(52.0)
        await at.until(lambda: at.model.tracker.version)
        await at.model.settled()
        # The mean is 2 in each of 12 elements: 48, and 52 elsewhere.
        expected = torch.full((4, 3), 2.0 * CLIP / (math.sqrt(48.0 + 52.0) + 1e-6))
        torch.testing.assert_close(at.applied(), expected)
        (update, _), *more = at.log.updates
        assert (update.step.squared_norm, more) == (48.0, [])


@in_loop
async def test_a_push_that_comes_while_the_other_shard_is_asked_is_late() -> None:
    async with shard(Consistency(Mode.SYNC, backup=1), workers=3) as at:
        await at.push(0)
        await at.push(1)
        await at.closed()
        assert await at.push(2) is Verdict.LATE
        at.peer.answer.set_result(0.0)
        await at.until(lambda: at.model.tracker.version)
        assert len(at.log.updates[0][0].pushes) == 2


@in_loop
async def test_the_next_round_is_closed_when_this_one_is_made() -> None:
    async with shard() as at:
        for clock in (1, 2):
            for rank in (0, 1):
                await at.push(rank, clock)
        await at.closed()
        assert len(at.peer.asked) == 1
        at.peer.answer.set_result(0.0)
        await at.until(lambda: at.model.tracker.version == 2)
        assert [position.clock for *_, position in at.peer.asked] == [1, 2]
        assert [update.pushes[0].position.clock for update, _ in at.log.updates] == [1, 2]


@in_loop
async def test_another_shard_is_answered_once_this_one_has_the_pushes_and_in_between_now_and_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("ps_server.shard.times.NORM_SECONDS", 0.01)
    async with shard() as at:
        assert await at.model.clipped.part(Position(0, 1)) is None
        monkeypatch.setattr("ps_server.shard.times.NORM_SECONDS", 60.0)
        asking = asyncio.create_task(at.model.clipped.part(Position(0, 1)))
        await at.push(0, value=2.0)
        assert not asking.done()
        await at.push(1, value=2.0)
        assert await asking == 48.0
        at.peer.answer.set_result(0.0)
        await at.until(lambda: at.model.tracker.version)
        assert await at.model.clipped.part(Position(0, 1)) == 48.0


@in_loop
async def test_nobody_is_asked_about_a_round_of_skipped_pushes() -> None:
    async with shard() as at:
        for rank in (0, 1):
            info = PushInfo(WorkerKey(rank, WORKERS[rank]), 1, Position(0, 1), 0, skipped=True)
            await at.model.push(IncomingPush(info, None, frozenset(), SPEC.group_options))
        assert (at.model.tracker.applied, at.peer.asked) == (Position(0, 1), [])
        assert await at.model.clipped.part(Position(0, 1)) == 0.0


@in_loop
async def test_while_the_model_is_paused_the_round_waits_and_then_is_made() -> None:
    async with shard() as at:
        await at.push(0)
        await at.push(1)
        await at.closed()
        at.model.gate.pause()
        at.peer.answer.set_result(0.0)
        await at.until(lambda: at.model.clipped._settled)
        assert at.model.clipped.is_closed
        assert at.model.tracker.version == 0
        at.model.resume()
        assert at.model.tracker.version == 1


@in_loop
async def test_a_quiesce_waits_until_the_round_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    async with shard() as at:
        registry = Registry(ShardContext(0, at.executor, fetch_shard_map=None))  # type: ignore[arg-type]
        registry._models["model"] = at.model
        quiescence = quiesce.Quiescence(0, registry)
        await at.push(0)
        await at.push(1)
        await at.closed()
        targets = [ModelPosition("model", {(0, 1): 1, (1, 2): 1})]
        quiescence.pause("one", 60)
        with monkeypatch.context() as quick:
            quick.setattr("ps_server.shard.times.CATCH_UP_SECONDS", 0.01)
            with pytest.raises(Unavailable, match="norm of other shards"):
                await quiescence.catch_up("one", targets, 60)
        quiescence.pause("two", 60)
        reaching = asyncio.create_task(quiescence.catch_up("two", targets, 60))
        await asyncio.sleep(0)
        at.peer.answer.set_result(0.0)
        (reached,) = await reaching
        assert (reached.open, at.model.tracker.applied.clock, at.model.gate.paused) == ({}, 1, True)
        quiescence.resume("two")


@in_loop
async def test_who_waits_for_a_quiesce_hears_which_push_does_not_come_before_giving_up() -> None:
    async with shard() as at:
        registry = Registry(ShardContext(0, at.executor, fetch_shard_map=None))  # type: ignore[arg-type]
        registry._models["model"] = at.model
        quiescence = quiesce.Quiescence(0, registry)
        quiescence.pause("one", 60)
        targets = [ModelPosition("model", {(1, 2): 1})]
        async with asyncio.timeout(20):
            with pytest.raises(Unavailable, match=r"a push of worker 1 .+ has did not come to shard 0"):
                await quiescence.catch_up("one", targets, 0.05)


@in_loop
async def test_a_model_that_stops_asks_nobody_any_more_and_answers_with_what_stopped_it() -> None:
    async with shard() as at:
        asking = asyncio.create_task(at.model.clipped.part(Position(0, 9)))
        await at.push(0)
        await at.push(1)
        await at.closed()
        exchange = at.model.clipped._exchange
        at.model.stop(Unavailable("the shard stops"))
        with pytest.raises(Unavailable, match="the shard stops"):
            await asking
        with pytest.raises(asyncio.CancelledError):
            await exchange
        at.peer.answer.set_result(0.0)
        assert at.model.tracker.version == 0


@pytest.mark.parametrize("error", [InternalError("the answer makes no sense"), ValueError("a bug")])
@in_loop
async def test_an_error_while_the_norm_is_taken_stops_the_model(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    async with shard() as at:
        at.peer.answer.set_exception(error)
        await at.push(0)
        await at.push(1)
        with pytest.raises(InternalError):
            await at.model.stopped()


@pytest.mark.parametrize("mode", [Mode.ASYNC, Mode.SSP])
@in_loop
async def test_a_push_that_is_applied_alone_is_scaled_by_the_norm_that_its_worker_told(mode: Mode) -> None:
    async with shard(Consistency(mode, staleness=4)) as at:
        await at.push(0, value=3.0, squared_norm=400.0)
        await at.push(1, value=3.0, squared_norm=0.25)
        await at.model.settled()
        torch.testing.assert_close(at.applied(), torch.full((4, 3), 3.0))
        at.log.updates.pop()
        torch.testing.assert_close(at.applied(), torch.full((4, 3), 3.0 / (20.0 + 1e-6)))
        assert at.peer.asked == []


@pytest.mark.parametrize("told", [None, -1.0, math.nan])
def test_a_push_that_does_not_tell_its_norm_is_refused(told: float | None) -> None:
    with pytest.raises(InvalidRequest, match="lacks the norm"):
        require_norm(told, SPEC, 3)


def test_where_gradients_may_be_anything_their_norm_may_too() -> None:
    require_norm(math.nan, replace(SPEC, nonfinite=NonFinite.ALLOW), 3)
    require_norm(math.inf, SPEC, 3)
