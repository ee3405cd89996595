"""One training of virtual workers on one virtual shard, on a virtual clock: the same bits for the same seed.

Each worker computes a gradient on the parameters that it pulled, for as long as its speed says, pushes it, and pulls as
soon as the mode answers. Messages take no time. What becomes of a push, when a pull is answered, how gradients are
combined and how they change the parameters is decided and done by the classes that shards run.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from benchmarks.learning.rules import RULES, Pushed, Rule
from benchmarks.learning.tasks import Task
from ps_protocol.launch.rehearsal import Speeds
from ps_protocol.model.layout import Layout
from ps_protocol.model.optimizers import SHAPED
from ps_protocol.model.spec import Consistency, DType, Kind, ModelSpec, ShardMap, Slice, Variable
from ps_server.consistency import Position, PushInfo, Tracker, Verdict, WorkerKey
from ps_server.consistency.events import Round
from ps_server.optimizers.gradients import average
from ps_server.state.region import Region
from ps_server.state.replica import Replica, Step

DIVERGED = 20.0
"""A training is given up when its measure is so many times what it was at the beginning, or not finite."""


@dataclass(frozen=True, slots=True)
class Setting:
    """How to train."""

    #: A class of torch.optim.
    optimizer: str
    #: Its arguments.
    options: dict[str, Any]
    consistency: Consistency
    workers: int
    #: Pushes of all workers together; a synchronous round counts as many as it has contributions.
    pushes: int
    #: How often the model is measured on the way.
    measures: int = 20
    #: Of ``rules.RULES``: what becomes of old gradients in async and ssp.
    rule: str = "plain"
    #: Part of the pushes over which the learning rate rises from 0.
    warmup: float = 0.0
    #: Whether the learning rate then falls to 0 at the last push, along a line.
    decay: bool = False

    def rate_at(self, done: int) -> float:
        """What the learning rate is multiplied by after so many pushes."""
        rising = self.warmup * self.pushes
        if done < rising:
            return (done + 1) / (rising + 1)
        return (self.pushes - done) / (self.pushes - rising) if self.decay else 1.0


@dataclass(slots=True)
class Outcome:
    """What a training came to."""

    #: Held-out, at the end; infinite where it diverged.
    measure: float
    #: The task's score, held-out, at the end; NaN where it diverged.
    score: float
    #: It was given up, or ended no better than it began.
    diverged: bool
    #: Virtual seconds.
    seconds: float
    #: How many pushes were applied, by staleness.
    staleness: dict[int, int]
    #: Pushes that were dropped for their age.
    dropped: int
    #: (virtual seconds, pushes, measure).
    curve: list[tuple[float, int, float]] = field(default_factory=list)

    @property
    def mean_staleness(self) -> float:
        """In updates, over the pushes applied."""
        applied = sum(self.staleness.values())
        return sum(age * count for age, count in self.staleness.items()) / applied if applied else 0.0


@dataclass(slots=True)
class _Worker:
    key: WorkerKey
    #: What it computes on.
    pulled: Region
    generator: torch.Generator
    version: int = 0
    steps: int = 0
    clock: int = 0
    #: When it pulled, in virtual seconds.
    began: float = 0.0
    #: Waits for the mode to answer its pull.
    waits: bool = True


class Laboratory:
    """Owns the virtual clock, workers and shard of one training. Use ``train``."""

    def __init__(self, task: Task, setting: Setting, speeds: Speeds, seed: int) -> None:
        """Raises what a shard raises for an optimizer or arguments that it does not take."""
        self._task, self._setting, self._speeds = task, setting, speeds
        self._model = task.model(seed)
        made = RULES[setting.rule](setting.workers, setting.options)
        self._arguments = dict(made.arguments(setting.options))
        self._layout = _layout(self._model, setting.optimizer, self._arguments)
        #: None where nothing is changed.
        self._rule = None if type(made) is Rule else made
        self._replica = Replica(self._layout)
        self._gradients = Region(self._layout)
        self._parameters = [parameter for parameter in self._model.parameters() if parameter.requires_grad]
        #: The same memory, outside of autograd.
        self._values = [parameter.data for parameter in self._parameters]
        self._views: dict[Region, list[torch.Tensor]] = {}
        for value, parameter in zip(self._of(self._replica.region), self._values, strict=True):
            value.copy_(parameter)
        self._tracker = Tracker(setting.consistency)
        self._tracker.members(dict.fromkeys(range(setting.workers), 1))
        self._workers = [
            _Worker(WorkerKey(rank, 1), Region(self._layout), torch.Generator().manual_seed(seed * 1009 + rank))
            for rank in range(setting.workers)
        ]
        self._held: dict[PushInfo, Region] = {}
        self._spare: list[Region] = []
        self._events: list[tuple[float, int]] = []
        self._done = 0
        #: Pushes that the rule dropped.
        self._dropped = 0
        self._now = 0.0

    def train(self) -> Outcome:
        """Make all pushes, measure, and return what came of it. Called once."""
        for worker in self._workers:
            worker.clock = self._tracker.attach(worker.key, 0).clock
        self._answer_pulls()
        curve = [self._measured()]
        first = curve[0][2]
        marks = self._marks()
        mark, diverged = next(marks), False
        while self._done < self._setting.pushes and self._events:
            self._now, rank = heapq.heappop(self._events)
            self._push(self._workers[rank])
            for ready in self._tracker.take_ready(self._now):
                self._make(ready)
            self._answer_pulls()
            if self._done >= mark:
                mark = next(marks)
                curve.append(self._measured())
                diverged = not curve[-1][2] < DIVERGED * first
                if diverged:
                    break
        if curve[-1][1] < self._done:
            curve.append(self._measured())
        diverged = diverged or not curve[-1][2] < first
        counts = self._tracker.counts
        ages = {age: count for age, count in enumerate(counts.staleness) if count}
        dropped = counts.outcomes[Verdict.STALE.value] + counts.outcomes[Verdict.LATE.value] + self._dropped
        measure, score = (math.inf, math.nan) if diverged else (curve[-1][2], self._task.score(self._model))
        return Outcome(measure, score, diverged, self._now, ages, dropped, curve)

    def _marks(self) -> Iterator[float]:
        setting = self._setting
        for number in range(1, setting.measures + 1):
            yield setting.pushes * number / setting.measures
        yield math.inf

    def _push(self, worker: _Worker) -> None:
        """``worker`` has computed: its gradient is one of the parameters that it pulled."""
        gradients = self._gradients
        if self._tracker.collects:
            gradients = self._spare.pop() if self._spare else Region(self._layout)
        torch._foreach_copy_(self._values, self._of(worker.pulled))
        self._task.loss(self._model, worker.key.rank, self._setting.workers, worker.generator).backward()
        absent = set()
        for index, (parameter, place) in enumerate(zip(self._parameters, self._of(gradients), strict=True)):
            if parameter.grad is None:
                absent.add(index)
            else:
                place.copy_(parameter.grad)
                parameter.grad = None
        worker.steps += 1
        worker.clock += 1
        worker.waits = True
        push = PushInfo(worker.key, worker.steps, Position(0, worker.clock), worker.version)
        staleness = self._tracker.version - worker.version
        decision = self._tracker.push(push)
        match decision.verdict:
            case Verdict.APPLY:
                step = Step(gradients, frozenset(absent), [self._options()], decision.scale)
                self._done += 1
                if self._rule is None:
                    self._replica.apply(step)
                else:
                    self._apply(self._rule, worker, staleness, step)
            case Verdict.HOLD:
                self._held[push] = gradients
            case _:
                self._done += 1
                if gradients is not self._gradients:
                    self._spare.append(gradients)
                worker.clock = self._tracker.resume(push.position).clock

    def _apply(self, rule: Rule, worker: _Worker, staleness: int, step: Step) -> None:
        """Make ``step`` as ``rule`` has it."""
        values = _flat(self._replica.region)
        seconds = self._now - worker.began
        (options,) = step.options
        rule.lr = options["lr"]
        push = Pushed(worker.key.rank, staleness, seconds, _flat(step.gradients), _flat(worker.pulled), values)
        factor = rule.take(push)
        if not factor:
            self._dropped += 1
            return
        before = values.clone()
        self._replica.apply(replace(step, options=[{**options, "lr": factor * options["lr"]}]))
        rule.applied(values - before)

    def _make(self, ready: Round) -> None:
        """The update of one synchronous round."""
        parts = [self._held.pop(push) for push in ready.contributions]
        if parts:
            absent = average(self._gradients, parts, [frozenset()] * len(parts))
            self._replica.apply(Step(self._gradients, absent, [self._options()]))
        self._done += len(parts)
        self._spare += parts

    def _options(self) -> dict[str, Any]:
        """The optimizer's arguments now."""
        factor = self._setting.rate_at(self._done)
        return self._arguments if factor == 1.0 else {**self._arguments, "lr": self._arguments["lr"] * factor}

    def _of(self, region: Region) -> list[torch.Tensor]:
        """The variables in ``region``, by index."""
        found = self._views.get(region)
        if found is None:
            found = self._views[region] = [region.slice(index) for index in range(len(self._layout.slices))]
        return found

    def _answer_pulls(self) -> None:
        for worker in self._workers:
            if worker.waits and self._tracker.may_pull(Position(0, worker.clock)):
                worker.waits = False
                worker.pulled.data.copy_(self._replica.region.data)
                worker.began = self._now
                if self._rule is not None:
                    self._rule.look_ahead(_flat(worker.pulled))
                worker.version = self._tracker.version
                seconds = self._speeds(worker.key.rank, worker.steps + 1)
                heapq.heappush(self._events, (self._now + seconds, worker.key.rank))

    def _measured(self) -> tuple[float, int, float]:
        torch._foreach_copy_(self._values, self._of(self._replica.region))
        return self._now, self._done, self._task.measure(self._model)


def train(task: Task, setting: Setting, speeds: Speeds, seed: int) -> Outcome:
    """Train once. The same arguments give the same bits, with one thread of torch on one machine."""
    return Laboratory(task, setting, speeds, seed).train()


def _flat(region: Region) -> torch.Tensor:
    return region.data.view(torch.float32)


def _layout(model: nn.Module, optimizer: str, arguments: dict[str, Any]) -> Layout:
    name = f"torch.optim.{optimizer}"
    variables = tuple(
        Variable(variable, tuple(value.shape), DType.FLOAT32, Kind.PARAMETER, 0)
        for variable, value in model.named_parameters()
        if value.requires_grad
    )
    spec = ModelSpec("model", name, variables, (dict(arguments),), unsplit=name in SHAPED)
    slices = tuple(Slice(index, 0, variable.rows, 0) for index, variable in enumerate(variables))
    return Layout.of(ShardMap(1, spec, 1, slices), 0)
