"""How long an attempt is repeated, and what is raised at the end of that time."""

from __future__ import annotations

from itertools import accumulate, repeat

import pytest

from ps_protocol.errors import NotReady, PsError, StorageFull, Unavailable
from ps_protocol.retry import Attempts, Retry
from tests.worker.fakes import job
from tests.worker.step.stepping import Worker

AWAY = Unavailable("away")


class Clock:
    """Stands still unless it is set."""

    now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("ps_protocol.retry.time", clock)
    return clock


def test_pauses_double_up_to_the_longest() -> None:
    retry = Retry(0.5, 3.0)
    pauses = accumulate(repeat(None, 5), lambda pause, _: retry.after(pause), initial=0.0)
    assert list(pauses) == [0.0, 0.5, 1.0, 2.0, 3.0, 3.0]


def test_the_last_pause_ends_with_the_time(clock: Clock) -> None:
    attempts = Attempts(Retry(1.0, 8.0).within(4.0))
    assert attempts.pause_after(AWAY) == 1.0
    clock.now += 3.0
    assert attempts.pause_after(AWAY) == 1.0
    clock.now += 1.0
    assert attempts.left_seconds == 0.0
    assert attempts.pause_after(AWAY) is None


def test_the_time_begins_again_when_progress_is_reported(clock: Clock) -> None:
    attempts = Attempts(Retry(1.0, 8.0, total_seconds=10.0))
    for progress, pause in ((0, 1.0), (1, 2.0), (2, 4.0)):
        assert attempts.pause_after(NotReady("restoring", progress=progress)) == pause
        clock.now += 9.0
    assert attempts.pause_after(NotReady("restoring", progress=2)) == 1.0, "no progress: the time goes on"
    clock.now += 1.0
    assert attempts.pause_after(NotReady("restoring", progress=2)) is None


@pytest.mark.parametrize(
    ("met", "raised"), [(Unavailable, Unavailable), (NotReady, Unavailable), (StorageFull, StorageFull)]
)
def test_the_end_names_what_was_met(met: type[PsError], raised: type[PsError]) -> None:
    with pytest.raises(PsError, match=r"gave up after 0 seconds: no room.*shard: 1.*remedy: wait") as ended:
        Attempts(Retry(1.0, 1.0, total_seconds=0.0)).sleep_after(met("no room", shard="1", remedy="wait"))
    assert type(ended.value) is raised


def test_a_worker_whose_first_values_find_no_room_waits_for_it() -> None:
    with job(shards=2) as session:
        worker = Worker(session)
        full = session.shards[1]
        full.faults.refuse_open = [StorageFull("no room")]
        worker.pipeline.start()
        assert not full.faults.refuse_open
        assert any("no room" in hint for hint in session.hints)
