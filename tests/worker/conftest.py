"""A session of two fake shards."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.worker.fakes import FakeSession, job


@pytest.fixture(autouse=True)
def _brief_calls_are_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker goes on without such an answer: on a busy machine a report that a test counts on would be given up."""
    for module in ("ps_protocol.times", "ps_worker.data.leased_loader", "ps_worker.session.session"):
        monkeypatch.setattr(f"{module}.BRIEF_CALL_SECONDS", 20.0)


@pytest.fixture
def session() -> Iterator[FakeSession]:
    with job(shards=2) as session:
        yield session
