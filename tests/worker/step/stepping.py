"""A worker of one model over fake shards, for tests of its steps."""

from __future__ import annotations

import torch
from torch import nn

from ps_protocol.model.spec import Options
from ps_worker.memory.flat import FlatModel
from ps_worker.model.declare import build_spec
from ps_worker.step.gradients import Gradients
from ps_worker.step.pipeline import StepPipeline
from ps_worker.step.summary import StepPush, StepSummary
from tests.worker.fakes import FakeSession


class Worker:
    """A flat model and its pipeline; every gradient is one, the learning rate is 1."""

    def __init__(self, session: FakeSession, *, seed: int = 0, **timeouts: float) -> None:
        torch.manual_seed(seed)
        self.parameters = [nn.Parameter(torch.randn(3)), nn.Parameter(torch.randn(12, 5)), nn.Parameter(torch.randn(4))]
        declaration = build_spec(torch.optim.SGD, self.parameters, {"lr": 1.0}, name="model")
        self.initial = [p.detach().clone() for p in self.parameters]
        shard_map = session.declare(declaration.spec)
        self.flat = FlatModel(declaration.bindings, shard_map)
        self.gradients = Gradients(self.flat.plan, declaration.bindings)
        self.pipeline = StepPipeline(session, shard_map, self.flat, self.gradients, **timeouts)

    @property
    def region_bytes(self) -> int:
        """Of all shards together."""
        return sum(layout.region_bytes for layout in self.flat.plan.layouts)

    def step(self, *, skipped: bool = False, options: tuple[Options, ...] = ({},)) -> StepSummary:
        for parameter in self.parameters:
            parameter.grad = torch.ones_like(parameter)
        return self.pipeline.exchange(StepPush(self.gradients.collect(), options, skipped=skipped))

    def moved(self) -> float:
        """How far every parameter is below its initial value; the same for all, or the test fails."""
        distances = torch.cat([(i - p.detach()).view(-1) for i, p in zip(self.initial, self.parameters, strict=True)])
        torch.testing.assert_close(distances, distances[:1].expand_as(distances))
        return round(distances[0].item(), 4)


def started(session: FakeSession, **arguments: float) -> Worker:
    worker = Worker(session, **arguments)
    worker.pipeline.start()
    return worker
