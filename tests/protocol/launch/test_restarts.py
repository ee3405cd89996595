"""Whether and when a process is started again."""

from ps_protocol.launch.restarts import Restarts
from ps_protocol.times import SHORT_LIFE_SECONDS

FIRST, SECOND = "shard 0", "shard 1"


def test_the_first_restart_comes_at_once_and_those_of_a_process_that_cannot_live_ever_later():
    restarts, now, pauses = Restarts(8), 0.0, []
    for _ in range(8):
        restarts.started(FIRST, now)
        pause = restarts.take(FIRST, now + 1.0)
        assert pause is not None
        pauses.append(pause)
        now += 1.0 + pause
    assert pauses == [0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 10.0, 10.0]


def test_a_life_that_lasted_ends_the_pauses():
    restarts = Restarts(9)
    for now in (0.0, 1.0, 2.0):
        restarts.started(FIRST, now)
        restarts.take(FIRST, now + 0.1)
    restarts.started(FIRST, 10.0)
    assert restarts.take(FIRST, 10.0 + SHORT_LIFE_SECONDS) == 0.0


def test_processes_share_the_restarts_but_not_the_pauses():
    restarts = Restarts(3)
    for process in (FIRST, SECOND):
        restarts.started(process, 0.0)
    assert restarts.take(FIRST, 1.0) == 0.0
    restarts.started(FIRST, 1.0)
    assert restarts.take(FIRST, 2.0) == 0.5
    assert restarts.take(SECOND, 2.0) == 0.0
    assert (restarts.used, restarts.take(SECOND, 3.0)) == (3, None)


def test_only_a_short_first_life_counts_as_none():
    restarts = Restarts(1)
    restarts.started(FIRST, 0.0)
    assert restarts.never_lived(FIRST, 1.0)
    assert not restarts.never_lived(FIRST, SHORT_LIFE_SECONDS)
    restarts.started(FIRST, 20.0)
    assert not restarts.never_lived(FIRST, 20.1)
