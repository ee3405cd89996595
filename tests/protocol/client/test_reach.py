"""Why a process cannot be reached is found out, and said in four ways."""

import socket

import pytest

from ps_protocol.client.coordinator import CoordinatorClient
from ps_protocol.cluster.weights import FollowAsk
from ps_protocol.errors import Unavailable
from ps_protocol.launch.ports import free_port
from ps_protocol.rpc import reach
from ps_protocol.rpc.reach import UnknownHost, why_unreachable


@pytest.fixture
def silent():
    """Takes connections, and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"


def nobody(*_, **__):
    raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")


def test_a_name_that_nobody_knows(monkeypatch):
    monkeypatch.setattr(reach.socket, "create_connection", nobody)
    error = why_unreachable("the coordinator", "nohost:7000")
    assert isinstance(error, UnknownHost)
    assert "no host is known as 'nohost'" in str(error)


def test_a_port_where_nothing_listens():
    port = free_port()
    assert f"nothing listens on port {port}" in str(why_unreachable("the coordinator", f"127.0.0.1:{port}"))


@pytest.mark.parametrize(
    ("error", "says"),
    [(TimeoutError(), "no answer to the connection"), (OSError(113, "No route to host"), "No route to host")],
)
def test_a_host_that_is_not_there(monkeypatch, error, says):
    def fails(*_, **__):
        raise error

    monkeypatch.setattr(socket, "create_connection", fails)
    assert f"cannot be reached: {says}" in str(why_unreachable("the coordinator", "10.0.0.1:7000"))


def test_a_program_that_does_not_answer(silent):
    assert "takes connections and does not answer" in str(why_unreachable("the coordinator", silent))


def test_an_address_that_is_none():
    assert "it has no port" in str(why_unreachable("the coordinator", "foo"))


def test_who_waits_for_a_coordinator_is_told_why_once_and_without_a_chain(silent):
    with (
        CoordinatorClient(silent) as client,
        pytest.raises(Unavailable, match=r"did not answer within 0\.1 s") as caught,
    ):
        client.wait_until_reachable(0.1)
    assert "takes connections and does not answer" in str(caught.value)
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__


class ToldError(Exception):
    """Ends the wait of who is told something."""


def told(text):
    raise ToldError(text)


def test_who_waits_is_told_why_while_it_waits(monkeypatch):
    monkeypatch.setattr("ps_protocol.times.HINT_SECONDS", 0.05)
    with (
        CoordinatorClient(f"127.0.0.1:{free_port()}") as client,
        pytest.raises(ToldError, match="nothing listens on port"),
    ):
        client.wait_until_reachable(60.0, told)


def test_a_reader_that_waits_for_its_coordinator_is_told_why(monkeypatch):
    monkeypatch.setattr("ps_protocol.times.HINT_SECONDS", 0.05)
    ask = FollowAsk("policy", 0, 0, "me")
    for error, seconds in ((ToldError, 60.0), (Unavailable, 0.4)):
        with (
            CoordinatorClient(f"127.0.0.1:{free_port()}") as client,
            pytest.raises(error, match="nothing listens on port"),
        ):
            client.follow_weights(ask, 0.0, seconds, told if error is ToldError else lambda text: None, is_first=True)


def test_a_command_connects_at_once_or_says_why(monkeypatch, silent):
    with CoordinatorClient(silent) as client, pytest.raises(Unavailable, match="takes connections"):
        client.connect(0.1)
    with CoordinatorClient(f"127.0.0.1:{free_port()}") as client, pytest.raises(Unavailable, match="nothing listens"):
        client.connect(0.1)
    for name in ("getaddrinfo", "create_connection"):
        monkeypatch.setattr(reach.socket, name, nobody)
    with CoordinatorClient("nohost.invalid:7000") as client, pytest.raises(UnknownHost):
        client.connect(3600)
