"""Short limits, for most tests here wait for one."""

from __future__ import annotations

import pytest

from ps_protocol.wire.carrier import PlainCarrier
from ps_protocol.wire.socket_messages import prepare


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ps_protocol.times.END_SECONDS", 0.1)
    monkeypatch.setattr(PlainCarrier, "prepare", lambda self, seconds=0.3: prepare(self.socket, seconds))
