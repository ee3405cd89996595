"""What a reader of a job's network sees: nothing of parameters and gradients under TLS, all of them without.

The values are known, so that they can be looked for, and the job without TLS shows that they would be found.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from ps_protocol.security.roles import AccessRole
from ps_protocol.security.settings import BulkSecurity, SecuritySettings
from tests.end_to_end.captured_job import GRADIENT, NO_NETWORK, PARAMETER, REPEATED, STEPS
from tests.support.certificates import made_folder
from tests.support.interpreters import run
from tests.support.length import choose

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to read what goes over a device")

EACH_WAY = REPEATED * PARAMETER.nbytes

TRANSPORTS = choose(["grpc", "bulk"], ["bulk"])


def captured(
    folder: Path, transport: str, servers: Mapping[str, str], worker: Mapping[str, str], clear: str = ""
) -> bytes:
    """Every byte of a job's network; ``clear``: what the worker says of the transport besides its name."""
    for who, variables in (("servers", servers), ("worker", worker)):
        (folder / f"{who}.json").write_text(json.dumps(dict(variables)))
    ran = run("-m", "tests.end_to_end.captured_job", str(folder), transport, seconds=170.0)
    if ran.returncode == NO_NETWORK:
        pytest.skip("needs a kernel that lets root make networks")
    assert ran.returncode == 0, ran.stderr[-5000:]
    assert f"steps use transport {transport}{clear} (" in ran.stderr, ran.stderr[-5000:]
    assert (folder / "lost").read_text() == "0"
    return (folder / "capture").read_bytes()


def found(seen: bytes) -> tuple[bool, bool]:
    """Whether parameters, and gradients, were seen."""
    return PARAMETER.numpy().tobytes() in seen, GRADIENT.numpy().tobytes() in seen


def tls(folder: Path, **changes: object) -> tuple[SecuritySettings, SecuritySettings]:
    made = made_folder(folder / "certs", 1)
    servers = made.settings("shard-0", require_client=False)
    worker = made.settings("worker", role=AccessRole.WORKER)
    return servers.with_given(**changes), worker.with_given(**changes)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_without_tls_everything_is_seen(tmp_path, transport):
    assert found(captured(tmp_path, transport, {}, {})) == (True, True)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_under_tls_neither_parameters_nor_gradients_are_seen(tmp_path, transport):
    servers, worker = tls(tmp_path)
    seen = captured(tmp_path, transport, servers.environment, worker.environment)
    assert found(seen) == (False, False)
    # It did go over this network.
    assert len(seen) > 2 * STEPS * EACH_WAY


def test_token_only_says_what_it_is(tmp_path):
    servers, worker = tls(tmp_path, bulk=BulkSecurity.TOKEN_ONLY)
    seen = captured(tmp_path, "bulk", servers.environment, worker.environment, " in clear")
    assert found(seen) == (True, True)
    # What admits to the job is not among it.
    for line in (tmp_path / "certs" / "tokens").read_text().split():
        assert line.rpartition(":")[2].encode() not in seen
