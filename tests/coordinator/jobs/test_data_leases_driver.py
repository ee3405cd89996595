"""A request for data that is parked is answered as soon as there is something to lease, or the epoch ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import pytest

from ps_protocol.cluster.leases import LeaseAnswer, LeaseAsk, Span
from ps_protocol.cluster.view import JoinRequest, Member, MemberStats, Role
from ps_protocol.errors import Unavailable
from ps_server.coordinator.driver import Driver
from ps_server.coordinator.settings import ClusterSettings

LENGTH = 10
ALL = Span(0, LENGTH)

Event = Callable[[Driver, Member], Coroutine[Any, Any, None]]


def ask(sequence: int, items: int = LENGTH, trained: tuple[Span, ...] = ()) -> LeaseAsk:
    return LeaseAsk("data", LENGTH, 0, items, sequence, trained)


def join(driver: Driver, rank: int, token: str = "") -> Member:
    return driver.join(JoinRequest(Role.WORKER, rank, "", token or f"worker {rank}")).member


async def lease(driver: Driver, member: Member, ask: LeaseAsk, wait_seconds: float = 0.0) -> LeaseAnswer:
    return await driver.lease_data(member.index, member.incarnation, ask, wait_seconds)


async def leave(driver: Driver, holder: Member) -> None:
    driver.leave(holder.role, holder.index, holder.incarnation, "")


async def be_replaced(driver: Driver, holder: Member) -> None:
    driver.join(JoinRequest(Role.WORKER, holder.index, "", "another", take_over=True))


async def fall_silent(driver: Driver, holder: Member) -> None:
    """Its lease on membership ends by itself."""


async def give_back(driver: Driver, holder: Member) -> None:
    await lease(driver, holder, ask(2, items=0))


async def finish(driver: Driver, holder: Member) -> None:
    await lease(driver, holder, ask(2, trained=(ALL,)))


@pytest.mark.parametrize("event", [leave, be_replaced, fall_silent, give_back, finish])
def test_who_waits_is_answered_when_the_holder_goes_gives_back_or_finishes(event: Event) -> None:
    async def run() -> LeaseAnswer:
        driver = Driver(ClusterSettings(lease_seconds=0.3, heartbeat_seconds=0.1))
        driver.start()
        holder, waiter = join(driver, 0), join(driver, 1)
        assert (await lease(driver, holder, ask(1))).span == ALL
        parked = asyncio.create_task(lease(driver, waiter, ask(1), 30.0))
        await asyncio.sleep(0)
        await event(driver, holder)
        while not parked.done():
            driver.heartbeat(waiter.role, waiter.index, waiter.incarnation, MemberStats())
            await asyncio.sleep(0.02)
        await driver.close()
        return await parked

    answer = asyncio.run(run())
    assert (answer.span, answer.done) == ((None, True) if event is finish else (ALL, False))


def test_who_waits_is_answered_when_the_holder_says_that_it_has_not_heard_of_its_lease() -> None:
    async def run() -> list[LeaseAnswer]:
        driver = Driver(ClusterSettings())
        holder, waiter = join(driver, 0), join(driver, 1)
        await lease(driver, holder, ask(1))
        parked = asyncio.create_task(lease(driver, waiter, ask(1), 30.0))
        await asyncio.sleep(0)
        answers = [await lease(driver, holder, replace(ask(2, items=4), held=()))]
        async with asyncio.timeout(20):
            answers.append(await parked)
        return answers

    assert [answer.span for answer in asyncio.run(run())] == [Span(0, 4), Span(4, LENGTH)]


def test_a_parked_request_ends_at_its_time_and_names_the_holders() -> None:
    async def run() -> LeaseAnswer:
        driver = Driver(ClusterSettings())
        holder, waiter = join(driver, 0), join(driver, 1)
        await lease(driver, holder, ask(1))
        return await lease(driver, waiter, ask(1), 0.05)

    assert asyncio.run(run()) == LeaseAnswer(epoch=0, holders=(0,))


def test_closing_ends_parked_requests() -> None:
    async def run() -> None:
        driver = Driver(ClusterSettings())
        holder, waiter = join(driver, 0), join(driver, 1)
        await lease(driver, holder, ask(1))
        parked = asyncio.create_task(lease(driver, waiter, ask(1), 10.0))
        await asyncio.sleep(0)
        await driver.close()
        with pytest.raises(Unavailable, match="stopping"):
            await parked

    asyncio.run(run())
