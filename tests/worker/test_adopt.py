"""A torch optimizer that was built before the cluster took it over. In one process, about 2 s."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

from ps_protocol.errors import ConfigError, InvalidRequest, PsError, UnsupportedOptimizer
from ps_worker import Outcome
from ps_worker.on_shards import adopt_optimizer
from ps_worker.optimizer import PsOptimizer
from tests.support.length import paired
from tests.worker.fakes import FakeSession, job
from tests.worker.model.optimizers import assert_same, network

Build = Callable[[nn.Module], torch.optim.Optimizer]


def adopt(session: FakeSession, optimizer: Any, model: Any, schedulers: Any = (), **arguments: Any) -> PsOptimizer:
    return adopt_optimizer(session, optimizer, model, schedulers, name="model", **arguments)[0]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, seed: int = 0, scheduler: Any = None) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        x = torch.randn(8, 4, generator=generator)
        optimizer.zero_grad()
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
            scheduler.step(loss.item())
        elif scheduler is not None:
            scheduler.step()


def two_groups(model: nn.Module) -> torch.optim.Optimizer:
    first, *others = model.parameters()
    groups = [{"params": [first], "lr": 0.02, "weight_decay": 0.1}, {"params": others, "betas": (0.8, 0.9)}]
    return torch.optim.AdamW(groups, lr=0.01)


BUILT: list[Build] = [
    lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    lambda model: torch.optim.SGD(model.named_parameters(), lr=0.1, momentum=0.9, nesterov=True),
    lambda model: torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.01)),
    lambda model: torch.optim.Adam(model.parameters(), lr=0.01, fused=True, amsgrad=True),
    lambda model: torch.optim.Adagrad(model.parameters(), lr=0.1),
    two_groups,
]


@pytest.mark.parametrize("build", BUILT)
@pytest.mark.parametrize("steps_before", [0, 3])
def test_training_goes_on_with_the_state_that_the_optimizer_had(
    session: FakeSession, build: Build, steps_before: int
) -> None:
    model, reference = network(), network()
    optimizer, plain = build(model), build(reference)
    for each, own in ((model, optimizer), (reference, plain)):
        train(each, own, steps_before)
    groups, own_groups = optimizer.param_groups, list(optimizer.param_groups)
    adopted = adopt(session, optimizer, model)
    assert adopted is optimizer
    assert adopted.param_groups is groups
    assert all(a is b for a, b in zip(groups, own_groups, strict=True))
    train(model, adopted, 3, seed=1)
    train(reference, plain, 3, seed=1)
    assert_same(model, reference)
    assert adopted.version == 3
    found, expected = adopted.state_dict(), plain.state_dict()
    assert list(found) == list(expected)
    assert {n: set(state) for n, state in found["state"].items()} == {
        n: {name for name, value in state.items() if value is not None} for n, state in expected["state"].items()
    }
    assert [group.keys() for group in found["param_groups"]] == [group.keys() for group in expected["param_groups"]]


def test_it_is_an_optimizer_of_its_torch_class_and_of_the_cluster(session: FakeSession) -> None:
    model = network()
    adopted = adopt(session, torch.optim.AdamW(model.parameters(), lr=0.01), model)
    assert isinstance(adopted, torch.optim.AdamW)
    assert isinstance(adopted, PsOptimizer)
    assert not isinstance(adopted, torch.optim.SGD)
    assert repr(adopted).startswith("AdamW on 2 shards (\nParameter Group 0\n")


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: (1 + epoch) / 4),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.2, total_steps=20),
    "sequential": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=2), lr_scheduler.ExponentialLR(o, 0.7)], milestones=[2]
    ),
    "chained": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.1, total_iters=2), lr_scheduler.ExponentialLR(o, 0.7)], optimizer=o
    ),
    "plateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0, factor=0.3, threshold=1.0),
}


# Warnings are errors in these tests: those of torch's schedulers, too.
@pytest.mark.parametrize(("kind", "when"), paired(list(SCHEDULERS), ["before", "after", "not given"]))
def test_schedulers_go_on(session: FakeSession, kind: str, when: str) -> None:
    model, reference = network(), network()
    optimizer, plain = (torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (model, reference))
    expected = SCHEDULERS[kind](plain)
    if when == "after":
        scheduler = SCHEDULERS[kind](adopt(session, optimizer, model))
    else:
        scheduler = SCHEDULERS[kind](optimizer)
        adopt(session, optimizer, model, [scheduler] if when == "before" else ())
    train(model, optimizer, 6, scheduler=scheduler)
    train(reference, plain, 6, scheduler=expected)
    assert_same(model, reference)
    assert optimizer.param_groups[0]["lr"] == plain.param_groups[0]["lr"] != 0.1


def test_a_scheduler_warns_as_with_torch_when_it_comes_before_the_step(session: FakeSession) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler: LRScheduler = lr_scheduler.ExponentialLR(optimizer, 0.5)
    adopt(session, optimizer, model)
    with pytest.warns(UserWarning, match=r"before `optimizer\.step\(\)`"):
        scheduler.step()


def test_what_schedulers_have_changed_is_no_difference_between_workers() -> None:
    """A worker that comes back builds its optimizer again, or with the options of a later state."""
    specs = []
    for steps in (0, 5):
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        scheduler = SCHEDULERS["one cycle"](optimizer)
        train(model, optimizer, steps, scheduler=scheduler)
        with job() as own:
            specs.append(adopt(own, optimizer, model)._model.spec)
    assert specs[0] == specs[1]


def test_hooks_that_were_registered_are_called(session: FakeSession) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before the step"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after the step"))
    optimizer.register_state_dict_pre_hook(lambda _: calls.append("before saving"))
    optimizer.register_state_dict_post_hook(lambda _, saved: {**saved, "mine": 1})
    optimizer.register_load_state_dict_pre_hook(lambda _, saved: {k: saved[k] for k in ("state", "param_groups")})
    optimizer.register_load_state_dict_post_hook(lambda _: calls.append("loaded"))
    adopted = adopt(session, optimizer, model)
    train(model, adopted, 1)
    saved = adopted.state_dict()
    adopted.load_state_dict(saved)
    assert saved["mine"] == 1
    assert calls == ["before the step", "after the step", "before saving", "loaded"]


def test_loading_a_state_keeps_the_list_of_groups(session: FakeSession) -> None:
    model = network()
    adopted = adopt(session, torch.optim.SGD(model.parameters(), lr=0.1), model)
    groups, saved = adopted.param_groups, adopted.state_dict()
    saved["param_groups"][0]["lr"] = 0.5
    adopted.load_state_dict(saved)
    assert adopted.param_groups is groups
    assert groups[0]["lr"] == 0.5


def test_a_trained_job_keeps_its_state(session: FakeSession, caplog: pytest.LogCaptureFixture) -> None:
    model = network()
    adopted = adopt(session, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model)
    train(model, adopted, 2)
    before = adopted.state_dict()["state"]
    again, other = session.join(rank=0, incarnation=2), network(1)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9)
    train(other, optimizer, 3)
    returned = adopt(again, optimizer, other)
    assert "shards keep their optimizer state" in caplog.text
    for number, state in returned.state_dict()["state"].items():
        assert torch.equal(state["momentum_buffer"], before[number]["momentum_buffer"])
    assert_same(other, model)
    again.close()


def test_a_skipped_step_is_told_and_accelerate_alone_is_refused(session: FakeSession) -> None:
    model = network()
    adopted = adopt(session, torch.optim.SGD(model.parameters(), lr=0.1), model, nonfinite="skip")
    with pytest.raises(UnsupportedOptimizer, match="PsAccelerator"):
        getattr(adopted, "_is_accelerate_prepared", False)
    assert not adopted.step_was_skipped
    (model(torch.ones(1, 4)).sum() * float("inf")).backward()
    adopted.step()
    assert adopted.step_was_skipped
    train(model, adopted, 1)
    assert not adopted.step_was_skipped
    assert adopted.last is not None
    assert adopted.last.outcome is Outcome.APPLIED


def test_a_fused_optimizer_gets_unscaled_gradients(session: FakeSession) -> None:
    """A fused optimizer of torch unscales gradients itself, so that GradScaler leaves them scaled for it."""
    model, reference = network(), network()
    optimizer, plain = (torch.optim.Adam(m.parameters(), lr=0.01, eps=1e-3, fused=True) for m in (model, reference))
    adopt(session, optimizer, model)
    for each, own in ((model, optimizer), (reference, plain)):
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for _ in range(3):
            own.zero_grad()
            scaler.scale(each(torch.ones(2, 4)).square().sum()).backward()
            scaler.step(own)
            scaler.update()
    assert_same(model, reference)


def test_a_compiled_model_has_the_names_of_the_model_inside(session: FakeSession) -> None:
    model = network()
    compiled = torch.compile(model, backend="eager")
    adopted = adopt(session, torch.optim.SGD(compiled.parameters(), lr=0.1), compiled)
    assert [v.name for v in adopted._model.spec.variables] == [name for name, _ in model.named_parameters()]


class Wrapper(torch.optim.Optimizer):
    """As AcceleratedOptimizer."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer.param_groups, {})
        self.optimizer = optimizer


