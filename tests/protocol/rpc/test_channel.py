"""Channels and servers are opened in one module, sockets in few: no other door is left open beside security."""

import ast
import os
import weakref
from contextlib import closing
from pathlib import Path
from unittest.mock import Mock

import pytest

import ps_protocol
import ps_server
import ps_worker
from ps_protocol.errors import InvalidRequest
from ps_protocol.rpc import channel
from ps_protocol.security.roles import AccessRole
from ps_protocol.security.security import OFF, Security
from tests.support.certificates import made_folder

OPENERS = {"insecure_channel", "secure_channel", "add_insecure_port", "add_secure_port"}
SERVERS = {"grpc.server", "grpc.aio.server"}
SOCKETS = {
    "create_connection",
    "create_server",
    "create_unix_connection",
    "create_unix_server",
    "open_connection",
    "open_unix_connection",
    "start_server",
    "start_unix_server",
    "HTTPServer",
    "ThreadingHTTPServer",
}
LIBRARIES = {"asyncio", "grpc", "http", "socket"}
ALLOWED = {
    # The one module for gRPC.
    "ps_protocol/rpc/channel.py": OPENERS | SERVERS,
    # Probes that send nothing: whether somebody listens, with which certificate, and whether a port is free.
    "ps_protocol/rpc/reach.py": {"socket.create_connection"},
    "ps_server/serving/grpc_server.py": {"socket.socket"},
    "ps_protocol/launch/ports.py": {"socket.socket"},
    # Asks for a route; nothing is sent or heard.
    "ps_server/cli/launcher/slurm/job.py": {"socket.socket"},
    # With TLS from the environment.
    "ps_server/health.py": {"socket.create_connection"},
    # Workers of one host meet in a folder of their user; the user of the other end is checked.
    "ps_worker/host/folder.py": {"socket.socket"},
    # Side channels: a one-time token that came over gRPC, and TLS.
    "ps_server/shard/transport": {"socket.socket"},
    "ps_worker/transport": {"socket.socket"},
    "ps_protocol/wire/bulk.py": {"socket.create_connection", "socket.socket"},
    # Take a Security.
    "ps_protocol/metrics/server.py": {"ThreadingHTTPServer"},
    "ps_server/page/server.py": {"socket.create_server"},
}
"""What modules, or those of folders, may open; everything else opens nothing."""


def opened_in(source: str) -> set[str]:
    """Which ways to open a connection or a listener ``source`` names."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Attribute(attr=name) if name in OPENERS | SOCKETS or ast.unparse(node) in SERVERS:
                found.add(ast.unparse(node))
            case ast.Call(func=ast.Attribute(value=ast.Name(id="socket"), attr="socket"), keywords=named):
                # A descriptor that exists already is no new door.
                if not any(each.arg == "fileno" for each in named):
                    found.add("socket.socket")
            case ast.ImportFrom(module=str(module), names=names) if module.split(".")[0] in LIBRARIES:
                known = OPENERS | SOCKETS | ({"server"} if module.split(".")[0] == "grpc" else set())
                known |= {"socket"} if module == "socket" else set()
                found |= {f"{module}.{each.name}" for each in names if each.name in known}
    return found


def allowed(module: str) -> set[str]:
    return set().union(*(what for where, what in ALLOWED.items() if module == where or module.startswith(f"{where}/")))


def test_no_other_module_opens_a_door() -> None:
    own = Path(channel.__file__)
    roots = [Path(package.__path__[0]) for package in (ps_protocol, ps_server, ps_worker)]
    files = {
        path.relative_to(root.parent).as_posix(): path
        for root in roots
        for path in root.rglob("*.py")
        if path.parent.name != "v1"
    }
    assert "ps_protocol/rpc/channel.py" in files
    assert opened_in(own.read_text()) >= {"grpc.insecure_channel", "grpc.aio.insecure_channel", "grpc.aio.server"}
    wrong = {
        module: left
        for module, path in files.items()
        if (left := {each for each in opened_in(path.read_text()) if not _among(each, allowed(module))})
    }
    assert wrong == {}


def _among(found: str, names: set[str]) -> bool:
    return found in names or found.rpartition(".")[2] in names


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import grpc\ngrpc.insecure_channel('a')", {"grpc.insecure_channel"}),
        ("from grpc import insecure_channel", {"grpc.insecure_channel"}),
        ("server.add_insecure_port('a')", {"server.add_insecure_port"}),
        ("import socket\nsocket.socket()", {"socket.socket"}),
        ("import socket\nsocket.socket(fileno=3)", set()),
        ("from socket import create_connection", {"socket.create_connection"}),
        ("await asyncio.start_server(f, 'a', 1)", {"asyncio.start_server"}),
        ("loop.create_server(f)", {"loop.create_server"}),
        ("from http.server import HTTPServer", {"http.server.HTTPServer"}),
        ("grpc.aio.server()", {"grpc.aio.server"}),
        ("x = socket.AF_INET", set()),
    ],
)
def test_doors_are_found(source: str, found: set[str]) -> None:
    assert opened_in(source) == found


def a_forked_child_may_connect() -> bool:
    if not (child := os.fork()):
        code = 2
        try:
            channel._counted = str  # none is opened
            channel.grpc = Mock()
            channel.open_channel("127.0.0.1:1")
            code = 0
        except InvalidRequest as error:
            code = 1 if "method spawn" in error.remedy else 3
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) in (0, 1)
    return status == 0


@pytest.mark.parametrize("secure", [False, True])
def test_a_forked_process_connects_only_where_its_parent_was_not_connected(secure, tmp_path, monkeypatch):
    monkeypatch.setattr(channel, "_open", weakref.WeakSet())
    security = OFF
    if secure:
        security = Security(made_folder(tmp_path / "lab").settings("reader", role=AccessRole.READER), AccessRole.READER)
    assert a_forked_child_may_connect()
    with closing(channel.open_channel("127.0.0.1:1", security)) as opened:
        assert not a_forked_child_may_connect()
    assert a_forked_child_may_connect()
    assert opened is not None  # a channel that is closed may be kept
    forgotten = channel.open_channel("127.0.0.1:1", security)
    assert not a_forked_child_may_connect()
    del forgotten
    assert a_forked_child_may_connect()
