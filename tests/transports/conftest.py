"""What every test of a transport runs with: the event loop of real shards, and a log without errors."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from tests.transports.support import TRANSPORTS, UvloopThread


@pytest.fixture
def loop(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What the shard of this test runs on: uvloop, as real ones do, unless the test names another."""
    kind = str(getattr(request, "param", "uvloop"))
    if kind == "uvloop":
        monkeypatch.setattr("tests.support.shards.LoopThread", UvloopThread)
    return kind


@pytest.fixture(autouse=True)
def _the_reason_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A side channel ends before its gRPC stream, which says why: on a busy machine that may take its time."""
    monkeypatch.setattr("ps_protocol.times.END_SECONDS", 60.0)


@pytest.fixture(params=list(TRANSPORTS))
def transport(request: pytest.FixtureRequest) -> str:
    """How the worker of this test asks to travel."""
    return str(request.param)


@pytest.fixture
def quiet(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """No error is logged: a stream that ends, however it ends, is no defect."""
    yield
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []
