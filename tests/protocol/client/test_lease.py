"""How often a member sends heartbeats. In one process, costs nothing."""

from __future__ import annotations

import math
from typing import Any

import pytest

from ps_protocol.client.lease import MemberLease, pause_seconds
from ps_protocol.cluster.view import HeartbeatAnswer, Joined, Member, Role
from ps_protocol.errors import Fenced, Unavailable
from ps_protocol.security.security import OFF

JOINED = Joined(Member(Role.WORKER, 0, 1), 20.0, 1.0, 1, 0, 0)


@pytest.mark.parametrize(
    ("asked", "waits"),
    [(0.0, 1.0), (0.2, 1.0), (2.5, 2.5), (60.0, 5.0), (math.inf, 5.0), (math.nan, 1.0), (-1.0, 1.0)],
)
def test_the_pause_is_what_the_coordinator_asks_for_within_the_lease(asked: float, waits: float) -> None:
    assert pause_seconds(JOINED, HeartbeatAnswer(next_seconds=asked)) == waits


class Waits:
    """In the place of an event: remembers how long it was waited for, and never waits."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def wait(self, seconds: float) -> None:
        self.seconds.append(seconds)

    def clear(self) -> None:
        """Nothing is set."""


def test_a_heartbeat_without_an_answer_is_sent_again_as_often_as_at_the_start() -> None:
    answers: list[Any] = [
        HeartbeatAnswer(next_seconds=3.0),
        HeartbeatAnswer(next_seconds=4.0),
        Unavailable("nobody answers"),
        HeartbeatAnswer(b"mark", 4.0),
        Fenced("the end"),
    ]

    class Client:
        address = "host:1"
        security = OFF

        def heartbeat(self, *arguments: Any, **options: Any) -> HeartbeatAnswer:
            answer = answers.pop(0)
            if isinstance(answer, Exception):
                raise answer
            return answer

    lost: list[Fenced] = []
    lease = MemberLease(Client(), JOINED, lost.append)  # type: ignore[arg-type]
    waits = Waits()
    lease._beat_now = waits  # type: ignore[assignment]
    lease._renew()
    assert waits.seconds == [1.0, 3.0, 4.0, 1.0, 4.0]
    assert lease.journal_mark == b"mark"
    assert len(lost) == 1
