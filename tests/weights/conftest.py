"""Readers of this process receive bytes: over the network and as deltas, as they do on another host."""

from __future__ import annotations

import pytest

from ps_protocol import times
from ps_protocol.weights import pieces


@pytest.fixture(autouse=True)
def _other_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PS_TRANSPORT", "bulk")


@pytest.fixture(autouse=True)
def _side_channels_take_their_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine; tests say over which transport a reader goes."""
    monkeypatch.setattr(pieces, "SIDE_CHANNEL_SECONDS", 60.0)


@pytest.fixture
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that comes with a cache, or leaves, waits for an answer however busy the machine is."""
    monkeypatch.setattr(times, "BRIEF_CALL_SECONDS", 60.0)
