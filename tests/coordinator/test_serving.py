import asyncio
import logging
import os
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from ps_protocol import errors
from ps_protocol.errors import ConfigError, PsError
from ps_protocol.launch.ports import free_port
from ps_protocol.rpc.channel import open_channel
from ps_protocol.rpc.client_errors import translate
from ps_protocol.security.roles import AccessRole
from ps_protocol.security.security import Security
from ps_protocol.security.settings import SecuritySettings
from ps_protocol.v1 import common_pb2
from ps_protocol.wire.convert.errors import by_code, to_detail
from ps_server.serving import grpc_server
from ps_server.serving.authorization import Authorization
from ps_server.serving.rpc_errors import STATUS, trailer, translated
from tests.support.loops import LoopThread

FAILURES = {
    "typed": errors.UnknownShard("no shard 7", shard="7", expected="0 to 1", actual="7", remedy="use 0 or 1"),
    "defect": KeyError("oops"),
    "long": errors.ModelMismatch(
        "ф" * 100_000, **dict.fromkeys(("remedy", "expected", "actual", "variable", "shard"), "р" * 100_000)
    ),
}


class Failing(grpc.GenericRpcHandler):
    """Calls named as FAILURES, each as unary and as stream; they fail in the way of the name."""

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        kind, name = details.method.rsplit("/", 1)[1].split("_")

        async def unary(request: bytes, context: Any) -> bytes:
            async with translated(context):
                raise FAILURES[name]

        async def stream(request: bytes, context: Any) -> AsyncIterator[bytes]:
            async with translated(context):
                yield b"first"
                raise FAILURES[name]

        if kind == "unary":
            return grpc.unary_unary_rpc_method_handler(unary)
        return grpc.unary_stream_rpc_method_handler(stream)


def outcome(address: str, method: str) -> PsError:
    """What the client's translation makes of a failing call."""
    with open_channel(address) as channel:
        unary, stream = channel.unary_unary(f"/test.Failing/{method}"), channel.unary_stream(f"/test.Failing/{method}")
        with pytest.raises(grpc.RpcError) as caught:
            unary(b"", timeout=60) if method.startswith("unary") else list(stream(b"", timeout=60))
        return translate(caught.value, "the test server")


@pytest.fixture(scope="module")
def failing() -> Any:
    with LoopThread() as loop:
        register = ("test.Failing", lambda server: server.add_generic_rpc_handlers((Failing(),)))
        server = loop.run(grpc_server.start("127.0.0.1", 0, [register]))
        yield server.address
        loop.run(server.stop(0))


@pytest.mark.parametrize("kind", ["unary", "stream"])
def test_a_typed_error_keeps_type_and_fields_on_its_way_to_the_client(failing: str, kind: str) -> None:
    error = outcome(failing, f"{kind}_typed")
    assert type(error) is errors.UnknownShard
    assert str(error) == str(FAILURES["typed"])


@pytest.mark.parametrize("kind", ["unary", "stream"])
def test_a_defect_becomes_an_internal_error_and_leaves_a_traceback_in_the_log(
    failing: str, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    error = outcome(failing, f"{kind}_defect")
    assert type(error) is errors.InternalError
    assert "KeyError" in error.message
    assert any(record.exc_info for record in caplog.records if record.levelno == logging.ERROR)


@pytest.mark.parametrize("kind", ["unary", "stream"])
def test_an_error_with_very_long_texts_still_arrives_typed(failing: str, kind: str) -> None:
    error = outcome(failing, f"{kind}_long")
    assert type(error) is errors.ModelMismatch
    assert error.message.startswith("фф")
    assert error.remedy.startswith("рр")


def test_every_error_code_has_a_status() -> None:
    codes = set(common_pb2.ErrorCode.values()) - {common_pb2.ERROR_CODE_UNSPECIFIED}
    assert set(STATUS) == codes == set(by_code)
    assert grpc.StatusCode.OK not in STATUS.values()


def test_a_trailer_stays_far_below_what_grpc_drops() -> None:
    assert len(trailer(FAILURES["long"])) < 5000


def test_a_short_error_is_not_cut() -> None:
    error = errors.InvalidRequest("m", variable="v", shard="s", expected="e", actual="a", remedy="r")
    assert trailer(error) == to_detail(error).SerializeToString()


def test_a_port_in_use_names_address_and_remedy() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"127.0.0.1:{port}: Address already in use.*--port"):
            asyncio.run(grpc_server.start("127.0.0.1", port, []))


