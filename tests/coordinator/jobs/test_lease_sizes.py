"""Leases near the end of an epoch are as large as the speed of their workers allows. Costs about 1 CPU s."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ps_protocol.cluster.leases import LeaseAsk, Span
from ps_protocol.errors import InvalidRequest
from ps_server.coordinator.data_leases import DataLeases, Pace, PacedWorker, lease_size
from ps_worker.data.leased_loader import lease_items
from tests.coordinator.jobs.lease_race import LeaseRace, RaceWorker
from tests.support.length import examples

STEP = 0.05
SLOW = 4

FAST = PacedWorker(0, 0.0, 4.0)


@pytest.mark.parametrize(
    ("asked", "free", "paced_worker", "others", "size"),
    [
        pytest.param(64, 10_000, FAST, [FAST], 64, id="far from the end it gets what it asks for"),
        pytest.param(64, 40, FAST, [PacedWorker(8, 0.0, 4.0)], 12, id="near the end it gets half of what it can train"),
        pytest.param(64, 40, PacedWorker(0, 0.0, 1.0), [PacedWorker(8, 0.0, 4.0)], 4, id="a slow one gets less"),
        pytest.param(
            64, 4, PacedWorker(0, 0.0, 1.0), [PacedWorker(4, 0.0, 4.0)], 0, id="the others end sooner without it"
        ),
        pytest.param(64, 4, PacedWorker(0, 0.0, 1.0), [PacedWorker(16, 0.0, 4.0)], 4, id="the others are no sooner"),
        pytest.param(
            64, 4, PacedWorker(0, 0.0, 1.0), [PacedWorker(16, 15.0, 4.0)], 0, id="the others have trained most"
        ),
        pytest.param(64, 4, FAST, [PacedWorker(4, 0.0, 4.0)], 4, id="of two equal ones both get a batch"),
        pytest.param(64, 3, FAST, [], 3, id="the last batch is as short as what is left"),
        pytest.param(64, 1000, PacedWorker(0), [], 8, id="of unknown speed"),
        pytest.param(64, 40, PacedWorker(0), [PacedWorker(8, 0.0, 4.0)], 8, id="of unknown speed beside a known one"),
        pytest.param(64, 4, PacedWorker(0, 0.0, 0.0), [], 4, id="one that stood still, and is alone"),
        pytest.param(64, 4, PacedWorker(0, 0.0, 4.0), [PacedWorker(4, 0.0, 0.0)], 4, id="the other stands still"),
        pytest.param(64, 0, FAST, [], 0, id="nothing is free"),
    ],
)
def test_the_size_of_a_lease(
    asked: int, free: int, paced_worker: PacedWorker, others: list[PacedWorker], size: int
) -> None:
    assert lease_size(asked, 4, free, paced_worker, others) == size


paced = st.builds(PacedWorker, st.integers(0, 200), st.just(0.0), st.one_of(st.none(), st.floats(0.0, 1e6)))


@examples(200)
@given(st.integers(1, 64), st.integers(1, 8), st.integers(1, 500), st.lists(paced, min_size=1, max_size=6))
def test_a_worker_that_would_be_done_first_gets_something(
    asked: int, batch: int, free: int, all_paced: list[PacedWorker]
) -> None:
    asked *= batch
    sizes = []
    for at, paced_worker in enumerate(all_paced):
        others = [other for other in (*all_paced[:at], *all_paced[at + 1 :]) if other.held]
        sizes.append(lease_size(asked, batch, free, paced_worker, others))
        assert 0 <= sizes[-1] <= min(asked, free)
        assert sizes[-1] % batch == 0 or sizes[-1] == free
    assert any(sizes)


def test_a_speed_is_measured_while_something_is_held_and_falls_while_nothing_is_reported() -> None:
    pace = Pace()
    assert pace.worker(10, 5.0) == PacedWorker(10)
    pace.reported(10, 5.0)  # of a lease before a restart: when it began is not known
    assert pace.worker(0, 6.0).speed is None
    pace.leased(100.0, had_none=True)
    pace.leased(101.0, had_none=False)
    pace.reported(8, 102.0)
    assert pace.worker(4, 102.5) == PacedWorker(4, 2.0, 4.0)
    assert pace.worker(4, 106.0) == PacedWorker(4, 4.0, 1.0)
    pace.reported(4, 106.0)
    assert pace.worker(0, 200.0).speed == pytest.approx((0.75 * 8 + 4) / (0.75 * 2 + 4))


def test_a_range_that_is_smaller_than_a_batch_is_refused() -> None:
    leases = DataLeases()
    leases.members({0: 100})
    with pytest.raises(InvalidRequest, match="smaller than a batch"):
        leases.lease(0, 100, LeaseAsk("data", 100, 0, 4, 1, batch_items=5))
    assert leases.lease(0, 100, LeaseAsk("data", 100, 0, 5, 1, batch_items=5)).value.span == Span(0, 5)


def race_of(batches: int, ahead: int, seed: int, jitter: float) -> LeaseRace:
    workers = [RaceWorker(rank, STEP * (SLOW if rank == 3 else 1), ahead) for rank in range(4)]
    race = LeaseRace(workers, batches, lease_items(batches * 4, 4, 4) // 4, seed=seed)
    race.jitter = jitter
    return race


@pytest.mark.parametrize(("batches", "ahead"), [(130, 0), (500, 0), (500, 4), (2000, 4)])
def test_an_epoch_ends_within_one_step_of_all_with_a_worker_that_is_4_times_slower(batches: int, ahead: int) -> None:
    seed = random.Random(f"{batches} {ahead}").randrange(1 << 30)
    race = race_of(batches, ahead, seed, jitter=0.2)
    race.run(epochs=3)
    begin, ideal = 0.0, batches * STEP / (3 + 1 / SLOW)
    for epoch, end in sorted(race.ended.items()):
        seconds, begin = end - begin, end
        first = min(worker.finished[epoch] for worker in race.workers)
        assert end - first <= SLOW * STEP * 1.2, f"seed {seed}, epoch {epoch}"
        if batches >= 500:
            assert seconds <= ideal / 0.97, f"seed {seed}, epoch {epoch}"
    assert sum(worker.items for worker in race.workers) == 3 * race.length


@examples(60)
@given(
    st.lists(st.floats(0.01, 2.0), min_size=1, max_size=6),
    st.integers(1, 300),
    st.integers(1, 64),
    st.integers(0, 3),
    st.integers(0, 1000),
)
def test_every_item_is_trained_once_at_any_speeds(
    steps: list[float], batches: int, lease: int, ahead: int, seed: int
) -> None:
    race = LeaseRace([RaceWorker(rank, step, ahead) for rank, step in enumerate(steps)], batches, lease, seed=seed)
    race.jitter = 0.5
    race.run(epochs=2)
    assert sum(worker.items for worker in race.workers) == 2 * race.length
