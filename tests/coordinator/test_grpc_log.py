"""Connections that fail their TLS handshake write nothing to stderr. Two processes with gRPC: 2 s of CPU."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.support.certificates import made_folder

SERVER = """
import ps_server, asyncio, socket, sys
from pathlib import Path
from ps_protocol.security.roles import AccessRole
from ps_protocol.security.security import Security
from ps_protocol.security.settings import SecuritySettings
from ps_server.serving import grpc_server
from ps_server.serving.authorization import Authorization

folder = Path(sys.argv[1])
files = SecuritySettings(
    tls_cert=folder / "shard-0.pem", tls_key=folder / "shard-0.key", tls_ca=folder / "ca.pem",
    token_file=folder / "tokens",
)

async def main():
    authorization = Authorization(Security(files, AccessRole.SERVER, listens=True))
    running = await grpc_server.start("127.0.0.1", 0, [], authorization=authorization)
    reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
    writer.write(b"GET / HTTP/1.1" + 64 * b" ")
    try:
        while await reader.read(4096):  # until the server has closed it
            pass
    except ConnectionResetError:
        pass
    await running.stop(0)
    print("done", flush=True)
    sys.stdin.read()

asyncio.run(main())
"""


@pytest.mark.parametrize("verbosity", [None, "INFO"])
def test_a_failed_handshake_is_written_where_the_user_asks_for_it_alone(tmp_path, verbosity):
    environment = {name: value for name, value in os.environ.items() if name != "GRPC_VERBOSITY"}
    folder = made_folder(tmp_path / "lab", 1)
    with subprocess.Popen(
        [sys.executable, "-c", SERVER, str(folder.path)],
        env=environment | ({"GRPC_VERBOSITY": verbosity} if verbosity else {}),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as server:
        log = ""
        while verbosity and "Handshake failed" not in log and (line := server.stderr.readline()):
            # A thread of gRPC writes it, after the connection was closed.
            log += line
        told, rest = server.communicate(timeout=60)
    assert told == "done\n", log + rest
    if verbosity:
        assert "Handshake failed" in log
    else:
        assert rest == ""