class DistributedDataParallel(nn.Module):
    """As torch's, which needs a process group."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


def replaced_step(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    lr_scheduler.ExponentialLR(optimizer, 0.5)
    inner = optimizer.step
    optimizer.step = lambda *arguments: inner(*arguments)  # type: ignore[method-assign]
    return optimizer


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


class OwnSGD(torch.optim.SGD):
    """A class of the user's."""


def wrong_state(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer.state[model[0].weight]["momentum_buffer"] = torch.zeros(3, 3)
    return optimizer


REFUSED: list[tuple[type[PsError], str, Callable[[nn.Module], Any]]] = [
    (UnsupportedOptimizer, "adopt.. takes an optimizer that has been built", lambda m: torch.optim.SGD),
    (UnsupportedOptimizer, "LBFGS cannot run on shards", lambda m: torch.optim.LBFGS(m.parameters())),
    (UnsupportedOptimizer, "SparseAdam cannot run on shards", lambda m: torch.optim.SparseAdam(m.parameters())),
    (UnsupportedOptimizer, "OwnSGD is not an optimizer that shards run", lambda m: OwnSGD(m.parameters())),
    (UnsupportedOptimizer, "Wrapper wraps another optimizer", lambda m: Wrapper(sgd(m))),
    (UnsupportedOptimizer, "'step' of this optimizer has been replaced", replaced_step),
    (
        UnsupportedOptimizer,
        "differentiable=True cannot run",
        lambda m: torch.optim.SGD(m.parameters(), lr=0.1, differentiable=True),
    ),
    (InvalidRequest, "6 of the optimizer's parameters are not of this model", lambda m: sgd(network(1))),
    (InvalidRequest, "does not have its parameter's shape", wrong_state),
]


@pytest.mark.parametrize(("error", "text", "build"), REFUSED)
def test_what_cannot_be_adopted_is_refused_and_nothing_is_declared(
    session: FakeSession, error: type[PsError], text: str, build: Callable[[nn.Module], Any]
) -> None:
    model = network()
    optimizer = build(model)
    with pytest.raises(error, match=text) as caught:
        adopt(session, optimizer, model)
    assert caught.value.remedy
    assert session.shards == []


def test_a_model_that_is_wrapped_for_other_processes_is_refused(session: FakeSession) -> None:
    wrapped = DistributedDataParallel(network())
    with pytest.raises(UnsupportedOptimizer, match="wrapped in DistributedDataParallel") as caught:
        adopt(session, sgd(wrapped), wrapped)
    assert "inside it" in caught.value.remedy
    assert session.shards == []


def test_what_is_no_model_is_refused(session: FakeSession) -> None:
    model = network()
    with pytest.raises(ConfigError, match="takes the model"):
        adopt(session, sgd(model), list(model.parameters()))


def test_an_optimizer_is_adopted_once(session: FakeSession) -> None:
    model = network()
    adopted = adopt(session, sgd(model), model)
    with pytest.raises(UnsupportedOptimizer, match="runs on the shards already, as that of model 'model'"):
        adopt(session, adopted, model)


def test_a_scheduler_of_another_optimizer_is_refused(session: FakeSession) -> None:
    model = network()
    inner = SCHEDULERS["sequential"](sgd(network()))
    for stranger in (inner, inner._schedulers[1], "cosine"):
        with pytest.raises(ConfigError, match="is not this optimizer's"):
            adopt(session, sgd(model), model, [stranger])
    assert session.shards == []


def test_an_optimizer_whose_declaration_failed_is_as_it_was(session: FakeSession) -> None:
    model, reference = network(), network()
    optimizer, plain = two_groups(model), two_groups(reference)
    for each, own in ((model, optimizer), (reference, plain)):
        train(each, own, 2)
    scheduler = lr_scheduler.ExponentialLR(optimizer, 0.5)

    def refuse(_: object) -> Any:
        raise InvalidRequest("no room")

    session.declare = refuse  # type: ignore[method-assign]
    with pytest.raises(InvalidRequest, match="no room"):
        adopt(session, optimizer, model)
    assert type(optimizer) is torch.optim.AdamW
    train(model, optimizer, 1, seed=1, scheduler=scheduler)
    train(reference, plain, 1, seed=1)
    assert_same(model, reference)
