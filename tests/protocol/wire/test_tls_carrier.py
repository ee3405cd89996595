"""The carrier under TLS: what is sent arrives, both ways at once; a handshake that must fail does, with a reason."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from ps_protocol.errors import InvalidRequest, PsError, Unauthenticated
from ps_protocol.security.security import Security
from ps_protocol.wire.socket_messages import framed
from ps_protocol.wire.tls_carrier import CHUNK_BYTES, TlsCarrier
from ps_server.certs import Authority
from tests.support.seeds import seeded
from tests.support.tls import SocketCertificates

SECONDS = 30.0


@pytest.fixture
def certificates(tmp_path, monkeypatch) -> SocketCertificates:
    return SocketCertificates(tmp_path, monkeypatch)


@contextmanager
def connected() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Both ends of a TCP connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = socket.create_connection(listener.getsockname())
        server, _ = listener.accept()
    with client, server:
        yield client, server


@contextmanager
def shaken(
    shard: Security, worker: Security, host: str = "127.0.0.1"
) -> Iterator[tuple[TlsCarrier, Future[None], TlsCarrier, Future[None]]]:
    """Both carriers, and how their handshakes ended."""
    server_context, client_context = shard.server_context(), worker.client_context()
    assert server_context
    assert client_context
    with connected() as (client_end, server_end), ThreadPoolExecutor(2) as threads:
        client = TlsCarrier(client_end, client_context, "shard 0", host=host)
        server = TlsCarrier(server_end, server_context, "the worker")
        for carrier in (client, server):
            carrier.prepare(SECONDS)
        ended = [threads.submit(each.wait_for_handshake, SECONDS) for each in (client, server)]
        for future in ended:
            future.exception(SECONDS)
        yield client, ended[0], server, ended[1]


@contextmanager
def pair(certificates: SocketCertificates) -> Iterator[tuple[TlsCarrier, TlsCarrier]]:
    with shaken(certificates.shard(), certificates.worker()) as (client, first, server, second):
        first.result()
        second.result()
        yield client, server


def receive(carrier: TlsCarrier, size: int) -> bytes:
    data = bytearray(size)
    carrier.receive_into([memoryview(data)])
    return bytes(data)


def test_pieces_of_any_size_arrive_whole_both_ways_at_once(certificates):
    draw = seeded()
    sizes = [0, 1, 3, 16384, 16385, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 3 << 20]
    sent = [[draw.randbytes(size) for size in draw.sample(sizes, len(sizes))] for _ in range(2)]
    with pair(certificates) as ends, ThreadPoolExecutor(4) as threads:
        for carrier, pieces in zip(ends, sent, strict=True):
            threads.submit(carrier.send_all, pieces)
        total = sum(sizes)
        got = [threads.submit(receive, carrier, total) for carrier in reversed(ends)]
        assert [each.result(SECONDS) == b"".join(pieces) for each, pieces in zip(got, sent, strict=True)] == [True] * 2


def test_nothing_that_was_sent_is_readable_on_the_socket(certificates):
    with pair(certificates) as (client, server):
        client.send_all([b"parameters" * 100])
        seen = server.socket.recv(1 << 20, socket.MSG_PEEK)
        assert b"parameters" not in seen
        assert receive(server, 1000) == b"parameters" * 100


def test_what_the_socket_does_not_take_at_once_is_sent_first_by_the_next_call(certificates):
    data = os.urandom(32 << 20)
    with pair(certificates) as (client, server), ThreadPoolExecutor(1) as threads:
        rest = client.send_now([data[:5], memoryview(data)[5:]])
        assert rest
        got = threads.submit(receive, server, len(data) + 4)
        client.send_all([*rest, b"tail"])
        assert got.result(SECONDS) == data + b"tail"


def test_when_all_is_encrypted_but_not_taken_there_still_is_a_rest(certificates):
    with pair(certificates) as (client, server), ThreadPoolExecutor(1) as threads:
        sent = 0
        while not (rest := client.send_now([bytes(1000)])):
            sent += 1
        got = threads.submit(receive, server, (sent + 1) * 1000)
        client.send_all(rest)
        assert len(got.result(SECONDS)) == (sent + 1) * 1000


def test_messages_are_read_one_by_one_however_they_came(certificates):
    with pair(certificates) as (client, server):
        client.send_all([framed(b"one"), framed(b""), framed(b"three" * 9000)])
        for expected in (b"one", b"", b"three" * 9000):
            assert server.receive_message(lambda: True) == (expected, [])


def test_now_means_without_waiting(certificates):
    view = memoryview(bytearray(100))
    with pair(certificates) as (client, server):
        with pytest.raises(BlockingIOError):
            server.receive_now(view)
        client.send_all([b"some"])
        got = 0
        while got < 4:
            try:
                got += server.receive_now(view[got:])
            except BlockingIOError:
                pass
        assert view[:4] == b"some"
        client.shut_down()
        while True:
            try:
                assert server.receive_now(view) == 0
                break
            except BlockingIOError:
                pass


def test_between_messages_a_peer_that_is_alive_may_take_its_time(certificates):
    with pair(certificates) as (client, server):
        server.prepare(0.01)
        asked: list[bool] = []

        def alive() -> bool:
            asked.append(True)
            if len(asked) == 3:
                client.send_all([framed(b"late")])
            return True

        assert server.receive_message(alive) == (b"late", [])
        with pytest.raises(ConnectionAbortedError, match="gone"):
            server.receive_message(lambda: False)


def test_the_end_of_a_connection_is_an_error_wherever_it_comes(certificates):
    with pair(certificates) as (client, server):
        client.send_all([b"abc"])
        client.shut_down()
        with pytest.raises(ConnectionResetError, match="middle of a transfer"):
            receive(server, 4)
        with pytest.raises(ConnectionResetError, match="closed"):
            server.receive_message(lambda: True)


def test_a_peer_that_stalls_in_a_transfer_is_given_up(certificates):
    with pair(certificates) as (client, server):
        server.prepare(0.05)
        client.send_all([b"abc"])
        with pytest.raises(ConnectionAbortedError, match="stalled"):
            receive(server, 4)


def test_bytes_that_were_changed_on_their_way_end_the_connection(certificates):
    with pair(certificates) as (client, server):
        client.socket.sendall(b"\x17\x03\x03\x00\x20" + bytes(32))
        with pytest.raises(ConnectionAbortedError, match="TLS connection broke"):
            receive(server, 1)


def test_descriptors_do_not_go_over_tls(certificates):
    with pair(certificates) as (client, _), pytest.raises(InvalidRequest, match="descriptors"):
        client.send_all([b"x"], [0])


# Handshakes that must fail

OTHER = Authority.make("other")


def refused(certificates: SocketCertificates, shard: Security, worker: Security, **named: str) -> PsError:
    """What the worker is told; of a refusal by the shard it hears with the first bytes it reads."""
    with shaken(shard, worker, **named) as (client, first, _, second):
        error = first.exception()
        if error is None:
            assert isinstance(second.exception(), Unauthenticated)
            with pytest.raises(Unauthenticated) as told:
                client.receive_message(lambda: True)
            error = told.value
        assert isinstance(error, Unauthenticated)
        return error


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"by": OTHER}, "certificate of shard 0 is not accepted"),
        ({"days": -1.0}, "certificate has expired"),
        ({"hosts": ("elsewhere.example",)}, "127.0.0.1"),
    ],
)
def test_a_shard_of_another_authority_or_host_or_time_is_refused(certificates, how, said):
    assert said in str(refused(certificates, certificates.shard(**how), certificates.worker()))


@pytest.mark.parametrize("how", [None, {"by": OTHER}, {"days": -1.0}], ids=["none", "another authority", "expired"])
def test_a_worker_whose_certificate_is_missing_or_not_accepted_is_told_so(certificates, how):
    worker = certificates.anonymous() if how is None else certificates.worker(**how)
    error = refused(certificates, certificates.shard(require_client=True), worker)
    assert "does not accept this side's certificate" in str(error)


def test_a_worker_without_a_certificate_is_welcome_where_none_is_required(certificates):
    with shaken(certificates.shard(), certificates.anonymous()) as (client, first, server, second):
        first.result()
        second.result()
        client.send_all([b"hello"])
        assert receive(server, 5) == b"hello"


@contextmanager
def serving(certificates: SocketCertificates) -> Iterator[tuple[TlsCarrier, socket.socket]]:
    """A shard's carrier before its handshake, and a peer that may send what it likes."""
    context = certificates.shard().server_context()
    assert context
    with connected() as (peer, end):
        carrier = TlsCarrier(end, context, "the peer")
        carrier.prepare(SECONDS)
        yield carrier, peer


