"""Channels and servers are opened in one module: what it sets, and later TLS, holds for every connection."""

import ast
from pathlib import Path

import ps_protocol
import ps_server
import ps_worker
from ps_protocol.rpc import channel

OPENERS = {"insecure_channel", "secure_channel", "add_insecure_port", "add_secure_port"}
SERVERS = {"grpc.server", "grpc.aio.server"}


def opened_in(source: str) -> set[str]:
    """Which of gRPC's ways to open a connection ``source`` names."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Attribute(attr=name) if name in OPENERS or ast.unparse(node) in SERVERS:
                found.add(ast.unparse(node))
            case ast.ImportFrom(module=str(module), names=names) if module.split(".")[0] == "grpc":
                found |= {f"{module}.{each.name}" for each in names if each.name in OPENERS | {"server"}}
    return found


def test_no_other_module_opens_a_channel_or_a_server() -> None:
    own = Path(channel.__file__)
    roots = [Path(package.__path__[0]) for package in (ps_protocol, ps_server, ps_worker)]
    files = {path for root in roots for path in root.rglob("*.py") if path.parent.name != "v1"}
    assert own in files
    assert opened_in(own.read_text()) >= {"grpc.insecure_channel", "grpc.aio.insecure_channel", "grpc.aio.server"}
    assert {str(path): found for path in files - {own} if (found := opened_in(path.read_text()))} == {}