def test_an_address_of_another_machine_names_bind_as_the_remedy() -> None:
    with pytest.raises(ConfigError, match=r"192\.0\.2\.1:0.*--bind"):
        asyncio.run(grpc_server.start("192.0.2.1", 0, []))


def test_a_server_can_start_again_on_the_port_it_left() -> None:
    async def twice() -> None:
        # Nobody gets this port in between.
        first = await grpc_server.start("127.0.0.1", free_port(), [])
        await first.stop(0)
        second = await grpc_server.start("127.0.0.1", first.port, [])
        assert second.address == first.address
        await second.stop(0)

    asyncio.run(twice())


def test_a_stopping_server_reports_not_serving_until_its_calls_have_ended() -> None:
    with LoopThread() as loop:
        server = loop.run(grpc_server.start("127.0.0.1", 0, []))
        with open_channel(server.address) as channel:
            watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
            assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
            stopping = asyncio.run_coroutine_threadsafe(server.stop(10.0), loop.loop)
            assert next(watch).status == health_pb2.HealthCheckResponse.NOT_SERVING
            watch.cancel()
            stopping.result(60)


def test_the_address_of_a_wildcard_server_is_one_that_can_be_dialled() -> None:
    async def address() -> str:
        trusting = Authorization(Security(SecuritySettings(insecure=True), AccessRole.SERVER))
        server = await grpc_server.start("0.0.0.0", 0, [], authorization=trusting)
        await server.stop(0)
        return server.address

    assert asyncio.run(address()).split(":")[0] == socket.gethostname()


def test_the_ready_file_holds_the_address_and_nothing_else_remains(tmp_path: Path) -> None:
    grpc_server.write_ready_file(tmp_path / "ready", "127.0.0.1:7000")
    assert [(f.name, f.read_text()) for f in tmp_path.iterdir()] == [("ready", "127.0.0.1:7000\n")]


def test_the_ready_file_may_be_a_pipe_which_is_written_to_more_than_once() -> None:
    readable, writable = os.pipe()
    with os.fdopen(readable) as told, os.fdopen(writable, "w"):
        for address in ("127.0.0.1:7000", "127.0.0.1:7001"):
            grpc_server.write_ready_file(Path(f"/dev/fd/{writable}"), address)
            assert told.readline() == f"{address}\n"


def test_a_pipe_that_nobody_reads_is_an_error_and_no_wait(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "ready")
    with pytest.raises(ConfigError, match=r"ready cannot be written.* a pipe that is read"):
        grpc_server.write_ready_file(tmp_path / "ready", "127.0.0.1:7000")


def test_a_pipe_whose_reader_has_gone_is_an_error_with_a_text() -> None:
    readable, writable = os.pipe()
    os.close(readable)
    with os.fdopen(writable, "w"), pytest.raises(ConfigError, match="Broken pipe"):
        grpc_server.write_ready_file(Path(f"/dev/fd/{writable}"), "127.0.0.1:7000")


def test_an_error_for_a_caller_that_has_gone_ends_quietly():
    class Gone:
        async def abort(self, *told):
            raise grpc.aio.InternalError("the call has ended")

    async def handler():
        async with translated(Gone()):
            raise errors.ModelMoved("slices have moved")

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(handler())


def test_a_message_for_a_caller_that_has_gone_ends_quietly(caplog):
    async def handler():
        async with translated(None):
            raise grpc.aio.InternalError("the call has ended")

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(handler())
    assert not caplog.records
