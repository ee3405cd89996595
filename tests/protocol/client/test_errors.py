import grpc
import pytest

from ps_protocol import errors
from ps_protocol.errors import ERROR_TRAILER, PsError
from ps_protocol.rpc.client_errors import translate
from ps_protocol.wire.convert.errors import by_code, to_detail


class Failed(grpc.RpcError):
    """A failed call, as gRPC's own errors look."""

    def __init__(self, status: grpc.StatusCode, details: str = "", trailer: object = None) -> None:
        self._status, self._details, self._trailer = status, details, trailer

    def code(self) -> grpc.StatusCode:
        return self._status

    def details(self) -> str:
        return self._details

    def trailing_metadata(self) -> object:
        return ((ERROR_TRAILER, self._trailer),) if self._trailer is not None else None


@pytest.mark.parametrize("kind", by_code.values())
def test_the_trailer_alone_decides_the_type(kind: type[PsError]) -> None:
    sent = kind("what", variable="v", shard="1", expected="e", actual="a", remedy="r")
    error = translate(Failed(grpc.StatusCode.UNAVAILABLE, "text", to_detail(sent).SerializeToString()))
    assert type(error) is kind
    assert str(error) == str(sent)


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (grpc.StatusCode.UNAVAILABLE, errors.Unavailable),
        (grpc.StatusCode.DEADLINE_EXCEEDED, errors.Unavailable),
        (grpc.StatusCode.CANCELLED, errors.Unavailable),
        (grpc.StatusCode.UNIMPLEMENTED, errors.ProtocolVersionMismatch),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, errors.InvalidRequest),
    ],
)
def test_without_a_trailer_the_status_decides_and_the_peer_is_named(
    status: grpc.StatusCode, kind: type[PsError]
) -> None:
    error = translate(Failed(status, "the text"), "shard 3 at host:1")
    assert type(error) is kind
    assert "shard 3 at host:1" in error.message
    assert "the text" in error.message
    assert error.remedy


@pytest.mark.parametrize(
    ("status", "text"),
    [
        (grpc.StatusCode.UNKNOWN, "Stream removed"),
        (grpc.StatusCode.INTERNAL, "Received RST_STREAM with error code 2"),
    ],
)
def test_a_stream_that_the_end_of_its_server_has_broken_may_be_tried_again(status: grpc.StatusCode, text: str) -> None:
    assert type(translate(Failed(status, text), "shard 3")) is errors.Unavailable
    assert type(translate(Failed(status, "a defect"), "shard 3")) is errors.InternalError


@pytest.mark.parametrize("trailer", [b"\xff\xff\xff", "text"])
def test_a_trailer_that_cannot_be_read_is_as_none(trailer: object) -> None:
    assert type(translate(Failed(grpc.StatusCode.UNAVAILABLE, "", trailer))) is errors.Unavailable


def test_an_error_that_is_not_of_a_call_is_internal() -> None:
    assert type(translate(grpc.RpcError("odd"))) is errors.InternalError


@pytest.mark.parametrize(
    "text", ["DNS resolution failed for host1:7001: …", "errors resolving host1:7001: [… not found]"]
)
def test_a_name_that_is_not_known_here_has_the_remedy_for_that(text: str) -> None:
    error = translate(Failed(grpc.StatusCode.UNAVAILABLE, text), "shard 0")
    assert "--advertise ADDRESS:PORT" in error.remedy
    assert "--advertise" not in translate(Failed(grpc.StatusCode.UNAVAILABLE, "Connection refused"), "shard 0").remedy
