"""The processes and clusters of the tests of recovery, and pairs of shards."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pytest

from tests.recovery.cluster import LEASE_SECONDS
from tests.recovery.conftest import launch  # noqa: F401
from tests.shard.standby.pair import Pair


@pytest.fixture
def pair(launch) -> Iterator[Callable[..., Pair]]:  # noqa: F811
    """``pair(*options)``: a running cluster whose shard 0 has a standby."""

    def start(*options: str, first: Sequence[str] = (), lease_seconds: float = LEASE_SECONDS) -> Pair:
        made = Pair(launch(start=False, lease_seconds=lease_seconds), options, first)
        made.start()
        return made

    return start
