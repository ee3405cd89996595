"""A shard waits for workers a step could do without as long as its grace time says, and then needs no other event."""

from __future__ import annotations

import asyncio

from ps_protocol.model.spec import Consistency, Mode
from ps_protocol.v1 import shard_pb2 as pb
from ps_server.tasks import Timer
from tests.support.loops import LoopThread
from tests.support.shards import StubStream, assert_equal, flat, gradients, reference, running_shard, start, wait_until

LIVE = {0: 1, 1: 2, 2: 3}


def graced(seconds: float) -> Consistency:
    return Consistency(Mode.SYNC, backup=1, grace_seconds=seconds)


def test_a_step_that_has_its_quorum_is_made_when_its_grace_time_ends() -> None:
    with running_shard(LIVE, graced(0.05)) as shard:
        model, initial = start(shard)
        streams = [StubStream(shard, rank, incarnation) for rank, incarnation in LIVE.items()]
        pushed = [gradients(model, rank) for rank in range(2)]
        for stream, tensors in zip(streams, pushed, strict=False):
            stream.push(flat(model.layout, *tensors))
        mean = [(a + b) / 2 for a, b in zip(*pushed, strict=True)]
        for stream in streams[:2]:
            result, payload = stream.result()
            assert result.version == 1
            assert_equal(payload, model, reference(initial, [mean]))
        late, _ = streams[2].exchange(flat(model.layout, *gradients(model, 2)))
        assert (late.outcome, late.clock, late.version) == (pb.OUTCOME_LATE, 1, 1)


def test_a_long_grace_time_is_not_waited_for_once_all_are_there_or_it_is_taken_away() -> None:
    with running_shard(LIVE, graced(3600.0)) as shard:
        model, _ = start(shard)
        streams = [StubStream(shard, rank, incarnation) for rank, incarnation in LIVE.items()]
        payload = flat(model.layout, *gradients(model, 0))
        for stream in streams[:2]:
            stream.push(payload)
        wait_until(lambda: model.parked_pulls == 2)
        assert model.tracker.grace_ends is not None
        streams[2].push(payload)
        assert [stream.result()[0].version for stream in streams] == [1, 1, 1]
        for stream in streams[:2]:
            stream.push(payload)
        wait_until(lambda: model.parked_pulls == 2)
        shard.set_view(LIVE, graced(0.0))
        assert [stream.result()[0].version for stream in streams[:2]] == [2, 2]


def test_an_alarm_rings_once_for_the_time_set_last() -> None:
    with LoopThread() as loop:

        async def rings() -> int:
            count, rung = 0, asyncio.Event()

            def ring() -> None:
                nonlocal count
                count += 1
                rung.set()

            alarm, now = Timer(ring), asyncio.get_running_loop().time()
            alarm.set(now + 3600.0)
            alarm.set(now)
            alarm.set(now + 0.01)
            await rung.wait()
            alarm.set(now)
            alarm.set(None)
            await asyncio.sleep(0)
            return count

        assert loop.run(rings()) == 1
