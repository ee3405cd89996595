"""What becomes of values that a user sets, as a table; and how it is found that some were."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from ps_protocol.errors import InvalidRequest, NotReady
from ps_protocol.model.spec import Consistency, Mode
from ps_worker.memory.flat import FlatModel
from ps_worker.model.declare import build_spec
from ps_worker.on_shards import declare_optimizer
from ps_worker.optimizer import PsOptimizer
from ps_worker.step import assigned_values
from ps_worker.step.assigned_values import Fate, Situation, fate_of
from ps_worker.step.summary import Style, Writes
from tests.worker.fakes import FakeSession, job, place

ALONE = Situation(
    consistency=Consistency(Mode.ASYNC),
    workers=1,
    is_lowest=True,
    has_stepped=True,
    joined_running=False,
    overlaps=False,
)
SYNC = replace(ALONE, consistency=Consistency(Mode.SYNC), workers=3)
ASYNC = replace(ALONE, workers=3)


@pytest.mark.parametrize(
    ("situation", "fate"),
    [
        (ALONE, Fate.ASSIGN),
        (replace(ALONE, overlaps=True), Fate.REFUSE),
        (SYNC, Fate.ASSIGN),
        (replace(SYNC, is_lowest=False), Fate.AGREE),
        (replace(SYNC, consistency=Consistency(Mode.SYNC, backup=1)), Fate.REFUSE),
        (ASYNC, Fate.REFUSE),
        (replace(ASYNC, consistency=Consistency(Mode.SSP, 2)), Fate.REFUSE),
        (replace(ASYNC, has_stepped=False), Fate.ASSIGN),
        (replace(ASYNC, has_stepped=False, is_lowest=False), Fate.AGREE),
        (replace(ASYNC, has_stepped=False, joined_running=True), Fate.YIELD),
        (replace(ALONE, has_stepped=False, joined_running=True), Fate.YIELD),
        # It has stepped since it joined: what it sets now is meant.
        (replace(ALONE, joined_running=True), Fate.ASSIGN),
        (replace(ALONE, has_stepped=False, overlaps=True), Fate.ASSIGN),
    ],
)
def test_what_becomes_of_values_that_were_set(situation: Situation, fate: Fate) -> None:
    assert fate_of(Writes.ASSIGN, situation) is fate
    assert fate_of(Writes.REFUSE, situation) is Fate.REFUSE
    assert fate_of(Writes.IGNORE, situation) is Fate.IGNORE


def flatten(module: nn.Module) -> FlatModel:
    declaration = build_spec(torch.optim.SGD, module, {"lr": 0.1}, name="model")
    model = FlatModel(declaration.bindings, place(declaration.spec, 2))
    model.publish_parameters()
    model.publish_buffers()
    return model


def mixed() -> nn.ParameterList:
    """Sizes that are no whole words, a scalar, nothing, 16 bits, an order of its own."""
    return nn.ParameterList(
        [
            nn.Parameter(torch.randn(3)),
            nn.Parameter(torch.randn(4, 4)),
            nn.Parameter(torch.randn(())),
            nn.Parameter(torch.empty(0, 2)),
            nn.Parameter(torch.randn(5).bfloat16()),
            nn.Parameter(torch.randn(3, 2).t()),
        ]
    )


@pytest.mark.parametrize("number", [0, 1, 2, 4, 5])
@pytest.mark.parametrize("write", ["in place", "data", "numpy", "rebound"])
def test_every_way_to_set_a_value_is_found_in_the_first_steps(number: int, write: str) -> None:
    module = mixed()
    model = flatten(module)
    for _ in range(2):
        assert model.written() == ()
        parameter = module[number]
        if write == "in place":
            with torch.no_grad():
                parameter.copy_(parameter + 1)
        elif write == "data":
            parameter.data.add_(1)
        elif write == "numpy" and parameter.dtype is not torch.bfloat16:
            parameter.detach().numpy()[...] += 1
        else:
            parameter.data = parameter.data + 1
        assert model.written() == (number,)
        model.publish_parameters()


def test_memory_that_is_given_with_the_same_values_is_nothing_set() -> None:
    module = mixed()
    model = flatten(module)
    for parameter in module:
        parameter.data = parameter.data.clone()
    assert model.written() == ()


def test_a_line_that_sets_values_past_torch_is_found_later_too_and_then_in_every_step() -> None:
    module = nn.ParameterList([nn.Parameter(torch.randn(7)) for _ in range(100)])
    model = flatten(module)
    found = []
    for _ in range(200):
        model.written()
        model.publish_parameters()
    for _ in range(200):
        module[90].data.add_(1)
        found.append(model.written())
        model.publish_parameters()
    first = found.index((90,))
    assert found[first:] == [(90,)] * (200 - first)


def test_buffers_that_changed_are_known() -> None:
    module = nn.BatchNorm1d(3)
    model = flatten(module)
    assert model.changed_buffers() == ()
    module.running_mean.add_(1)
    assert model.changed_buffers() == (2,)
    model.buffers_sent()
    module.running_var = torch.ones(3)
    assert model.changed_buffers() == (3,)
    model.publish_buffers()
    assert model.changed_buffers() == ()


def optimizer_of(session: FakeSession, module: nn.Module, **style: object) -> PsOptimizer:
    return declare_optimizer(session, torch.optim.SGD, module, {"lr": 1.0}, name="model", style=Style(**style))[0]


def step(module: nn.Module, optimizer: PsOptimizer) -> None:
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()


def test_the_lowest_rank_that_does_not_come_is_waited_for_so_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assigned_values, "INITIAL_TIMEOUT_SECONDS", 0.01)
    with job() as session:
        first = nn.Linear(2, 2)
        optimizer_of(session, first)
        other = session.join(1)
        other.workers = session.workers = [0, 1]
        module = nn.Linear(2, 2)
        optimizer = optimizer_of(other, module)
        with torch.no_grad():
            module.weight.fill_(2)
        with pytest.raises(NotReady, match="has not set it in time"):
            step(module, optimizer)
        # The lowest rank leaves: this one is it.
        other.lowest, other.workers = True, [1]
        step(module, optimizer)
        assert bool((module.weight == 1).all())
        optimizer._model.close()
        other.close()


def test_in_async_before_training_what_the_lowest_rank_has_not_set_is_an_error() -> None:
    with job() as session:
        session.consistency = Consistency(Mode.ASYNC)
        first = nn.Linear(2, 2)
        mine = optimizer_of(session, first)
        other = session.join(1)
        other.workers, other.consistency = [0, 1], session.consistency
        module = nn.Linear(2, 2)
        optimizer = optimizer_of(other, module)
        nn.init.zeros_(module.bias)
        for shard in session.shards:
            shard.model.clocks = {0: (0, 1)}
        with pytest.raises(InvalidRequest, match="lowest rank has not set it") as caught:
            step(module, optimizer)
        assert caught.value.variable == "bias"
        for each in (mine, optimizer):
            each._model.close()
        other.close()
