"""The optimizer as torch's own tools see it, and against torch's own optimizer in one process."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data import DataLoader, TensorDataset

from ps_protocol.errors import NonFiniteGradient, UnsupportedOptimizer
from ps_worker import Outcome
from tests.worker.fakes import FakeSession
from tests.worker.model.optimizers import declare, network, train


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
