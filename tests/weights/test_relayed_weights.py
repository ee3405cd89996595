"""What a relay answers readers whose job is not the one that it follows any more."""

from __future__ import annotations

import asyncio

import pytest

from ps_protocol.cluster.weights import FollowAsk, WeightsVersion
from ps_protocol.errors import UnknownVersion
from ps_server.relay.held import RelayedVersion, RelayedWeights

OLD = FollowAsk("policy", 3, 0, "reader", job_id="old")
"""Of a reader that has version 3 of the job before."""


def version(number: int, job_id: str) -> RelayedVersion:
    return RelayedVersion(WeightsVersion(number, "model", number, "", 0.0, (), job_id), {})


async def answered(ask: FollowAsk) -> None:
    """The job has what the reader names, or does not answer."""


async def denied(ask: FollowAsk) -> None:
    raise UnknownVersion("it is of another job")


def test_a_reader_that_waits_while_another_job_begins_is_told_so_at_once() -> None:
    async def check() -> None:
        held = RelayedWeights((), 2, denied, None)
        held.put("policy", version(3, "old"))
        waiting = asyncio.create_task(held.follow(OLD, 30.0))
        await asyncio.sleep(0)
        assert not waiting.done()
        held.forget("policy")
        held.put("policy", version(1, "new"))
        with pytest.raises(UnknownVersion):
            await asyncio.wait_for(waiting, 20)

    asyncio.run(check())


def test_the_job_is_asked_once_for_each_job_that_begins_and_not_for_each_of_its_versions() -> None:
    asked = []

    async def confirm(ask: FollowAsk) -> None:
        asked.append(ask)

    async def check() -> None:
        held = RelayedWeights((), 2, confirm, None)
        held.put("policy", version(3, "old"))
        waiting = asyncio.create_task(held.follow(OLD, 30.0))
        for number in range(1, 5):
            await asyncio.sleep(0.01)  # a turn for the reader that waits
            if number == 1:
                held.forget("policy")
            held.put("policy", version(number, "new"))
        await asyncio.sleep(0.01)  # time for what must not happen
        assert not waiting.done()
        waiting.cancel()

    asyncio.run(check())
    assert len(asked) == 1


def test_the_end_of_another_job_is_not_that_of_the_reader() -> None:
    async def check() -> None:
        held = RelayedWeights((), 2, answered, None)
        held.put("policy", version(5, "new"))
        held.finish("policy")
        answer = await held.follow(OLD, 0.0)
        assert (answer.version, answer.finished) == (None, False)

    asyncio.run(check())


def test_who_waits_for_a_first_version_is_told_that_a_job_has_ended_which_has_published_nothing() -> None:
    async def check() -> None:
        held = RelayedWeights((), 2, answered, None)
        waiting = asyncio.create_task(held.follow(FollowAsk("policy", 0, 0, "reader"), 30.0))
        await asyncio.sleep(0)
        held.ended_empty(True)
        assert (await asyncio.wait_for(waiting, 20)).finished
        assert not (await held.follow(OLD, 0.0)).finished
        held.ended_empty(False)
        assert not (await held.follow(FollowAsk("policy", 0, 0, "reader"), 0.0)).finished

    asyncio.run(check())


@pytest.mark.parametrize("have", [3, 9])
def test_a_version_that_is_asked_for_by_number_is_given_whatever_the_reader_has(have: int) -> None:
    """As the job gives it."""

    async def check() -> None:
        held = RelayedWeights((), 2, answered, None)
        held.put("policy", version(5, "new"))
        answer = await held.follow(FollowAsk("policy", have, 5, "reader", job_id="old"), 0.0)
        assert answer.version is not None
        assert answer.version.number == 5

    asyncio.run(check())
