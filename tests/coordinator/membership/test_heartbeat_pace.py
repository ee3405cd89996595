"""More members send fewer heartbeats each, within their leases. Pure, costs nothing."""

from __future__ import annotations

import pytest

from ps_protocol.times import BEATS_PER_LEASE
from ps_server.coordinator.membership.state import BEATS_PER_SECOND, next_heartbeat_seconds
from tests.coordinator.cluster import Cluster


@pytest.mark.parametrize("members", [0, 1, 299, 300])
def test_up_to_three_hundred_members_beat_as_often_as_configured(members: int) -> None:
    assert next_heartbeat_seconds(members, 1.0, 20.0) == 1.0


def test_more_members_send_as_many_in_all() -> None:
    assert 900 / next_heartbeat_seconds(900, 1.0, 20.0) == BEATS_PER_SECOND


def test_a_lease_bounds_the_pause() -> None:
    assert next_heartbeat_seconds(1_000_000, 1.0, 20.0) == 20.0 / BEATS_PER_LEASE


def test_a_pause_that_was_configured_is_never_shortened() -> None:
    assert next_heartbeat_seconds(1_000_000, 5.0, 6.0) == 5.0


def test_the_pause_follows_the_number_of_members(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ps_server.coordinator.membership.state.BEATS_PER_SECOND", 0.5)
    c = Cluster(lease_seconds=60.0)
    members = [c.worker() for _ in range(3)]
    assert c.state.membership.heartbeat_seconds == 6.0
    c.leave(members[0])
    assert c.state.membership.heartbeat_seconds == 4.0
