"""Readers of this process receive bytes: over the network and as deltas, as they do on another host."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _other_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PS_TRANSPORT", "bulk")
