"""The side doors of a shard with security on: who is refused is told why, and nobody else notices."""

from __future__ import annotations

import logging
import os
import socket
import ssl
import subprocess
import sys
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from ps_protocol.cluster.answers import Outcome
from ps_protocol.errors import InvalidRequest, PermissionDenied, Unauthenticated
from ps_protocol.security.settings import BulkSecurity
from ps_protocol.v1 import shard_pb2 as pb
from ps_protocol.wire.convert.errors import from_detail
from ps_protocol.wire.socket_messages import framed
from ps_server.certs import Authority
from ps_server.shard.config import SideChannelConfig
from tests.support.shards import flat, gradients
from tests.support.side_channels import BULK, HURRIED, LARGE, SHM, Channel, header, unharmed, worker_of
from tests.support.tls import SocketCertificates
from tests.transports.support import Line, UvloopThread

TOKEN_ONLY = BulkSecurity.TOKEN_ONLY

OTHER = Authority.make("other")

NOBODY = 65534


@pytest.fixture(autouse=True)
def _uvloop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.support.shards.LoopThread", UvloopThread)


@pytest.fixture
def certificates(tmp_path, monkeypatch) -> SocketCertificates:
    return SocketCertificates(tmp_path, monkeypatch)


class TlsChannel(Channel):
    """A ``Channel`` whose socket is one of Python's own under TLS."""

    def receive(self) -> pb.StepReply:
        length = int.from_bytes(self._exactly(4), "little")
        return pb.StepReply.FromString(self._exactly(length))


def tls_channel(worker, certificates: SocketCertificates) -> TlsChannel:
    channel = TlsChannel(worker.shard, worker.offered)
    worker.channels.append(channel)
    context = certificates.worker().client_context()
    assert context
    channel.socket = context.wrap_socket(channel.socket, server_hostname="127.0.0.1")
    return channel


def test_a_client_written_with_other_tls_sockets_exchanges_a_step(certificates):
    with unharmed(*LARGE, doors=certificates.shard()) as (shard, model), worker_of(shard, BULK) as worker:
        assert worker.offered.tls
        channel = tls_channel(worker, certificates)
        assert channel.socket.version() == "TLSv1.3"
        assert channel.attach().WhichOneof("body") == "attached"
        channel.send(confirm=pb.Confirm())
        payload = flat(model.layout, *gradients(model, 1))
        message = framed(pb.StepRequest(push=header()).SerializeToString())
        channel.socket.sendall(message + payload)
        result = channel.receive().result
        assert result.outcome == pb.OUTCOME_APPLIED
        assert len(channel.payload(result.payload_bytes)) == len(payload)


def test_a_plain_client_is_told_that_the_socket_is_under_tls(certificates):
    with unharmed(doors=certificates.shard()) as (shard, _), worker_of(shard, BULK) as worker:
        channel = worker.connect()
        refused = from_detail(channel.attach().refused)
        assert isinstance(refused, Unauthenticated)
        assert "under TLS, and the peer speaks in clear" in str(refused)
        assert "--tls-ca" in refused.remedy
        assert channel.ended()
        # Its token has not been used.
        assert tls_channel(worker, certificates).attach().WhichOneof("body") == "attached"


def test_under_tls_a_token_is_needed_all_the_same(certificates):
    with unharmed(doors=certificates.shard()) as (shard, _), worker_of(shard, BULK) as worker:
        wrong, none = tls_channel(worker, certificates), tls_channel(worker, certificates)
        wrong.token = bytes(32)
        refused = from_detail(wrong.attach().refused)
        assert isinstance(refused, InvalidRequest)
        assert "token is wrong, used, or expired" in str(refused)
        none.send(confirm=pb.Confirm())
        assert "begins with Attach" in str(from_detail(none.receive().refused))
        assert tls_channel(worker, certificates).attach().WhichOneof("body") == "attached"


def test_tls_at_a_shard_without_it_is_refused(certificates):
    with unharmed() as (shard, _), worker_of(shard, BULK) as worker:
        channel = worker.connect()
        context = certificates.worker().client_context()
        assert context
        with pytest.raises(ssl.SSLError):
            context.wrap_socket(channel.socket, server_hostname="127.0.0.1")


def test_clients_that_stall_in_the_handshake_cost_nobody_else(certificates):
    """More of them than handshakes are computed at a time; one has sent a part of its first message."""
    with ExitStack() as stack:
        shard, _ = stack.enter_context(unharmed(doors=certificates.shard()))
        staller, worker = (stack.enter_context(worker_of(shard, BULK)) for _ in range(2))
        stalled = [staller.connect() for _ in range(8)]
        for number, channel in enumerate(stalled):
            channel.socket.sendall(b"\x16\x03\x01\x02\x00"[:number])
        channel = tls_channel(worker, certificates)
        assert channel.attach().WhichOneof("body") == "attached"
        channel.send(confirm=pb.Confirm())
        channel.send(push=header(skipped=True))
        assert channel.receive().result.outcome == pb.OUTCOME_SKIPPED


