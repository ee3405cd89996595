"""When a number counts as far above its own history, and what the watch of a job makes of that."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ps_protocol.cluster.view import Divergence, Member, MemberStats, Role, UpdateCounts
from ps_protocol.model.spec import Mode
from ps_server.coordinator import times
from ps_server.coordinator.divergence import (
    LOSS,
    LOSS_NAMES,
    MOST,
    NORM,
    POINTS,
    REFUSED,
    DivergenceWatch,
    Far,
    History,
)
from tests.support.length import examples

SHARD = Member(Role.SHARD, 0, 1)


def worker(rank: int, incarnation: int = 7) -> Member:
    return Member(Role.WORKER, rank, incarnation)


def fed(far: Far, numbers: Iterable[float]) -> list[bool]:
    """After each of ``numbers``, one a second, whether it has grown."""
    history, found = History(far, 0.0), []
    for now, number in enumerate(numbers):
        history.take(number, float(now))
        found.append(history.has_grown)
    return found


# One number.


def test_a_norm_ten_times_above_everything_before_has_grown():
    usual = [math.log(1 + at % 3) for at in range(50)]
    assert not any(fed(NORM, usual))
    assert not any(fed(NORM, [*usual, *[math.log(3 * 9.0)] * 20]))
    assert fed(NORM, [*usual, *[math.log(3 * 14.0)] * 2])[-2:] == [False, True]


def test_a_norm_that_grows_slowly_to_a_hundredfold_is_noticed_on_the_way():
    growing = [0.05 * at for at in range(100)]
    found = fed(NORM, [0.0] * 100 + growing)
    assert found.index(True) - 100 < growing.index(math.log(100.0) // 0.05 * 0.05)


def test_what_comes_before_the_least_count_is_no_growth():
    assert not any(fed(NORM, [0.0, 50.0, 100.0, 150.0, 200.0]))
    assert not any(fed(LOSS, [1.0] * 3 + [1e6] * 16))


def test_a_start_with_little_history_needs_more_growth():
    assert not any(fed(NORM, [0.0] * 6 + [math.log(20.0)] * 2))
    assert any(fed(NORM, [0.0] * 6 + [math.log(100.0)] * 2))
    assert any(fed(NORM, [0.0] * 40 + [math.log(20.0)] * 2))


@given(
    scale=st.floats(1e-6, 1e6),
    shift=st.floats(-1e3, 1e3),
    numbers=st.lists(st.floats(-1.0, 1.0), min_size=30, max_size=200),
)
@examples(200)
def test_a_loss_that_stays_in_its_range_has_not_grown_whatever_its_scale_and_sign(
    scale: float, shift: float, numbers: Sequence[float]
):
    spread = [-1.0, 1.0] * 20
    assert not any(fed(LOSS, [scale * (each + shift) for each in [*spread, *numbers]]))


@given(st.lists(st.floats(0.0, 1.0), min_size=30, max_size=100), st.floats(-1e3, 1e3))
@examples(100)
def test_a_loss_that_explodes_has_grown_whatever_came_before(numbers: Sequence[float], shift: float):
    before = [each + shift for each in numbers]
    explodes = [max(before) + 50.0 * (1 + abs(shift)) * 2**at for at in range(8)]
    assert any(fed(LOSS, [*before, *explodes]))


def test_a_single_batch_far_off_is_no_growth():
    usual = [0.01 + 0.001 * (at % 10) for at in range(100)]
    assert not any(fed(LOSS, [*usual, 0.1, *usual]))


def test_one_loss_that_is_not_finite_is_no_growth_and_two_are():
    usual = [1.0, 1.1] * 20
    assert not any(fed(LOSS, [*usual, math.nan, *usual, math.inf, *usual, -math.inf, *usual]))
    assert fed(LOSS, [*usual, math.nan, math.nan])[-1]


def test_a_growth_is_over_some_time_after_the_number_is_back():
    usual = [0.0] * 40
    found = fed(NORM, [*usual, *[5.0] * 3, *usual])
    begin = found.index(True)
    assert sum(found) == pytest.approx(times.HOLD_SECONDS, abs=4)
    assert all(found[begin : begin + 20])


def test_what_has_grown_does_not_become_usual():
    assert all(fed(NORM, [0.0] * 40 + [5.0] * 500)[-400:])


@given(st.lists(st.floats(), max_size=2000))
@examples(50)
def test_a_history_has_a_constant_size_and_finite_points(numbers: Sequence[float]):
    history = History(LOSS, 0.0)
    for now, number in enumerate(numbers):
        history.take(number, float(now))
    assert len(history._points) <= POINTS
    assert all(math.isfinite(low) and low <= high < math.inf for low, high in history._points)


# The watch.


class Watched:
    """A watch that gets a heartbeat of each member every second."""

    def __init__(self, mode: Mode = Mode.ASYNC) -> None:
        self.watch = DivergenceWatch(mode)
        self.now = 1000.0
        self.steps = 0
        self.epochs = {"net": 1}

    def shard(self, norm: float, staleness: float = 3.0) -> list[Divergence]:
        self.now += 1.0
        updates = (UpdateCounts("net", norm, staleness, 2 * staleness),)
        return self.watch.take(SHARD, MemberStats(updates=updates), self.epochs, self.now)

    def loss(self, value: float, member: Member | None = None, **more: float) -> list[Divergence]:
        self.now, self.steps = self.now + 1.0, self.steps + 1
        stats = MemberStats(steps=self.steps, metrics={"loss": value, **more})
        return self.watch.take(member or worker(0), stats, self.epochs, self.now)

    def refusals(self, count: int, member: Member | None = None) -> list[Divergence]:
        self.now += 1.0
        return self.watch.take(member or worker(0), MemberStats(nonfinite=count), self.epochs, self.now)

    def grow(self) -> None:
        """Let the gradients of the shard grow."""
        for norm in [1.0] * 20 + [1e3] * 2:
            self.shard(norm)

    @property
    def found(self) -> tuple[Divergence, ...]:
        return self.watch.divergences(self.now)


def test_gradients_that_have_grown_are_told_once_with_their_usual_norm_and_the_staleness():
    job = Watched()
    told = [grown for norm in [1.0, 2.0] * 20 + [100.0] * 5 for grown in job.shard(norm)]
    (grown,) = told
    assert (grown.member, grown.what) == (SHARD, "gradient norm of model 'net'")
    assert grown.usual == pytest.approx(2.0)
    (now,) = job.found
    assert (now.value, now.staleness, now.staleness_p99) == (pytest.approx(100.0), 3.0, 6.0)


def test_growth_began_when_the_norm_was_last_as_usual():
    job = Watched()
    for norm in [1.0] * 20:
        job.shard(norm)
    ordinary_at = job.now
    for norm in (5.0, 20.0, 80.0, 300.0):
        job.shard(norm)
    assert job.found[0].since_seconds == ordinary_at


def test_sync_watches_nothing():
    job = Watched(Mode.SYNC)
    job.grow()
    job.refusals(3)
    assert job.found == ()
    assert job.watch.unprotected == []


def test_another_mode_begins_another_history():
    job = Watched()
    job.grow()
    job.watch.restart(Mode.SSP)
    assert job.found == ()
    assert job.watch.unprotected == []
    for norm in [1e3] * 20:
        job.shard(norm)
    assert job.found == ()


def test_what_is_acknowledged_is_usual_until_it_grows_again():
    job = Watched()
    for at in range(30):
        job.loss(1.0 + 0.1 * (at % 2))
    job.grow()
    job.refusals(1)
    told = job.found
    assert [grown.what for grown in told] == ["gradient norm of model 'net'", REFUSED]
    assert job.watch.acknowledge(job.now) == told
    assert job.watch.acknowledge(job.now) == job.found == ()
    assert job.watch.unprotected == []
    for _ in range(40):
        job.shard(1e3)
        job.refusals(1)
    assert job.found == ()
    for _ in range(2):
        job.shard(1e6)
    (grown,) = job.found
    assert grown.usual == pytest.approx(1e3)
    # What had not grown has kept its history.
    for at in range(2):
        job.loss(1e3 + at)
    job.refusals(2)
    assert {grown.what for grown in job.found} == {"gradient norm of model 'net'", "loss", REFUSED}


def test_another_epoch_of_the_shard_map_begins_another_history():
    job = Watched()
    for norm in [1.0] * 20:
        job.shard(norm)
    job.epochs = {"net": 2}
    for norm in [1e3] * 20:
        job.shard(norm)
    assert job.found == ()


def test_a_process_that_takes_a_place_continues_its_history():
    job = Watched()
    for _ in range(30):
        job.loss(1.0 + 0.1 * (job.steps % 2))
    again = worker(0, incarnation=9)
    job.steps = 0
    for _ in range(2):
        job.loss(100.0 + job.steps, again)
    assert [grown.what for grown in job.found] == ["loss"]


@pytest.mark.parametrize("name", ["loss", "train_loss", "val/loss", "Loss", "loss_0", "loss (mean)"])
def test_losses_are_known_by_their_name(name: str):
    job = Watched()
    for at in range(30):
        job.loss(0.0, None, **{name: 1.0 + 0.1 * (at % 2)})
    for at in range(2):
        job.loss(0.0, None, **{name: 1e3 + at})
    assert name in [grown.what for grown in job.found]


@pytest.mark.parametrize("name", ["accuracy", "reward", "epoch", "floss", "losses_seen", "lr"])
def test_other_numbers_may_grow(name: str):
    job = Watched()
    for at in range(40):
        job.loss(0.0, None, **{name: 2.0**at})
    assert job.found == ()


def test_a_loss_that_is_sent_again_counts_once():
    job = Watched()
    for at in range(30):
        job.loss(1.0 + 0.1 * (at % 2))
    for _ in range(50):
        job.loss(1e6)
    assert job.found == ()


def test_a_loss_of_a_worker_that_makes_no_step_does_not_count():
    job = Watched()
    for at in range(30):
        job.loss(1.0 + 0.1 * (at % 2))
    for at in range(10):
        job.steps -= 1
        job.loss(1e6 + at)
    assert job.found == ()


def test_a_refused_step_is_growth_until_ten_minutes_later():
    job = Watched()
    job.watch.joined(worker(0), job.now)
    (grown,) = job.refusals(1)
    assert (grown.member, grown.what) == (worker(0), REFUSED)
    assert math.isnan(grown.value)
    job.now += times.SILENT_SECONDS - 2
    assert job.found
    job.now += 2
    assert job.found == ()


def test_steps_that_were_refused_before_this_coordinator_began_are_not_new():
    job = Watched()
    assert job.refusals(5) == []
    assert len(job.refusals(6)) == 1


def test_refusals_of_a_process_are_counted_from_its_beginning():
    job = Watched()
    job.watch.joined(worker(0), job.now)
    job.refusals(3)
    job.now += 2 * times.SILENT_SECONDS
    assert job.found == ()
    again = worker(0, incarnation=8)
    job.watch.joined(again, job.now)
    assert len(job.refusals(1, again)) == 1


def test_a_refused_step_began_when_the_norms_were_last_as_usual():
    job = Watched()
    job.watch.joined(worker(0), job.now)
    for norm in [1.0] * 20:
        job.shard(norm)
    ordinary_at = job.now
    job.shard(5.0)
    job.shard(8.0)
    assert job.refusals(1)[0].since_seconds == ordinary_at


def test_the_checkpoint_from_before_is_asked_for_once_for_each_role():
    job = Watched()
    job.watch.joined(worker(0), job.now)
    job.grow()
    job.refusals(1)
    job.refusals(2)
    of_shard, of_worker = job.watch.unprotected
    assert [of_shard.role, of_worker.role] == [Role.SHARD, Role.WORKER]
    job.watch.protected(of_worker)
    assert job.watch.unprotected == [of_shard]
    job.watch.protected(of_shard, "/saves/checkpoint-00000003", 120)
    assert job.watch.unprotected == []
    assert [(grown.checkpoint, grown.step) for grown in job.found] == [("/saves/checkpoint-00000003", 120), ("", 0)]


def test_a_growth_that_comes_while_a_checkpoint_is_chosen_is_asked_for_again():
    job = Watched()
    for rank in range(2):
        job.watch.joined(worker(rank), job.now)
    job.loss(1.0, worker(0))
    job.refusals(1, worker(0))
    (first,) = job.watch.unprotected
    job.refusals(1, worker(1))
    job.watch.protected(first, "/saves/checkpoint-00000002", 2)
    (second,) = job.watch.unprotected
    assert second.since_seconds < first.since_seconds


def test_a_step_that_a_shard_refused_is_no_growth():
    job = Watched()
    job.watch.take(SHARD, MemberStats(nonfinite=0), {}, job.now)
    assert job.watch.take(SHARD, MemberStats(nonfinite=5), {}, job.now + 1) == []


def test_a_worker_with_absurd_losses_hides_no_growth_of_a_shard():
    job = Watched()
    for rank in range(4):
        for at in range(30):
            job.loss(1.0 + 0.1 * (at % 2), worker(rank), **{f"loss{number}": float(number) for number in range(100)})
        for at in range(2):
            job.loss(1e30 * (1 + at), worker(rank), **{f"loss{number}": 1e30 for number in range(100)})
    (asked,) = job.watch.unprotected
    assert asked.role is Role.WORKER
    job.watch.protected(asked, "/saves/checkpoint-00000001", 1)
    job.grow()
    assert len(job.found) <= MOST
    assert job.found[0].member == SHARD
    assert [each.role for each in job.watch.unprotected] == [Role.SHARD]


def test_a_worker_that_changes_the_names_of_its_losses_takes_bounded_memory():
    job = Watched()
    for at in range(300):
        job.loss(1.0, None, **{f"loss {at} {number}": 1.0 for number in range(20)})
    assert len(job.watch._watched) <= (LOSS_NAMES + 1) * (times.SILENT_SECONDS + 2)


def test_a_growth_of_a_member_that_is_gone_is_over_after_ten_minutes():
    job = Watched()
    job.grow()
    job.now += times.SILENT_SECONDS + 1
    assert job.found == ()


def test_norms_that_are_zero_or_no_numbers_do_not_count():
    job = Watched()
    for norm in [0.0, math.nan, -1.0] * 20:
        assert job.shard(norm) == []
    assert job.found == ()


def test_gradients_of_infinite_norm_have_grown():
    job = Watched()
    for norm in [1.0] * 20 + [math.inf] * 2:
        job.shard(norm)
    assert job.found[0].value > 1e300
