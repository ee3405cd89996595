"""Exchanges through the driver, its journal, and the real service. Costs about 2 s."""

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest

from ps_protocol.cluster.exchange import MAX_PAYLOAD_BYTES, ExchangeKey
from ps_protocol.cluster.view import JoinRequest, Member, Role
from ps_protocol.errors import DamagedData, Fenced, InvalidRequest, Unavailable
from ps_protocol.rpc.channel import open_channel
from ps_protocol.v1 import coordinator_pb2 as pb
from ps_protocol.v1.coordinator_pb2_grpc import CoordinatorStub
from ps_protocol.wire.convert.exchange import (
    exchange_record_from_bytes,
    exchange_record_to_bytes,
    exchange_state_from_pb,
)
from ps_server.coordinator.driver import Driver
from ps_server.coordinator.persistence.cluster_records import from_rows
from ps_server.coordinator.settings import ClusterSettings
from tests.coordinator.persistence.test_driver_journal import SHARD, CountingJournal, driven, worker
from tests.support.coordinators import connected

KEY = ExchangeKey("loss", 0)


async def both(driver: Driver, a: Member, b: Member, key: ExchangeKey = KEY) -> list[Any]:
    calls = [driver.exchange(m.index, m.incarnation, key, b"from %d" % m.index, 5.0) for m in (a, b)]
    return list(await asyncio.gather(*calls))


def test_a_result_is_told_after_it_is_on_disk_and_a_later_coordinator_knows_it(tmp_path: Path) -> None:
    members: list[Member] = []

    async def first(driver: Driver, journal: CountingJournal) -> None:
        driver.join(SHARD)
        members.extend(driver.join(worker(rank)).member for rank in range(2))
        a, b = members
        before = journal.writes
        assert not (await driver.exchange(0, a.incarnation, KEY, b"from 0", 0.0)).complete
        assert journal.writes == before
        journal.refuses = True
        with pytest.raises(Unavailable):
            await driver.exchange(1, b.incarnation, KEY, b"from 1", 0.0)
        with pytest.raises(Unavailable):
            await driver.exchange(0, a.incarnation, KEY, b"from 0", 0.0)
        journal.refuses = False
        told = await driver.exchange(0, a.incarnation, KEY, b"from 0", 0.0)
        assert (told.complete, told.payloads) == (True, {0: b"from 0", 1: b"from 1"})
        assert journal.writes == before + 1
        assert not (await driver.exchange(1, b.incarnation, ExchangeKey("loss", 1), b"open", 0.0)).complete

    async def second(driver: Driver, journal: CountingJournal) -> None:
        a, b = members
        told = await driver.exchange(1, b.incarnation, KEY, b"again", 0.0)
        assert told.payloads == {0: b"from 0", 1: b"from 1"}
        # Open exchanges are not persisted: both give again.
        later = await both(driver, a, b, ExchangeKey("loss", 1))
        assert later[0].payloads == later[1].payloads == {0: b"from 0", 1: b"from 1"}
        driver.leave(Role.WORKER, 1, b.incarnation, "killed")
        again = driver.join(worker(1, life=2)).member
        told = await driver.exchange(1, again.incarnation, KEY, b"again", 0.0)
        assert told.payloads == {0: b"from 0", 1: b"from 1"}

    driven(tmp_path, first, second)


def test_a_worker_that_joined_late_is_late_for_the_next_coordinator_as_well(tmp_path: Path) -> None:
    members: list[Member] = []

    async def first(driver: Driver, journal: CountingJournal) -> None:
        driver.join(SHARD)
        members.extend(driver.join(worker(rank)).member for rank in range(2))
        await both(driver, *members)
        driver.leave(Role.WORKER, 1, members[1].incarnation, "killed")
        members[1] = driver.join(worker(1, life=2)).member

    async def second(driver: Driver, journal: CountingJournal) -> None:
        assert (await driver.exchange(0, members[0].incarnation, ExchangeKey("loss", 1), b"", 0.0)).complete

    driven(tmp_path, first, second)


def test_a_worker_that_dies_ends_the_wait_of_the_others(tmp_path: Path) -> None:
    async def body(driver: Driver, journal: CountingJournal) -> None:
        driver.join(SHARD)
        a, b = (driver.join(worker(rank)).member for rank in range(2))
        waiting = asyncio.create_task(driver.exchange(0, a.incarnation, KEY, b"a", 30.0))
        await asyncio.sleep(0)
        driver.leave(Role.WORKER, 1, b.incarnation, "gone")
        assert (await asyncio.wait_for(waiting, 60)).payloads == {0: b"a"}
        with pytest.raises(Fenced):
            await driver.exchange(1, b.incarnation, KEY, b"b", 0.0)

    driven(tmp_path, body)


def test_rows_that_are_no_exchange_are_damaged_data(tmp_path: Path) -> None:
    async def body(driver: Driver, journal: CountingJournal) -> None:
        driver.join(SHARD)
        await both(driver, *(driver.join(worker(rank)).member for rank in range(2)))
        rows = journal.read()
        known = from_rows(rows, "here")
        assert known is not None
        assert set(known.exchanges.complete) == {KEY}
        for damage in ({"exchange/0/loss": b"\xff"}, {"exchange/x/loss": b""}, {"exchanges": b"[1]"}):
            with pytest.raises(DamagedData, match="exchange"):
                from_rows(rows | damage, "here")

    driven(tmp_path, body)


def test_ranks_that_do_not_rise_and_empty_results_are_refused() -> None:
    payloads = ((0, b"a"), (3, b"b"))
    assert exchange_record_from_bytes(exchange_record_to_bytes(7, payloads)) == (7, payloads)
    with pytest.raises(InvalidRequest, match="do not rise"):
        exchange_record_from_bytes(exchange_record_to_bytes(7, payloads[::-1]))
    with pytest.raises(InvalidRequest, match="has no payloads"):
        exchange_state_from_pb(pb.ExchangeReply(complete=True))


def test_over_the_wire_with_refusals_of_others_than_live_workers() -> None:
    with connected(ClusterSettings(expected_workers=1, lease_seconds=60.0)) as client:
        client.join(JoinRequest(Role.SHARD, 0, "127.0.0.1:1"), "shard")
        member = client.join(JoinRequest(Role.WORKER), "a").member
        evaluator = client.join(JoinRequest(Role.EVALUATOR), "b").member
        assert client.exchange(member, KEY, b"x" * MAX_PAYLOAD_BYTES).payloads == {0: b"x" * MAX_PAYLOAD_BYTES}
        with pytest.raises(InvalidRequest, match="65536 bytes from one worker"):
            client.exchange(member, ExchangeKey("loss", 1), b"x" * (MAX_PAYLOAD_BYTES + 1))
        with pytest.raises(Fenced):
            client.exchange(evaluator, KEY, b"")
        with open_channel(client.address) as channel:
            request = pb.ExchangeRequest(
                rank=0, incarnation=member.incarnation, name="loss", ordinal=1, wait_seconds=float("nan")
            )
            with pytest.raises(grpc.RpcError, match="wait_seconds is not a valid time"):
                CoordinatorStub(channel).Exchange(request, timeout=60)
