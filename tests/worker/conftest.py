"""A session of two fake shards."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.worker.fakes import FakeSession, job


@pytest.fixture
def session() -> Iterator[FakeSession]:
    with job(shards=2) as session:
        yield session
