"""The leader of a host beside followers that lie, leave or send too little: the others go on."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from dataclasses import replace

import pytest
import torch

from ps_protocol.errors import InvalidRequest
from ps_protocol.wire.shared_memory import SharedMemory
from ps_worker.host.connection import HostConnection
from ps_worker.host.core import Lead
from ps_worker.host.folder import HostFolder
from ps_worker.host.follower import Follower
from ps_worker.host.group import HostGroup
from ps_worker.host.leader import LOOK_SECONDS, Leader, Leaders, LiveWorkers
from ps_worker.host.memory import LentSegments, MappedSegments, read_only
from ps_worker.host.messages import Deposit, HostHello, RoundAnswer, Separate
from tests.support.shards import PATIENCE_SECONDS, wait_until

LIVE = LiveWorkers({0: 10, 1: 11, 2: 12}, 5, bounded=False)
LEAD = Lead((0, 1), True, True, None)
DEPOSIT = Deposit(1, 0, 1, 1, 1.0, False, False, (), (), (), "")
NOTHING = RoundAnswer(0.0, "", ())


def hello(rank: int, style: str = "raw") -> HostHello:
    return HostHello(rank, 10 + rank, 1, 4, "model", style)


@pytest.fixture
def folder(short_path):
    made = HostFolder("a:1", short_path)
    yield made
    made.close()


@pytest.fixture
def leader(folder):
    assert folder.lead(hello(0).key, 1)
    made = Leader(hello(0), folder, Leaders(), lambda: LIVE)
    yield made
    made.close()


def group(folder: HostFolder, rank: int, style: str = "raw") -> HostGroup:
    return HostGroup(folder, Leaders(), lambda: hello(rank, style), lambda: LIVE)


@pytest.fixture
def follow(folder, leader, short_path):
    with ExitStack() as ends:

        def follow(rank: int) -> Follower:
            other = HostFolder("a:1", short_path)
            ends.callback(other.close)
            made = group(other, rank)
            ends.callback(made.close)
            part = made.enter()
            assert isinstance(part, Follower)
            return part

        yield follow


def nothing(*_: object) -> None:
    pass


def test_a_round_is_gathered_and_answered(leader, follow):
    one, two = follow(1), follow(2)
    for each in (one, two):
        each.deposit(DEPOSIT, [])
    assert [each.worker.rank for each in leader.gather(LEAD, None, nothing)] == [1, 2]
    leader.ended(lambda _: NOTHING)
    assert [one.wait(nothing), two.wait(nothing)] == [NOTHING, NOTHING]


def test_a_follower_that_ends_while_its_round_is_pushed_has_ended_when_the_leader_looks(leader, follow):
    one, two = follow(1), follow(2)
    for each in (one, two):
        each.deposit(DEPOSIT, [])
    taken = leader.gather(LEAD, None, nothing)
    one.close()
    assert [each.connection.has_ended() for each in taken] == [True, False]
    leader.leave_out([taken[0].worker])
    leader.ended(lambda _: NOTHING)
    assert two.wait(nothing) == NOTHING


def test_followers_are_heard_while_the_leader_opens_a_stream_that_has_ended(leader, follow):
    one, two = follow(1), follow(2)
    one.deposit(DEPOSIT, [])

    def opens(waits_for: object) -> None:
        wait_until(lambda: len(leader._rounds.pending) == 1)
        two.deposit(DEPOSIT, [])
        wait_until(lambda: leader._rounds.is_complete)

    assert [each.worker.rank for each in leader.gather(LEAD, None, opens)] == [1, 2]


def test_what_fails_while_others_are_waited_for_sends_those_who_have_come_on_their_way(leader, follow):
    one, _ = follow(1), follow(2)
    one.deposit(DEPOSIT, [])

    def fails(waits_for: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        leader.gather(LEAD, None, fails)
    # It is told where the leader comes no more.
    leader.close()
    with pytest.raises(ConnectionError):
        one.wait(nothing)


def test_a_worker_that_is_interrupted_while_it_finds_its_leader_is_not_waited_for(leader, short_path, monkeypatch):
    def interrupted(connection: HostConnection, timeout_seconds: float) -> object:
        message = receive(connection, timeout_seconds)
        if timeout_seconds:
            raise KeyboardInterrupt
        return message

    def soon(waits_for: object) -> None:
        looks.append(waits_for)
        assert len(looks) < PATIENCE_SECONDS / LOOK_SECONDS

    looks: list[object] = []
    receive = HostConnection.receive
    other = HostFolder("a:1", short_path)
    with monkeypatch.context() as patch:
        patch.setattr(HostConnection, "receive", interrupted)
        with pytest.raises(KeyboardInterrupt):
            group(other, 1).enter()
    assert leader.gather(LEAD, None, soon) == []
    leader.ended()
    other.close()


def test_a_leader_that_closes_ends_all_connections_and_another_leads(leader, folder, follow, short_path):
    one = follow(1)
    assert one.is_open
    leader.close()
    folder.resign()
    assert not one.is_open
    other = HostFolder("a:1", short_path)
    part = group(other, 1).enter()
    assert isinstance(part, Leader)
    part.close()
    other.close()


def test_who_sends_no_hello_or_another_models_is_not_heard(leader, folder):
    for first in (DEPOSIT, replace(hello(1), model="other"), replace(hello(1), seed=9)):
        connection = HostConnection(folder.connect("model"), folder.descriptors)
        connection.send(first)
        wait_until(connection.has_ended)
        connection.close()
    assert leader.gather(LEAD, None, nothing) == []


def test_who_pushes_otherwise_is_told_so_and_is_in_no_round(leader, folder, short_path, caplog):
    other = HostFolder("a:1", short_path)
    made = group(other, 1, "bf16")
    assert made.enter() is None
    assert made.enter() is None
    assert caplog.text.count("apart from the others of its host") == 1
    other.close()
    assert leader.gather(LEAD, None, nothing) == []


@pytest.mark.parametrize("packet", [b"x", b'["Welcome"]', b'["Separate","no"]', b'["LentSegment",1,0,4096]'])
def test_what_a_follower_may_not_send_ends_its_connection_alone(leader, follow, packet):
    one, two = follow(1), follow(2)
    one.connection.socket.send(packet)
    two.deposit(DEPOSIT, [])
    wait_until(one.connection.has_ended)
    assert [each.worker.rank for each in leader.gather(LEAD, None, nothing)] == [2]


def test_a_segment_that_is_smaller_than_was_said_ends_the_connection(leader, follow):
    one = follow(1)
    segment = SharedMemory.create(4096)
    one.connection.socket.sendmsg([b'["LentSegment",1,0,8192]'], [(1, 1, segment.fd.to_bytes(4, "little"))])
    wait_until(one.connection.has_ended)


def test_a_deposit_that_does_not_fit_is_refused_by_name(leader, follow):
    one = follow(1)
    one.deposit(DEPOSIT, [])
    (taken,) = leader.gather(LEAD, None, nothing)
    leader.refuse(taken.worker, InvalidRequest("a deposit does not fit the shards", expected="8", actual="9"))
    with pytest.raises(InvalidRequest, match="does not fit the shards"):
        one.wait(nothing)


def test_memory_is_known_by_its_number_as_long_as_it_is_used(leader, follow):
    one = follow(1)
    first, second = (SharedMemory.create(4096) for _ in range(2))
    first.bytes[:2], second.bytes[:2] = b"ab", b"cd"
    for number, segment in enumerate([first, second, first, first, second], 1):
        one.deposit(replace(DEPOSIT, sequence=number, clock=number), [segment])
        (taken,) = leader.gather(replace(LEAD, position=(0, number)), None, nothing)
        found = taken.connection.mapped.region(taken.deposit.segments[0], 4096)
        assert found is not None
        assert bytes(found[1][:2].tolist()) == bytes(segment.bytes[:2])
        leader.ended(lambda _: NOTHING)
        assert one.wait(nothing) == NOTHING


def test_memory_that_is_not_known_or_too_small_is_not_there():
    mapped, lent = MappedSegments(), LentSegments()
    assert mapped.region(1, 8) is None
    segment = SharedMemory.create(4096)
    assert lent.number(segment) == (1, True)
    assert lent.number(segment) == (1, False)
    assert read_only(segment, 8).shape == torch.Size([8])


def test_a_leader_that_does_not_come_is_given_up_and_asked_again_once_it_has_gone_on(leader, folder, short_path):
    other = HostFolder("a:1", short_path)
    made = group(other, 1)
    assert isinstance(made.enter(), Follower)
    made.give_up("it has not come")
    assert made.enter() is None
    assert made.enter() is None
    leader.gather(LEAD, None, nothing)
    leader.ended()
    assert isinstance(made.enter(), Follower)
    made.close()
    other.close()


def test_a_follower_waits_until_its_leader_has_come(leader, follow):
    one = follow(1)
    one.deposit(DEPOSIT, [])
    looked = threading.Event()
    threading.Thread(target=lambda: (looked.wait(30), leader.leave_until((1, 0)))).start()
    answer = one.wait(lambda: looked.set())
    assert isinstance(answer, Separate)


def test_a_worker_finds_no_leader_that_does_not_listen_and_does_not_wait_for_it_twice(folder, short_path, monkeypatch):
    monkeypatch.setattr("ps_worker.host.group.CONNECT_SECONDS", 0.05)
    other = HostFolder("a:1", short_path)
    assert folder.lead(hello(0).key, 1)
    made = group(other, 1)
    assert made.enter() is None
    assert made.enter() is None
    made.close()
    other.close()
