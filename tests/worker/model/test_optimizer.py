"""The optimizer as torch's own tools see it, and against torch's own optimizer in one process."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data import DataLoader, TensorDataset

from ps_protocol.errors import NonFiniteGradient, UnsupportedOptimizer
from ps_worker import Outcome
from tests.worker.fakes import FakeSession
from tests.worker.model.optimizers import assert_same, declare, network, train


@pytest.mark.parametrize(
    ("torch_class", "arguments"),
    [(torch.optim.SGD, {"momentum": 0.9}), (torch.optim.Adam, {"lr": 0.01}), (torch.optim.Adagrad, {})],
)
def test_one_worker_trains_as_torch_does(
    session: FakeSession, torch_class: type[torch.optim.Optimizer], arguments: dict[str, Any]
) -> None:
    model, reference = network(), network()
    optimizer = declare(session, model, torch_class, **arguments)
    train(model, optimizer, 5)
    train(reference, torch_class(reference.parameters(), **({"lr": 0.1} | arguments)), 5)
    assert_same(model, reference)
    assert optimizer.version == 5
    assert optimizer.last is not None
    assert optimizer.last.outcome is Outcome.APPLIED


def test_a_learning_rate_scheduler_reaches_the_shards(session: FakeSession) -> None:
    model, reference = network(), network()
    optimizer = declare(session, model, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.2, total_steps=10)
    train(model, optimizer, 5, scheduler=scheduler)
    plain = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
    train(reference, plain, 5, scheduler=torch.optim.lr_scheduler.OneCycleLR(plain, max_lr=0.2, total_steps=10))
    assert_same(model, reference)


def test_parameter_groups_keep_their_own_options(session: FakeSession) -> None:
    model, reference = network(), network()

    def groups(module: nn.Sequential) -> list[dict[str, Any]]:
        return [{"params": module[0].parameters()}, {"params": module[2:].parameters(), "lr": 0.01, "momentum": 0.5}]

    train(model, declare(session, groups(model)), 4)
    train(reference, torch.optim.SGD(groups(reference), lr=0.1), 4)
    assert_same(model, reference)


def test_gradients_accumulate_clip_and_scale_as_with_torch(session: FakeSession) -> None:
    model, reference = network(), network()
    plain = torch.optim.SGD(reference.parameters(), lr=0.1)
    for module, optimizer in ((model, declare(session, model)), (reference, plain)):
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        for x in torch.ones(3, 2, 4).unbind():
            scaler.scale(module(x).sum()).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(module.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
    assert_same(model, reference)


def test_a_closure_is_evaluated_with_gradients_and_its_loss_returned(session: FakeSession) -> None:
    model = network()
    optimizer = declare(session, model)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(1, 4)).sum()
        loss.backward()
        return loss

    before = model(torch.ones(1, 4)).item()
    assert optimizer.step(closure).item() == pytest.approx(before)
    assert model(torch.ones(1, 4)).item() < before


def test_step_hooks_run(session: FakeSession) -> None:
    model, calls = network(), []
    optimizer = declare(session, model)
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    train(model, optimizer, 2)
    assert calls == ["after", "after"]


def test_hooks_for_all_optimizers_run(session: FakeSession) -> None:
    model, calls = network(), []
    optimizer = declare(session, model)

    def called(stepped: torch.optim.Optimizer, *_: object) -> None:
        if stepped is optimizer:
            calls.append("before")

    train(model, optimizer, 1)
    hook = register_optimizer_step_pre_hook(called)
    try:
        train(model, optimizer, 2)
    finally:
        hook.remove()
    train(model, optimizer, 1)
    assert calls == ["before", "before"]


def test_a_profiler_sees_the_step_of_an_optimizer(session: FakeSession) -> None:
    model = network()
    optimizer = declare(session, model)
    with torch.autograd.profiler.profile() as profile:
        train(model, optimizer, 2)
    [seen] = [event for event in profile.key_averages() if event.key.startswith("Optimizer.step#")]
    assert seen.count == 2


def test_a_step_records_no_gradients_and_leaves_recording_as_it_was(session: FakeSession) -> None:
    model, recorded = network(), []
    optimizer = declare(session, model)
    optimizer.register_step_pre_hook(lambda *_: recorded.append(torch.is_grad_enabled()))
    train(model, optimizer, 1)
    assert torch.is_grad_enabled()
    with torch.no_grad():
        optimizer.step()
        assert not torch.is_grad_enabled()
    assert recorded == [False, False]


def test_a_nonfinite_gradient_is_refused_by_name_and_nothing_is_sent(session: FakeSession) -> None:
    model = network()
    optimizer = declare(session, model)
    (model(torch.ones(1, 4)).sum() * float("nan")).backward()
    with pytest.raises(NonFiniteGradient, match="nothing was sent") as caught:
        optimizer.step()
    assert caught.value.variable == "0.weight"
    assert all(shard.pushes == [] for shard in session.shards)
    train(model, optimizer, 1)
    assert optimizer.version == 1


def test_a_nonfinite_gradient_is_skipped_by_policy(session: FakeSession) -> None:
    model = network()
    optimizer = declare(session, model, nonfinite="skip")
    (model(torch.ones(1, 4)).sum() * float("inf")).backward()
    optimizer.step()
    assert optimizer.last.outcome is Outcome.SKIPPED
    assert optimizer.version == 0


def test_a_nonfinite_gradient_is_sent_when_allowed(session: FakeSession) -> None:
    model = network()
    optimizer = declare(session, model, nonfinite="allow")
    (model(torch.ones(1, 4)).sum() * float("nan")).backward()
    optimizer.step()
    assert model[0].weight.isnan().all()


def test_frozen_and_unused_parameters_stay_as_they_are(session: FakeSession) -> None:
    model, reference = network(), network()
    for module in (model, reference):
        module[2].weight.requires_grad_(False)
    train(model, declare(session, model, weight_decay=0.1), 3)
    train(reference, torch.optim.SGD(reference.parameters(), lr=0.1, weight_decay=0.1), 3)
    assert_same(model, reference)


def test_an_optimizer_is_neither_copied_nor_pickled(session: FakeSession) -> None:
    optimizer = declare(session, network())
    for attempt in (copy.deepcopy, pickle.dumps):
        with pytest.raises(UnsupportedOptimizer, match="neither copied nor pickled"):
            attempt(optimizer)


def test_it_shows_itself_as_torch_does(session: FakeSession) -> None:
    text = repr(declare(session, network()))
    assert text.startswith("SGD on 2 shards (\nParameter Group 0\n")
    assert "lr: 0.1" in text


def test_forked_data_loader_workers_do_not_disturb_the_streams(session: FakeSession) -> None:
    model = network()
    optimizer = declare(session, model)
    loader = DataLoader(TensorDataset(torch.randn(16, 4)), batch_size=8, num_workers=1)
    for _ in range(2):
        for (x,) in loader:
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()
    assert optimizer.version == 4
    assert [len(s.opens) for s in session.shards] == [1, 1]


def test_a_refused_declaration_leaves_the_model_untouched(session: FakeSession) -> None:
    model = network()
    pointers = [p.data_ptr() for p in model.parameters()]
    with pytest.raises(UnsupportedOptimizer):
        declare(session, model, lr=-1.0)
    assert [p.data_ptr() for p in model.parameters()] == pointers
    assert session.shards == []


def test_a_whole_step_is_compiled_around_the_optimizer_and_refused_with_the_remedy_as_one_graph(
    session: FakeSession,
) -> None:
    model = nn.Linear(4, 1)
    optimizer = declare(session, model)

    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    with pytest.raises(
        torch._dynamo.exc.Unsupported, match="compile the model and the loss, or the whole step without"
    ):
        torch.compile(step, backend="eager", fullgraph=True)(torch.ones(2, 4))
    before = model.weight.detach().clone()
    torch.compile(step, backend="eager")(torch.ones(2, 4))
    assert not torch.equal(model.weight, before)
