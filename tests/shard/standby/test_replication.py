"""When a push may be acknowledged as far as the standby is concerned."""

from __future__ import annotations

import asyncio
import threading

import pytest

from ps_protocol.cluster.view import StandbyReport
from ps_protocol.errors import Unavailable
from ps_server.log.entries import MemoryLog
from ps_server.shard.config import Acknowledge
from ps_server.shard.durability.replication import Replication
from tests.support.loops import in_loop


class Coordinator:
    """Hears the words; ``away`` and ``busy`` are set by the test."""

    def __init__(self) -> None:
        self.words: list[StandbyReport] = []
        self.away = False
        self.answers = threading.Event()
        self.answers.set()

    def tell(self, word: StandbyReport) -> None:
        assert self.answers.wait(60)
        if self.away:
            raise Unavailable("away")
        self.words.append(word)


class Shard:
    def __init__(self, acknowledge: Acknowledge = Acknowledge.AFTER) -> None:
        self.log, self.coordinator = MemoryLog(), Coordinator()
        self.replication = Replication(self.log, acknowledge)
        self.replication.begin(self.coordinator.tell)

    def may_acknowledge(self) -> bool:
        return self.replication.covers(self.log.number)

    async def until_told(self, *directories: str) -> None:
        async with asyncio.timeout(60):
            await self.replication.ended()
        assert [word.directory for word in self.coordinator.words] == list(directories)

    async def covered(self) -> Shard:
        """A standby has everything, and the coordinator knows."""
        self.replication.follows("b")
        self.replication.acknowledge(self.log.number)
        await self.until_told("b")
        return self


def test_without_a_standby_nothing_is_waited_for():
    shard = Shard()
    shard.log.number = 5
    assert shard.may_acknowledge()


def test_a_standby_that_is_far_behind_holds_nobody_up():
    shard = Shard()
    shard.log.number = 100
    shard.replication.follows("b")
    for number in (1, 10, 50):
        shard.replication.acknowledge(number)
        shard.log.number += 100
    assert shard.may_acknowledge()
    assert not shard.coordinator.words


@in_loop
async def test_the_coordinator_hears_of_a_standby_when_it_has_what_was_acknowledged_without_it():
    shard = Shard()
    shard.log.number = 10
    shard.replication.follows("b")
    shard.replication.acknowledge(8)
    shard.log.number = 12
    shard.replication.acknowledge(10)  # a round trip behind: from now on pushes wait
    assert not shard.may_acknowledge()
    assert not shard.coordinator.words
    shard.replication.acknowledge(12)
    assert shard.may_acknowledge()
    await shard.until_told("b")


@in_loop
async def test_with_a_standby_a_push_waits_until_it_has_it():
    shard = await Shard().covered()
    shard.log.number = 1
    waiting = asyncio.create_task(shard.replication.covered(1))
    await asyncio.sleep(0.01)  # time for what must not happen
    assert not waiting.done()
    shard.replication.acknowledge(1)
    await waiting


@in_loop
async def test_when_the_standby_is_lost_nothing_is_acknowledged_before_the_coordinator_knows():
    shard = await Shard().covered()
    shard.coordinator.answers.clear()
    shard.log.number = 1
    shard.replication.lost()
    waiting = asyncio.create_task(shard.replication.covered(1))
    await asyncio.sleep(0.05)  # time for what must not happen
    assert not waiting.done()
    shard.coordinator.answers.set()
    await waiting
    assert [word.number for word in shard.coordinator.words] == [1, 2]
    assert shard.coordinator.words[-1].directory == ""


@in_loop
async def test_an_absent_coordinator_is_told_when_it_is_back():
    shard = await Shard().covered()
    shard.coordinator.away = True
    shard.log.number = 1
    shard.replication.lost()
    await asyncio.sleep(0.3)  # time for what must not happen, and for calls that fail
    assert not shard.may_acknowledge()
    shard.coordinator.away = False
    await shard.replication.covered(1)


@in_loop
async def test_a_standby_that_comes_back_at_once_is_waited_for_again():
    shard = await Shard().covered()
    shard.coordinator.away = True
    shard.log.number = 3
    shard.replication.lost()
    shard.replication.follows("b")
    assert not shard.may_acknowledge()
    shard.replication.acknowledge(3)
    assert shard.may_acknowledge()
    shard.log.number = 4
    assert not shard.may_acknowledge()
    shard.coordinator.away = False
    shard.replication.acknowledge(4)
    assert shard.may_acknowledge()
    # What it was told before is true again.
    await shard.until_told("b")


@in_loop
async def test_before_replication_nothing_waits_and_the_coordinator_is_told_all_the_same():
    shard = await Shard(Acknowledge.BEFORE).covered()
    shard.log.number = 7
    assert shard.may_acknowledge()
    shard.replication.lost()
    await shard.until_told("b", "")


@in_loop
async def test_a_shard_that_lost_its_place_acknowledges_nothing_more():
    shard = await Shard().covered()
    shard.log.number = 1
    waiting = asyncio.create_task(shard.replication.covered(1))
    await asyncio.sleep(0.01)
    shard.replication.close(Unavailable("lost its place"))
    with pytest.raises(Unavailable, match="lost its place"):
        await waiting
    with pytest.raises(Unavailable):
        await shard.replication.covered(1)
