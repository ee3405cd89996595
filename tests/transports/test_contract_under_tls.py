"""The contract of every transport, once more for bulk under TLS: nothing that it promises may depend on the carrier."""

from __future__ import annotations

import pytest

from tests.support.tls import SocketCertificates
from tests.transports.test_contract import *  # noqa: F403 -- the same tests, collected here again
from tests.transports.test_contract import pytestmark  # noqa: F401


@pytest.fixture(params=["bulk"])
def transport(request: pytest.FixtureRequest) -> str:
    """The one transport that TLS changes."""
    return str(request.param)


@pytest.fixture(autouse=True)
def _under_tls(tmp_path, monkeypatch) -> None:
    certificates = SocketCertificates(tmp_path, monkeypatch)
    monkeypatch.setattr("tests.support.shards.OFF", certificates.shard(require_client=True))
    monkeypatch.setattr("tests.transports.support.OFF", certificates.worker())
