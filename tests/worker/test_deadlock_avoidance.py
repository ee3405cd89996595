"""Which worker makes no-op steps: decided from clocks of the shards' own trackers, for random programs and joins."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

import pytest

from ps_protocol.errors import Unavailable
from ps_protocol.model.spec import Consistency, Mode
from ps_server.consistency import Position, PushInfo, Tracker, Verdict, WorkerKey
from ps_worker.deadlock_avoidance import DeadlockAvoidance, WorkerClock, WorkerClocks, is_blocked, is_needed
from tests.support.length import paired
from tests.support.shards import wait_until

SYNC = Consistency(Mode.SYNC)
MODES = [
    SYNC,
    Consistency(Mode.SYNC, backup=1),
    Consistency(Mode.SSP, staleness=0),
    Consistency(Mode.SSP, staleness=1),
    Consistency(Mode.SSP, staleness=3),
]


def clocks_of(*clocks: int) -> WorkerClocks:
    """Ranks 0, 1, … from old to young."""
    return {rank: WorkerClock(rank + 1, 0, clock) for rank, clock in enumerate(clocks)}


def test_the_younger_is_asked_by_the_older_who_has_stepped_further_and_not_the_other_way_round() -> None:
    assert is_needed(1, [clocks_of(5, 4)], SYNC)
    assert not is_needed(0, [clocks_of(4, 5)], SYNC)
    assert not is_needed(1, [clocks_of(5, 5)], SYNC)


def test_one_shard_that_is_waited_on_is_enough() -> None:
    assert is_needed(1, [clocks_of(5, 5), clocks_of(5, 4)], SYNC)
    assert is_blocked(1, [clocks_of(5, 5), clocks_of(4, 5)], SYNC)


def test_who_stands_in_the_barrier_waits_for_no_step() -> None:
    assert not is_needed(1, [{0: WorkerClock(1, 1, 0), 1: WorkerClock(2, 0, 4)}], SYNC)


def test_where_enough_others_have_come_a_step_is_not_held_back() -> None:
    backup = Consistency(Mode.SYNC, backup=1)
    assert is_blocked(2, [clocks_of(4, 5, 5)], SYNC)
    assert not is_blocked(2, [clocks_of(4, 5, 5)], backup)
    assert is_blocked(2, [clocks_of(4, 4, 5)], backup)


def test_within_the_bound_of_ssp_nobody_is_held_back_or_asked() -> None:
    ssp = Consistency(Mode.SSP, staleness=3)
    assert not is_blocked(1, [clocks_of(5, 7)], ssp)
    assert not is_needed(1, [clocks_of(7, 5)], ssp)
    assert is_blocked(1, [clocks_of(3, 7)], ssp)
    assert is_needed(1, [clocks_of(7, 3)], ssp)


def test_a_shard_that_does_not_know_the_worker_yet_says_nothing() -> None:
    assert not is_needed(2, [clocks_of(5, 4)], SYNC)
    assert not is_blocked(2, [clocks_of(5, 4)], SYNC)


@dataclass
class Worker:
    key: WorkerKey
    #: The models it steps, in order.
    program: list[int]
    #: Per model; a model that it has no stream of yet is missing.
    positions: dict[int, Position] = field(default_factory=dict)
    sequence: int = 0
    #: Pulls that have not been answered: by its step, and by its empty ones.
    step: tuple[int, Position] | None = None
    empty: dict[int, Position] = field(default_factory=dict)


class World:
    """Every model on two shards; workers push to both and wait for both. Time stands still."""

    def __init__(self, seed: int, consistency: Consistency, models: int, programs: list[list[int]]) -> None:
        self.random = Random(seed)
        self.consistency = consistency
        self.shards = [[Tracker(consistency) for _ in range(2)] for _ in range(models)]
        self.coming, self.workers = programs, dict[int, Worker]()
        self.gave_way = 0

    def run(self) -> None:
        while self.coming or self.workers:
            able = [rank for rank, worker in self.workers.items() if self.is_able(worker)]
            if self.coming and (not self.workers or self.random.random() < 0.05):
                self.join()
            elif able:
                self.act(self.workers[self.random.choice(able)])
            else:
                assert self.somebody_gives_way(), f"all wait: {self.workers}"

    def join(self) -> None:
        rank = next(rank for rank in range(9) if rank not in self.workers)
        self.workers[rank] = Worker(WorkerKey(rank, 100 - len(self.coming)), self.coming.pop(0))
        self.members()

    def members(self) -> None:
        live = {rank: worker.key.incarnation for rank, worker in self.workers.items()}
        for tracker in itertools.chain(*self.shards):
            tracker.members(live)
            tracker.take_ready(0.0)

    def is_able(self, worker: Worker) -> bool:
        return worker.step is None or self.answered(*worker.step)

    def answered(self, model: int, position: Position) -> bool:
        return all(tracker.may_pull(position) for tracker in self.shards[model])

    def act(self, worker: Worker) -> None:
        """Whatever comes next: a stream is opened, a step is made, the job is left."""
        worker.step = None
        worker.empty.clear()
        unopened = [model for model in range(len(self.shards)) if model not in worker.positions]
        if unopened:
            model = unopened[0]
            worker.positions[model] = max(tracker.attach(worker.key, 0) for tracker in self.shards[model])
            self.take_ready(model)
        elif worker.program:
            model = worker.program.pop(0)
            worker.step = model, self.push(worker, model)
        else:
            del self.workers[worker.key.rank]
            self.members()

    def push(self, worker: Worker, model: int, skipped: bool = False) -> Position:
        worker.sequence += 1
        position = pushed = Position(0, worker.positions[model].clock + 1)
        for tracker in self.shards[model]:
            decision = tracker.push(PushInfo(worker.key, worker.sequence, pushed, 0, skipped))
            if decision.verdict is Verdict.LATE:
                position = max(position, tracker.resume(pushed))
        worker.positions[model] = position
        self.take_ready(model)
        return pushed

    def take_ready(self, model: int) -> None:
        for tracker in self.shards[model]:
            tracker.take_ready(0.0)

    def clocks_of(self, model: int) -> list[WorkerClocks]:
        return [
            {s.worker.rank: WorkerClock(s.worker.incarnation, *s.position) for s in tracker.clocks()}
            for tracker in self.shards[model]
        ]

    def somebody_gives_way(self) -> bool:
        before = self.gave_way
        for rank, worker in self.workers.items():
            for model in range(len(self.shards)):
                under_way = worker.empty.get(model)
                if self.is_able(worker) or worker.step is None or model == worker.step[0]:
                    continue
                if under_way is not None and not self.answered(model, under_way):
                    continue
                asked = is_needed(rank, self.clocks_of(model), self.consistency)
                if asked and is_blocked(rank, self.clocks_of(worker.step[0]), self.consistency):
                    worker.empty[model] = self.push(worker, model, skipped=True)
                    self.gave_way += 1
        return self.gave_way > before


def programs_of(random: Random, models: int, workers: int, *, common: bool) -> list[list[int]]:
    turn = [random.randrange(models) for _ in range(random.randint(models, 6))]
    if common:
        return [turn * random.randint(1, 6) for _ in range(workers)]
    return [[random.randrange(models) for _ in range(random.randint(0, 30))] for _ in range(workers)]


@pytest.mark.parametrize(("mode", "common"), paired(MODES, [False, True]), ids=str)
def test_workers_that_join_and_leave_and_step_in_any_order_never_wait_for_ever(mode: Consistency, common: bool) -> None:
    gave_way = 0
    for seed in range(60):
        random = Random(seed)
        models = random.randint(2, 3)
        world = World(seed, mode, models, programs_of(random, models, random.randint(2, 5), common=common))
        try:
            world.run()
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
        gave_way += world.gave_way
    # A wide bound of ssp hides that workers of one order stand at different places of it.
    assert gave_way or mode.staleness > 1


@pytest.mark.parametrize("mode", [mode for mode in MODES if not mode.backup], ids=str)
def test_workers_that_begin_together_and_keep_one_order_never_give_way(mode: Consistency) -> None:
    for seed in range(30):
        random = Random(seed)
        world = World(seed, mode, 3, programs_of(random, 3, 4, common=True))
        while world.coming:
            world.join()
        for worker in world.workers.values():
            while len(worker.positions) < 3:
                world.act(worker)
        while world.workers:
            assert not world.somebody_gives_way(), f"seed {seed}"
            able = [worker for worker in world.workers.values() if world.is_able(worker)]
            world.act(random.choice(able))


class Model:
    """Its empty steps wait until it is interrupted, or end at once."""

    def __init__(self, name: str, clock: int, waits: bool = False) -> None:
        self.name, self.clock, self.holders = name, clock, (0,)
        self.is_busy = False
        self.pulls = 0
        self._waits = waits
        self._interrupted = threading.Event()

    def begin_waiting(self) -> None:
        raise AssertionError

    def no_op_step(self) -> None:
        self.clock += 1
        if self._waits:
            self._interrupted.wait()
            raise Unavailable("interrupted")

    def interrupt(self) -> None:
        self._interrupted.set()

    def resume(self) -> None:
        self._interrupted.clear()

    def catch_up(self) -> None:
        self.pulls += 1


def worker_clocks(older: dict[str, int]) -> Callable[[Model], list[WorkerClocks]]:
    return lambda model: [clocks_of(older[model.name], model.clock)]


@pytest.mark.parametrize("waits", [False, True])
def test_empty_steps_are_made_while_a_step_waits_and_end_with_it(waits: bool) -> None:
    stepping, other = Model("a", 7), Model("b", 3, waits)
    giving_way = DeadlockAvoidance(1, lambda: [stepping, other], worker_clocks({"a": 6, "b": 5}), lambda: SYNC)
    with giving_way.waiting(stepping):
        wait_until(lambda: other.clock == (4 if waits else 5))
    assert (stepping.clock, other.clock, other.pulls) == (7, 4 if waits else 5, 1)
    giving_way.close()


def test_a_model_whose_exchange_is_under_way_and_a_step_that_nobody_holds_back_are_left_alone() -> None:
    stepping, busy, behind = Model("a", 7), Model("b", 3), Model("c", 3)
    busy.is_busy = True
    looks: list[str] = []
    older = worker_clocks({"a": 7, "b": 5, "c": 5})

    def looked(model: Model) -> list[WorkerClocks]:
        looks.append(model.name)
        return older(model)

    giving_way = DeadlockAvoidance(1, lambda: [stepping, busy, behind], looked, lambda: SYNC)
    with giving_way.waiting(stepping):
        wait_until(lambda: looks.count("a") > 1)
    assert (busy.clock, behind.clock, behind.pulls) == (3, 3, 0)
    assert "b" not in looks
    giving_way.close()


def test_shards_that_do_not_answer_are_asked_again() -> None:
    stepping, other = Model("a", 7), Model("b", 3)
    older, failures = worker_clocks({"a": 6, "b": 5}), [Unavailable("gone"), Unavailable("gone")]

    def failing(model: Model) -> list[WorkerClocks]:
        if failures:
            raise failures.pop()
        return older(model)

    giving_way = DeadlockAvoidance(1, lambda: [stepping, other], failing, lambda: SYNC)
    with giving_way.waiting(stepping):
        wait_until(lambda: other.clock == 5)
    giving_way.close()


def test_what_ends_a_step_is_not_hidden() -> None:
    stepping, other = Model("a", 7), Model("b", 3, waits=True)
    giving_way = DeadlockAvoidance(1, lambda: [stepping, other], worker_clocks({"a": 6, "b": 5}), lambda: SYNC)

    def step() -> None:
        with giving_way.waiting(stepping):
            wait_until(lambda: other.clock == 4)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        step()
    assert other.pulls == 0
    giving_way.close()
