"""The health program against a real server."""

import socket
import subprocess
import sys
import threading
from functools import partial

import pytest

from ps_server import health
from ps_server.serving import grpc_server
from tests.support.certificates import made_folder
from tests.support.loops import LoopThread
from tests.worker.jobs import running_job

SERVICE = "some.Service"


@pytest.fixture(autouse=True)
def _patient(monkeypatch):
    """A server that is kept waiting by a busy machine answers all the same."""
    monkeypatch.setattr(health, "check", partial(health.check, timeout_seconds=60.0))


@pytest.fixture
def server():
    with LoopThread() as loop:
        running = loop.run(grpc_server.start("127.0.0.1", 0, [(SERVICE, lambda server: None)]))
        yield running, lambda: loop.run(running.stop(0))
        loop.run(running.stop(0))


@pytest.fixture
def exit_of(capsys):
    """Exit code and output of the program."""

    def exit_of(*arguments: str) -> tuple[int, str]:
        code = health.main(list(arguments))
        said = capsys.readouterr()
        return code, said.out + said.err

    return exit_of


@pytest.fixture
def answering():
    """``answering(bytes)``: the address of something that answers with them, once, and hangs up."""
    threads = []

    def answering(data: bytes) -> str:
        listener = socket.create_server(("127.0.0.1", 0))

        def answer() -> None:
            with listener, listener.accept()[0] as connection:
                connection.recv(1 << 16)
                connection.sendall(data)

        threads.append(threading.Thread(target=answer))
        threads[-1].start()
        return f"127.0.0.1:{listener.getsockname()[1]}"

    yield answering
    for thread in threads:
        thread.join()


def test_a_serving_server_is_healthy_as_a_whole_and_by_service(server, exit_of):
    running, _ = server
    assert exit_of(running.address) == (0, "")
    assert exit_of(running.address, SERVICE) == (0, "")


def test_a_service_that_is_not_there_is_named(server, exit_of):
    running, _ = server
    code, output = exit_of(running.address, "other.Service")
    assert (code, output) == (1, f"Error: {running.address} has no service other.Service\n")


def test_a_server_that_has_stopped_is_not_healthy(server, exit_of):
    running, stop = server
    stop()
    code, output = exit_of(running.address)
    assert code == 1
    assert f"{running.address} does not answer" in output


def test_a_server_that_is_about_to_stop_is_not_healthy(server):
    running, _ = server
    with LoopThread() as loop:

        async def draining() -> grpc_server.RunningServer:
            other = await grpc_server.start("127.0.0.1", 0, [])
            await other._health.enter_graceful_shutdown()
            return other

        other = loop.run(draining())
        with pytest.raises(health.NotServing, match="NOT_SERVING"):
            health.check(other.address)
        loop.run(other.stop(0))
    health.check(running.address)


@pytest.mark.parametrize(
    "answer",
    [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\x00\x00", b"\x00\x00\x08\x07\x00" + bytes(12), b"\xff" * 20],
    ids=["hangs up", "HTTP/1", "cut short", "goes away", "too long"],
)
def test_what_is_no_grpc_server_is_not_healthy(answering, answer, exit_of):
    code, output = exit_of(answering(answer))
    assert code == 1
    assert output.endswith("does not answer as a gRPC server\n")


def test_a_message_that_is_no_state_is_not_healthy(answering, exit_of):
    assert exit_of(answering(b"\x00\x00\x05\x00\x01" + bytes(4) + bytes(5)))[1].endswith(" is UNKNOWN\n")


def test_a_server_without_the_service_is_not_healthy(answering, exit_of):
    assert exit_of(answering(b"\x00\x00\x00\x01\x05" + bytes(4)))[1].endswith(" has no health service\n")


@pytest.mark.parametrize("address", ["foo", "foo:x"])
def test_an_address_that_is_none_is_named(address, exit_of):
    assert exit_of(address) == (1, f"Error: '{address}' is not host:port\n")


def test_a_silent_server_is_given_up():
    with socket.create_server(("127.0.0.1", 0)) as listener, pytest.raises(health.NotServing, match="timed out"):
        health.check(f"127.0.0.1:{listener.getsockname()[1]}", timeout_seconds=0.05)


def test_a_name_that_no_service_can_have_is_refused(server):
    with pytest.raises(health.NotServing, match="so long a name"):
        health.check(server[0].address, "x" * 128)


def test_help_and_wrong_use(exit_of):
    assert exit_of("--help") == (0, health.USAGE + "\n")
    assert exit_of() == (2, health.USAGE + "\n")


def test_it_loads_nothing_but_the_standard_library():
    loads = "import sys, ps_server.health; print([name for name in sys.modules if name in ('grpc', 'click', 'google')])"
    assert subprocess.check_output([sys.executable, "-c", loads], text=True) == "[]\n"


def test_a_server_with_tls_is_asked_over_tls(tmp_path, monkeypatch):
    folder = made_folder(tmp_path / "lab", 1)
    with running_job(shards=0, workers=0, lab=folder) as job:
        with pytest.raises(health.NotServing):
            health.check(job.address)
        certificate, key = folder.pair("viewer")
        monkeypatch.setenv("PS_TLS_CA", str(folder.authority_file))
        with pytest.raises(health.NotServing):
            health.check(job.address)
        monkeypatch.setenv("PS_TLS_CERT", str(certificate))
        monkeypatch.setenv("PS_TLS_KEY", str(key))
        health.check(job.address)