def test_a_peer_that_speaks_in_clear_is_told_so_in_clear(certificates):
    with serving(certificates) as (carrier, peer):
        peer.sendall(framed(b"attach"))
        with pytest.raises(Unauthenticated, match="speaks in clear"):
            carrier.wait_for_handshake(SECONDS)
        carrier.plain.send_all([b"so"])
        assert peer.recv(2) == b"so"


def test_a_handshake_of_noise_ends_with_a_typed_error(certificates):
    with serving(certificates) as (carrier, peer):
        peer.sendall(b"\x16\x03\x01\x00\x10" + bytes(16))
        with pytest.raises(Unauthenticated, match="handshake with the peer failed"):
            carrier.wait_for_handshake(SECONDS)


@pytest.mark.parametrize("begun", [b"", b"\x16\x03\x01"], ids=["nothing", "a part"])
def test_a_peer_that_leaves_in_the_handshake_is_gone(certificates, begun):
    with serving(certificates) as (carrier, peer):
        peer.sendall(begun)
        peer.shutdown(socket.SHUT_WR)
        with pytest.raises(ConnectionResetError, match="closed the connection"):
            carrier.wait_for_handshake(SECONDS)


def test_a_handshake_takes_no_longer_than_allowed(certificates):
    with serving(certificates) as (carrier, _), pytest.raises(ConnectionAbortedError, match=r"in 0.05 s"):
        carrier.wait_for_handshake(0.05)


def test_a_step_of_the_handshake_never_waits(certificates):
    with serving(certificates) as (carrier, peer):
        assert not carrier.handshake()
        peer.sendall(b"\x16")
        came = threading.Event()
        while not carrier.socket.recv(1, socket.MSG_PEEK):
            came.wait(0.001)
        assert not carrier.handshake()
