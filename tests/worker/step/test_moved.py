"""Slices that move between shards while a worker trains: the same steps, each push once, nothing of the model moved."""

from __future__ import annotations

import queue
import threading

import pytest
import torch
from torch import nn

from ps_protocol.model.spec import Options
from ps_worker import Outcome
from ps_worker.memory.flat import FlatModel
from ps_worker.model.declare import build_spec
from ps_worker.step.gradients import Gradients
from ps_worker.step.pipeline import StepPipeline
from ps_worker.step.summary import StepPush, StepSummary
from tests.worker.fakes import FakeSession

OPTIONS: tuple[Options, ...] = ({},)


class Worker:
    """A model and its pipeline; the gradient of each step is its number, the learning rate is 1."""

    def __init__(self, session: FakeSession) -> None:
        torch.manual_seed(0)
        self.session = session
        self.parameters = [nn.Parameter(torch.randn(n, 2)) for n in (3, 12, 4, 1)]
        declaration = build_spec(torch.optim.SGD, self.parameters, {"lr": 1.0}, name="model")
        self.initial = [p.detach().clone() for p in self.parameters]
        shard_map = session.declare(declaration.spec)
        self.flat = FlatModel(declaration.bindings, shard_map)
        self.gradients = Gradients(self.flat.plan, declaration.bindings)
        self.pipeline = StepPipeline(session, shard_map, self.flat, self.gradients)
        self.pipeline.start()
        self.steps = 0

    def step(self) -> StepSummary:
        self.steps += 1
        for parameter in self.parameters:
            parameter.grad = torch.full_like(parameter, float(self.steps))
        summary = self.pipeline.exchange(StepPush(self.gradients.collect(), OPTIONS))
        self.pipeline.publish()
        return summary

    def assert_stepped_once_each(self, tolerance: float = 1e-5) -> None:
        moved = float(sum(range(1, self.steps + 1)))
        for before, now in zip(self.initial, self.parameters, strict=True):
            torch.testing.assert_close(before - now.detach(), torch.full_like(before, moved), rtol=0, atol=tolerance)


def test_between_steps_the_worker_takes_the_new_map_and_goes_on(session: FakeSession) -> None:
    worker = Worker(session)
    places = [p.data_ptr() for p in worker.parameters]
    worker.step()
    session.move({1: 1, 2: 1})
    worker.step()
    session.move({0: 0, 1: 0, 2: 0, 3: 0})
    worker.step()
    worker.assert_stepped_once_each()
    assert [p.data_ptr() for p in worker.parameters] == places
    assert [p.sequence for p in session.shards[0].pushes] == [1, 2, 3]


def test_a_shard_without_slices_is_not_asked_and_may_be_gone(session: FakeSession) -> None:
    worker = Worker(session)
    worker.step()
    session.move(dict.fromkeys(range(5), 0))
    session.shards[1].stop()
    worker.step()
    worker.pipeline.pull()
    worker.assert_stepped_once_each()
    assert worker.pipeline.save_state() == {}


def test_slices_may_move_to_a_shard_that_was_not_there_before(session: FakeSession) -> None:
    worker = Worker(session)
    worker.step()
    session.move({0: 2, 1: 2})
    worker.step()
    worker.assert_stepped_once_each()
    assert [p.sequence for p in session.shards[2].pushes] == [2]


@pytest.mark.parametrize("taken", [True, False], ids=["taken by all", "taken by none"])
def test_a_push_under_way_is_applied_once(session: FakeSession, taken: bool) -> None:
    worker = Worker(session)
    worker.step()
    came: queue.SimpleQueue[None] = queue.SimpleQueue()
    for shard in session.shards:
        shard.faults.on_push = [lambda: came.put(None)]

    def move() -> None:
        for _ in session.shards:
            came.get()
        session.move({1: 1, 2: 1}, taking=taken)
        for shard in session.shards:
            shard.faults.release.put(None)

    mover = threading.Thread(target=move)
    mover.start()
    summary = worker.step()
    mover.join()
    assert summary.outcome is (Outcome.DUPLICATE if taken else Outcome.APPLIED)
    worker.step()
    worker.assert_stepped_once_each()


def test_gradients_collected_before_a_move_are_those_pushed_after_it(session: FakeSession) -> None:
    worker = Worker(session)
    for number, parameter in enumerate(worker.parameters, 1):
        parameter.grad = torch.arange(parameter.numel(), dtype=torch.float32).reshape(parameter.shape) * number
    expected = [p.detach() - p.grad for p in worker.parameters]
    absent = worker.gradients.collect()
    worker.gradients.keep_in_place()
    session.move({0: 1, 1: 0, 3: 1})
    worker.pipeline.exchange(StepPush(absent, OPTIONS))
    worker.pipeline.publish()
    torch.testing.assert_close([p.detach() for p in worker.parameters], expected)
