"""The health program against a real server."""

import pytest
from click.testing import CliRunner

from ps_protocol.errors import Unavailable
from ps_server import health, serving
from tests.support.loops import LoopThread

SERVICE = "some.Service"


@pytest.fixture
def server():
    with LoopThread() as loop:
        running = loop.run(serving.start("127.0.0.1", 0, [(SERVICE, lambda server: None)]))
        yield running, lambda: loop.run(running.stop(0))
        loop.run(running.stop(0))


def exit_of(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(health.main, arguments)
    return done.exit_code, done.output


def test_a_serving_server_is_healthy_as_a_whole_and_by_service(server):
    running, _ = server
    assert exit_of(running.address) == (0, "")
    assert exit_of(running.address, SERVICE) == (0, "")


def test_a_service_that_is_not_there_is_named(server):
    running, _ = server
    code, output = exit_of(running.address, "other.Service")
    assert (code, output) == (1, f"Error: {running.address} has no service other.Service\n")


def test_a_server_that_has_stopped_is_not_healthy(server):
    running, stop = server
    stop()
    code, output = exit_of(running.address)
    assert code == 1
    assert f"{running.address} does not answer" in output


def test_a_server_that_is_about_to_stop_is_not_healthy(server):
    running, _ = server
    with LoopThread() as loop:

        async def draining() -> serving.RunningServer:
            other = await serving.start("127.0.0.1", 0, [])
            await other._health.enter_graceful_shutdown()
            return other

        other = loop.run(draining())
        with pytest.raises(Unavailable, match="NOT_SERVING"):
            health.check(other.address)
        loop.run(other.stop(0))
    health.check(running.address)
