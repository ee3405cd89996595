"""When lost actors are started again. Needs no Ray; 0.1 s."""

from __future__ import annotations

from ps_worker.ray.restarts import LONGEST_PAUSE_SECONDS, SHORT_LIFE_SECONDS, RestartBudget


def test_the_first_restart_is_at_once_and_short_lives_in_a_row_make_it_later() -> None:
    budget = RestartBudget(20)
    pauses = []
    for _ in range(8):
        budget.started("shard 0", 0.0)
        pauses.append(budget.take("shard 0", 1.0))
    assert pauses == [0.0, 0.5, 1.0, 2.0, 4.0, 8.0, LONGEST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS]


def test_a_long_life_ends_the_pauses() -> None:
    budget = RestartBudget(20)
    for _ in range(3):
        budget.started("shard 0", 0.0)
        budget.take("shard 0", 1.0)
    budget.started("shard 0", 10.0)
    assert budget.take("shard 0", 10.0 + SHORT_LIFE_SECONDS) == 0.0


def test_the_pauses_of_one_are_not_those_of_another() -> None:
    budget = RestartBudget(20)
    for name in ("shard 0", "shard 1"):
        budget.started(name, 0.0)
        assert budget.take(name, 1.0) == 0.0


def test_all_share_the_number_of_restarts() -> None:
    budget = RestartBudget(2)
    for name in ("shard 0", "shard 1", "shard 2"):
        budget.started(name, 0.0)
    assert [budget.take(name, 60.0) for name in ("shard 0", "shard 1", "shard 2")] == [0.0, 0.0, None]
    assert budget.used == 2
