"""What becomes of values that a user sets, as a table; and how it is found that some were."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from ps_protocol.errors import InvalidRequest, NotReady
from ps_protocol.model.spec import Consistency, Mode
from ps_worker.memory import local_writes
from ps_worker.memory.flat import FlatModel
from ps_worker.model.declare import build_spec
from ps_worker.on_shards import declare_optimizer
from ps_worker.optimizer import PsOptimizer
from ps_worker.step.assigned_values import WriteAction, WriterState, action_of
from ps_worker.step.summary import StepSettings, Writes
from tests.worker.devices import HOST, ONE, TWO, Devices, mixed_module, placed
from tests.worker.fakes import FakeSession, job, place

ALONE = WriterState(
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
    ("state", "action"),
    [
        (ALONE, WriteAction.ASSIGN),
        (replace(ALONE, overlaps=True), WriteAction.REFUSE),
        (SYNC, WriteAction.ASSIGN),
        (replace(SYNC, is_lowest=False), WriteAction.AGREE),
        (replace(SYNC, consistency=Consistency(Mode.SYNC, backup=1)), WriteAction.REFUSE),
        (ASYNC, WriteAction.REFUSE),
        (replace(ASYNC, consistency=Consistency(Mode.SSP, 2)), WriteAction.REFUSE),
        (replace(ASYNC, has_stepped=False), WriteAction.ASSIGN),
        (replace(ASYNC, has_stepped=False, is_lowest=False), WriteAction.AGREE),
        (replace(ASYNC, has_stepped=False, joined_running=True), WriteAction.YIELD),
        (replace(ALONE, has_stepped=False, joined_running=True), WriteAction.YIELD),
        # It has stepped since it joined: what it sets now is meant.
        (replace(ALONE, joined_running=True), WriteAction.ASSIGN),
        (replace(ALONE, has_stepped=False, overlaps=True), WriteAction.ASSIGN),
    ],
)
def test_what_becomes_of_values_that_were_set(state: WriterState, action: WriteAction) -> None:
    assert action_of(Writes.ASSIGN, state) is action
    assert action_of(Writes.REFUSE, state) is WriteAction.REFUSE
    assert action_of(Writes.IGNORE, state) is WriteAction.IGNORE


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


@pytest.mark.parametrize("whole_bytes", [local_writes.WHOLE_BYTES, 0])
def test_a_variable_that_is_set_past_torch_is_found_at_the_very_step_in_any_step(
    whole_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_writes, "WHOLE_BYTES", whole_bytes)
    module = nn.ParameterList([*mixed(), nn.Parameter(torch.randn(300, 20)), nn.Parameter(torch.randn(1))])
    model = flatten(module)
    for step in range(80):
        model.publish_parameters((step // 50, step % 50))
        assert model.written() == ()
        if (number := step % len(module)) == 3:  # it has no values
            continue
        module[number].data.mul_(0.5)
        assert model.written() == (number,)


def test_a_write_that_no_sample_shows_is_found_when_it_is_repeated_and_then_in_every_step() -> None:
    module = nn.ParameterList([nn.Parameter(torch.randn(3000)) for _ in range(100)])
    model = flatten(module)
    for clock in range(1, 200):
        model.written()
        model.publish_parameters((0, clock))
    found = []
    for clock in range(200, 600):
        module[90].data[17] += 1
        found.append(model.written())
        model.publish_parameters((0, clock))
    first = found.index((90,))
    assert first > 0
    assert found[first:] == [(90,)] * (400 - first)


@torch.no_grad()
def swap(parameter: nn.Parameter) -> None:
    """Other values are put in, as for an evaluation, and the first ones back."""
    own = parameter.clone()
    parameter.mul_(0.5)
    parameter.copy_(own)


@pytest.mark.parametrize("number", [0, 1, 2, 3, 4, 5])
@pytest.mark.parametrize("whole_bytes", [local_writes.WHOLE_BYTES, 0])
def test_values_that_were_put_back_are_nothing_set(
    number: int, whole_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_writes, "WHOLE_BYTES", whole_bytes)
    module = mixed()
    model = flatten(module)
    for _ in range(10):
        swap(module[number])
        assert model.written() == ()
        if module[number].numel():
            with torch.no_grad():
                module[number][(-1,) * module[number].dim()] += 1
            assert model.written() == (number,)
        model.publish_parameters()


def test_values_put_back_in_a_large_model_are_known_in_the_first_steps_and_then_where_that_was_done_before() -> None:
    module = nn.ParameterList([nn.Parameter(torch.randn(300, 200)) for _ in range(2)])
    model = flatten(module)
    for clock in range(1, 60):
        swap(module[0])
        assert model.written() == ()
        assert model.unsure == frozenset()
        if clock in (10, 40):
            # Rows that change places, which a plain sum would not show.
            with torch.no_grad():
                module[0][:2] = module[0][:2].flip(0)
            assert model.written() == (0,)
            assert model.unsure == frozenset()
        model.publish_parameters((0, clock))
    swap(module[1])
    assert model.written() == (1,)
    assert model.unsure == {1}
    model.watch([1])
    model.publish_parameters((0, 60))
    swap(module[1])
    assert model.written() == ()
    # Samples show a write to a whole variable: nothing is unsure of it.
    model._written._watched.clear()
    model.publish_parameters((0, 61))
    model.publish_parameters((0, 62))
    with torch.no_grad():
        module[1].add_(1)
    assert model.written() == (1,)
    assert model.unsure == frozenset()


@pytest.mark.parametrize("devices", [(ONE,), (HOST, ONE)])
def test_values_put_back_on_a_device_are_nothing_set(devices: Devices) -> None:
    module = mixed_module()
    with placed(module, devices):
        model = flatten(module)
    for step in range(10):
        model.publish_parameters((0, step))
        for parameter in module.parameters():
            swap(parameter)
        # Of those on the host only the first steps are known.
        unknown = {n for n in range(6) if devices[n % len(devices)] == HOST} if step > 4 else set()
        assert set(model.written()) <= unknown
        if step > 4:
            number = 1
            with torch.no_grad():
                list(module.parameters())[number].reshape(-1)[-1:].add_(1)
            assert number in model.written()
            assert (number in model.unsure) == (devices[number % len(devices)] == HOST)


def test_all_processes_look_at_the_same_places() -> None:
    def looked_at() -> list[tuple[int, ...]]:
        module = nn.ParameterList([nn.Parameter(torch.zeros(100_000))])
        model, found = flatten(module), []
        for clock in range(1, 300):
            model.publish_parameters((0, clock))
            module[0].data[37 * clock : 37 * clock + 200] += 1
            found.append(model.written())
            model._written._watched.clear()
        return found

    one, other = looked_at(), looked_at()
    assert one == other
    assert 20 < sum(map(len, one)) < 280


@pytest.mark.parametrize("devices", [(ONE,), (HOST, ONE), (TWO, HOST, ONE, ONE)])
def test_what_is_set_on_a_device_is_found_without_waiting_for_it_at_first(devices: Devices) -> None:
    module = mixed_module()
    with placed(module, devices):
        model = flatten(module)
    module.p2.data = module.p2.data.t().contiguous().t()  # memory of its own
    parameters = list(module.parameters())
    for step in range(40):
        model.publish_parameters((0, step))
        if step < 4:  # sums are compared at once
            continue
        assert model.written() == ()
        number = step % len(parameters)
        if number == 5:
            continue
        parameters[number].data.add_(1)
        at_once = model.written(on_devices=False)
        if number == 2 or devices[number % len(devices)] == HOST:
            assert at_once == (number,)
            continue
        assert at_once in {(), (number,)}  # it is watched once it was found
        # What arrives meanwhile changes nothing about it.
        model.host_tensors([(0, model.plan.total_bytes)])[0].zero_()
        assert at_once or model.written_on_devices() == (number,)


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
    return declare_optimizer(session, torch.optim.SGD, module, {"lr": 1.0}, name="model", style=StepSettings(**style))[
        0
    ]


def step(module: nn.Module, optimizer: PsOptimizer) -> None:
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()


def test_the_lowest_rank_that_does_not_come_is_waited_for_so_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ps_protocol.times.LONG_PATIENCE_SECONDS", 0.01)
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