def test_a_flood_of_half_open_handshakes_leaves_no_traceback(certificates, caplog):
    """Some are shut out while their handshake waits for a thread."""
    few = SideChannelConfig(max_handshakes=3, token_seconds=60.0)
    with unharmed(doors=certificates.shard(), config=few) as (shard, _), worker_of(shard, BULK) as worker:
        hello = client_hello(certificates)
        flood = [worker.connect() for _ in range(60)]
        for number, channel in enumerate(flood):
            with suppress(ConnectionError):
                channel.socket.sendall(hello[: len(hello) // (1 + number % 3)])
        for channel in flood[:-3]:
            assert channel.ended()
        assert tls_channel(worker, certificates).attach().WhichOneof("body") == "attached"
    assert [record.getMessage() for record in caplog.records if record.exc_info] == []


def client_hello(certificates: SocketCertificates) -> bytes:
    context, said = certificates.worker().client_context(), ssl.MemoryBIO()
    assert context
    client = context.wrap_bio(ssl.MemoryBIO(), said, server_hostname="127.0.0.1")
    with suppress(ssl.SSLWantReadError):
        client.do_handshake()
    return said.read()


@pytest.mark.parametrize("begun", [b"", b"\x16", b"\x16\x03\x01\x02\x00\x01"], ids=["nothing", "a byte", "a part"])
def test_a_client_that_stalls_in_the_handshake_is_shut_out_in_time(certificates, begun):
    with unharmed(doors=certificates.shard(), config=HURRIED) as (shard, _), worker_of(shard, BULK) as worker:
        channel = worker.connect()
        channel.socket.sendall(begun)
        assert channel.ended()


# What workers do


@contextmanager
def goes_on_over_grpc(caplog, certificates, asked: str, why: str, *, shard=None, worker=None, config=None):
    """The worker cannot use ``asked``, says why in a warning, and trains over gRPC."""
    caplog.set_level(logging.INFO, "ps_worker")
    with unharmed(doors=shard, config=config) as (running, model):
        yield
        line = Line(running, model, asked, security=worker)
        try:
            assert line.transport == "grpc"
            assert line.exchange([None] * model.layout.parameter_slices).outcome == Outcome.APPLIED
        finally:
            line.close()
            line.release()
    told = [record for record in caplog.records if f"transport {asked} cannot be used" in record.getMessage()]
    assert [record.levelno for record in told] == [logging.WARNING]
    assert why in told[0].getMessage()


REFUSED = {
    "another authority": ({"by": OTHER}, {}, "certificate of shard 0"),
    "expired": ({"days": -1.0}, {}, "certificate has expired"),
    "another host": ({"hosts": ("elsewhere.example",)}, {}, "127.0.0.1"),
    "worker of another authority": ({"require_client": True}, {"by": OTHER}, "does not accept this side's certificate"),
    "worker's expired": ({"require_client": True}, {"days": -1.0}, "does not accept this side's certificate"),
}


@pytest.mark.parametrize(("shard", "worker", "why"), REFUSED.values(), ids=REFUSED)
def test_a_certificate_that_is_not_accepted_is_named(caplog, certificates, shard, worker, why):
    securities = {"shard": certificates.shard(**shard), "worker": certificates.worker(**worker)}
    with goes_on_over_grpc(caplog, certificates, "bulk", why, **securities):
        pass


def test_a_worker_without_a_certificate_is_refused_where_one_is_required(caplog, certificates):
    securities = {"shard": certificates.shard(require_client=True), "worker": certificates.anonymous()}
    with goes_on_over_grpc(caplog, certificates, "bulk", "does not accept", **securities):
        pass


def test_a_worker_that_knows_no_authority_says_so(caplog, certificates):
    with goes_on_over_grpc(caplog, certificates, "bulk", "knows no authority", shard=certificates.shard()):
        pass


def test_payloads_in_clear_take_the_word_of_both_sides(caplog, certificates):
    shard = certificates.shard(bulk=TOKEN_ONLY)
    with goes_on_over_grpc(caplog, certificates, "bulk", "in clear", shard=shard, worker=certificates.worker()):
        pass
    with unharmed(doors=shard) as (running, model):
        line = Line(running, model, "bulk", security=certificates.worker(bulk=TOKEN_ONLY))
        assert line.transport == "bulk"
        assert line.carrier.in_clear
        assert line.exchange([None] * model.layout.parameter_slices).outcome == Outcome.APPLIED
        line.close()
        line.release()


def test_a_token_is_for_the_socket_it_came_with():
    with unharmed() as (shard, _), worker_of(shard, SHM) as shared, worker_of(shard, BULK) as bulk:
        for worker, other in ((shared, bulk), (bulk, shared)):
            channel = worker.connect()
            channel.token = other.offered.token
            assert "on the socket it is for" in str(from_detail(channel.attach().refused))


# Shared memory


def test_the_socket_of_shared_memory_is_for_its_own_user_alone():
    with unharmed() as (shard, _), worker_of(shard, SHM) as worker:
        path = Path(worker.offered.name)
        assert path.stat().st_mode & 0o777 == 0o600
        assert path.parent.stat().st_mode & 0o777 == 0o700


def test_a_process_of_another_user_gets_no_memory(monkeypatch):
    with unharmed() as (shard, _), worker_of(shard, SHM) as worker:
        with monkeypatch.context() as another:
            another.setattr("ps_protocol.wire.unix_peer.peer_uid", lambda _: os.geteuid() + 1)
            channel = worker.connect()
            refused = from_detail(channel.attach().refused)
        assert isinstance(refused, PermissionDenied)
        assert refused.expected == f"user {os.geteuid()}"
        assert refused.actual == f"user {os.geteuid() + 1}"
        assert "--shm-uid" in refused.remedy
        assert channel.ended()
        assert worker.connect().attach().WhichOneof("body") == "attached"


def test_a_worker_takes_no_memory_from_a_process_of_another_user(caplog, certificates, monkeypatch):
    with goes_on_over_grpc(caplog, certificates, "shm", f"actual: user {os.geteuid() + 1}"):
        monkeypatch.setattr("ps_protocol.wire.bulk.check_peer", refusing)


def refusing(sock: socket.socket, shm_uid: int | None) -> None:
    raise PermissionDenied("another user", actual=f"user {os.geteuid() + 1}")


def test_a_socket_that_is_closed_to_the_worker_is_named(caplog, certificates, monkeypatch):
    def closed(self: socket.socket, address: object) -> None:
        raise PermissionError(13, "Permission denied")

    class Closed(socket.socket):
        connect = closed

    with goes_on_over_grpc(caplog, certificates, "shm", "--shm-uid", config=SideChannelConfig(ports=())):
        monkeypatch.setattr("ps_protocol.wire.bulk.socket.socket", Closed)


def test_a_worker_with_another_file_system_says_why_it_goes_over_bulk(caplog, monkeypatch):
    caplog.set_level(logging.INFO, "ps_worker")
    with unharmed() as (shard, model):
        monkeypatch.setattr("ps_protocol.wire.bulk.socket.socket", Elsewhere)
        line = Line(shard, model, "shm", "bulk")
        assert line.transport == "bulk"
        line.close()
        line.release()
    told = [record.getMessage() for record in caplog.records if "cannot be used" in record.getMessage()]
    assert len(told) == 1
    assert "transport shm cannot be used" in told[0]
    assert "separate file systems" in told[0]


class Elsewhere(socket.socket):
    """A socket in a container: paths of the shard's are not there."""

    def connect(self, address: object) -> None:
        if self.family == socket.AF_UNIX:
            raise FileNotFoundError(2, "No such file or directory")
        super().connect(address)  # type: ignore[arg-type]


CONNECTING = """
import os, socket, sys
os.setgid(int(sys.argv[1])); os.setuid(int(sys.argv[1]))
sock = socket.socket(socket.AF_UNIX)
sock.settimeout(60)
try:
    sock.connect(sys.argv[2])
    sock.sendall(bytes.fromhex(sys.argv[3]))
    print(sock.recv(4096).hex())
except PermissionError:
    print("no permission")
"""


def as_user(uid: int, channel: pb.SideChannel) -> str | pb.StepReply:
    """What a process of this user gets for the token."""
    data = framed(pb.StepRequest(attach=pb.Attach(token=channel.token)).SerializeToString())
    command = [sys.executable, "-c", CONNECTING, str(uid), channel.name, data.hex()]
    said = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout.strip()
    return said if "permission" in said else pb.StepReply.FromString(bytes.fromhex(said)[4:])


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be another user")
def test_another_user_is_let_in_by_its_number_alone(certificates):
    with unharmed() as (shard, _), worker_of(shard, SHM) as worker:
        assert as_user(NOBODY, worker.offered) == "no permission"
    lasting = SideChannelConfig(token_seconds=60.0)  # two interpreters start before the token is used
    doors = certificates.shard(shm_uid=NOBODY)
    with unharmed(doors=doors, config=lasting) as (shard, _), worker_of(shard, SHM) as worker:
        refused = as_user(NOBODY - 1, worker.offered)
        assert isinstance(refused, pb.StepReply)
        error = from_detail(refused.refused)
        assert isinstance(error, PermissionDenied)
        assert error.actual == f"user {NOBODY - 1}"
        assert error.expected == f"user 0 or {NOBODY}"
        welcome = as_user(NOBODY, worker.offered)
        assert isinstance(welcome, pb.StepReply)
        assert welcome.WhichOneof("body") == "attached"
