"""Which connections are too many, decided without any; and what the kernel and gRPC call them. Below 1 s of CPU."""

from __future__ import annotations

import socket

import pytest

from ps_server.limits import CONNECTIONS, HANDSHAKE_TIME, HANDSHAKES, PEER_CONNECTIONS, ServerLimits
from ps_server.serving.connections import Connection, ConnectionBook, connections_to, end, endpoint_of
from tests.support.shards import wait_until


def made(*numbers: int, host: str = "a") -> list[Connection]:
    return [Connection((host, number), number) for number in numbers]


def peers(connections: list[Connection]) -> set[tuple[str, int]]:
    return {each.peer for each in connections}


def test_the_newest_of_a_host_is_closed_and_of_all_hosts():
    book = ConnectionBook(ServerLimits(max_connections=4, max_peer_connections=2))
    one, two = made(1, 2, 3), made(4, 5, host="b")
    assert book.look([*two, *one], peers([*one, *two]), 1.0) == [(one[2], PEER_CONNECTIONS)]
    third = made(6, host="c")
    kept = [*one[:2], *two, *third]
    assert book.look(kept, peers(kept), 1.0) == [(third[0], CONNECTIONS)]
    # What has ended makes room.
    kept = [one[0], *two, *third]
    assert book.look(kept, peers(kept), 1.0) == []


def test_one_that_came_first_stays_whatever_the_order_of_the_list():
    book = ConnectionBook(ServerLimits(max_peer_connections=1))
    old, new = made(9), made(3)
    assert book.look(old, peers(old), 1.0) == []
    assert book.look([*new, *old], peers([*new, *old]), 1.0) == [(new[0], PEER_CONNECTIONS)]


def test_one_without_a_call_is_closed_when_its_time_is_over():
    book = ConnectionBook(ServerLimits(handshake_seconds=3.0))
    silent, speaking = made(1), made(2)
    for _ in range(3):
        assert book.look([*silent, *speaking], peers(speaking), 1.0) == []
    assert book.look([*silent, *speaking], peers(speaking), 1.0) == [(silent[0], HANDSHAKE_TIME)]


def test_of_many_without_a_call_the_oldest_is_closed():
    book = ConnectionBook(ServerLimits(max_handshakes=2))
    assert book.look(made(1, 2), set(), 1.0) == []
    assert book.look(made(1, 2, 3), set(), 1.0) == [(made(1)[0], HANDSHAKES)]


@pytest.mark.parametrize(
    ("peer", "endpoint"),
    [
        ("ipv4:10.0.0.1:4711", ("10.0.0.1", 4711)),
        ("ipv6:%5B::1%5D:7", ("::1", 7)),
        ("ipv6:[::ffff:10.0.0.1]:7", ("10.0.0.1", 7)),
        ("ipv6:%5Bfe80::1%25eth0%5D:7", ("fe80::1", 7)),
        ("unix:", None),
        ("ipv4:nobody:1", None),
        ("ipv4:10.0.0.1:x", None),
    ],
)
def test_a_peer_has_the_endpoint_that_the_kernel_lists(peer, endpoint):
    assert endpoint_of(peer) == endpoint


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "::"])
def test_a_connection_is_listed_by_its_port_and_ended(host):
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as listener:
        try:
            listener.bind((host, 0))
        except OSError as error:
            pytest.skip(f"no such address here: {error}")
        listener.listen()
        port = listener.getsockname()[1]
        with socket.create_connection(("127.0.0.1" if host == "::" else host, port)) as client:
            # In the backlog it is nobody's yet.
            assert connections_to(port) == []
            accepted, _ = listener.accept()
            with accepted:
                (found,) = connections_to(port)
                name = "ipv4" if "." in client.getsockname()[0] else "ipv6"
                shown = client.getsockname()[0] if name == "ipv4" else f"%5B{client.getsockname()[0]}%5D"
                assert found.peer == endpoint_of(f"{name}:{shown}:{client.getsockname()[1]}")
                assert end(found)
                assert client.recv(1) == b""
            wait_until(lambda: connections_to(port) == [])
            assert not end(found)


def test_a_connection_of_nobody_is_not_ended():
    assert not end(Connection(("10.0.0.1", 1), 1))
