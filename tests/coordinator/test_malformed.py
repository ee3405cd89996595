"""Bytes that are no message, sent to every method of a real coordinator: one typed error each, and a readable log."""

import logging
from collections.abc import Iterator

import grpc
import pytest

from ps_protocol.client.coordinator import CoordinatorClient
from ps_protocol.cluster.view import JoinRequest, MemberStats, Role
from ps_protocol.errors import InvalidRequest, PsError
from ps_protocol.rpc.channel import open_channel
from ps_protocol.rpc.client_errors import translate
from ps_protocol.v1 import coordinator_pb2 as pb
from ps_server.coordinator.settings import ClusterSettings
from ps_server.serving.log_limit import LogLimit
from tests.support.coordinators import connected

SERVICE = pb.DESCRIPTOR.services_by_name["Coordinator"]
METHODS = {method.name: method.server_streaming for method in SERVICE.methods}
#: A length-delimited field longer than the message; text that is not UTF-8 where there is any; a group that never ends.
NONSENSE = (b"\x0a\xff\x01", b"\xff" * 11, b"\x0b\x0b\x0b")


@pytest.fixture
def client() -> Iterator[CoordinatorClient]:
    with connected(ClusterSettings(lease_seconds=60.0)) as client:
        yield client


def refusal(channel: grpc.Channel, method: str, data: bytes) -> PsError:
    path = f"/{SERVICE.full_name}/{method}"
    call = channel.unary_stream(path) if METHODS[method] else channel.unary_unary(path)
    with pytest.raises(grpc.RpcError) as caught:
        list(call(data, timeout=60))
    return translate(caught.value)


def test_bytes_that_are_no_message_get_one_typed_error_and_no_traceback(
    client: CoordinatorClient, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A period that another test of this process began would end in the middle, and a second one begin.
    (limit,) = logging.getLogger("ps_server.serving.malformed").filters
    monkeypatch.setattr(limit, "_periods", {})
    member = client.join(JoinRequest(Role.WORKER), "a").member
    caplog.set_level(logging.INFO)
    caplog.clear()
    with open_channel(client.address) as channel:
        for _ in range(3):
            for method in METHODS:
                for data in NONSENSE:
                    error = refusal(channel, method, data)
                    assert type(error) is InvalidRequest
                    assert method in error.message
    client.heartbeat(member, MemberStats())
    assert not [record for record in caplog.records if record.exc_info]
    assert len([record for record in caplog.records if record.levelno >= logging.WARNING]) <= 10


def test_the_health_service_and_reflection_refuse_nonsense_as_well(client: CoordinatorClient) -> None:
    with open_channel(client.address) as channel, pytest.raises(grpc.RpcError) as caught:
        channel.unary_unary("/grpc.health.v1.Health/Check")(b"\x0a\xff", timeout=60)
    assert type(translate(caught.value)) is InvalidRequest


def test_a_log_says_a_few_of_a_kind_then_how_many_it_left_out() -> None:
    now = 0.0
    limit = LogLimit(burst=2, period_seconds=10.0, clock=lambda: now)

    def said(text: str, *arguments: object) -> str:
        record = logging.LogRecord("x", logging.WARNING, "", 0, text, arguments, None)
        return record.getMessage() if limit.filter(record) else ""

    assert said("bad %s", 1) == "bad 1"
    assert said("bad %s", 2) == "bad 2 (more like this are left out for up to 10 s)"
    assert [said("bad %s", number) for number in range(5)] == [""] * 5
    assert said("other") == "other"
    now = 11.0
    assert said("bad %s", 3) == "bad 3 (and 5 more like this before)"
    assert said("bad %s", 4) == "bad 4 (more like this are left out for up to 10 s)"
