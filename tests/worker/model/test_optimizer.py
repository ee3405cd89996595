"""The optimizer as torch's own tools see it, and against torch's own optimizer in one process."""

from __future__ import annotations

import copy
import gc
import logging
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ps_protocol.errors import NonFiniteGradient, UnsupportedOptimizer
from ps_worker.on_shards import declare_optimizer
from ps_worker.optimizer import PsOptimizer
from ps_worker.step.summary import Outcome
from tests.worker.fakes import FakeSession, job


@pytest.fixture
def session() -> Iterator[FakeSession]:
    with job(shards=2) as session:
        yield session


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 12), nn.Tanh(), nn.Linear(12, 9), nn.Tanh(), nn.Linear(9, 1))


def declare(
    session: FakeSession, model: Any, torch_class: type[torch.optim.Optimizer] = torch.optim.SGD, **arguments: Any
) -> PsOptimizer:
    policies = {k: arguments.pop(k) for k in ("nonfinite", "buffers") if k in arguments}
    return declare_optimizer(session, torch_class, model, {"lr": 0.1} | arguments, name="model", **policies)[0]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, seed: int = 0, scheduler: Any = None) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        x = torch.randn(8, 4, generator=generator)
        optimizer.zero_grad()
        (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()


def assert_same(model: nn.Module, reference: nn.Module) -> None:
    for found, expected in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


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


@pytest.mark.parametrize(("buffers", "rank", "sent"), [("rank0", 0, True), ("rank0", 1, False), ("average", 1, True)])
def test_buffers_are_sent_by_whom_the_policy_names(session: FakeSession, buffers: str, rank: int, sent: bool) -> None:
    session.rank = rank
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
    optimizer = declare(session, model, buffers=buffers)
    train(model, optimizer, 2)
    assert {p.with_buffers for s in session.shards for p in s.pushes} == {sent}


def test_a_pull_brings_the_buffers_of_rank_0(session: FakeSession) -> None:
    def batch_model() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))

    other = session.join(rank=1)
    mine, theirs = batch_model(), batch_model()
    optimizer = declare(session, mine)
    reader = declare(other, theirs)
    train(mine, optimizer, 3)
    assert theirs[1].num_batches_tracked == 0
    reader.pull()
    assert theirs[1].num_batches_tracked == 3
    for name, value in theirs.state_dict().items():
        torch.testing.assert_close(value, mine.state_dict()[name], rtol=0, atol=0)
    other.close()


@pytest.mark.parametrize(
    ("torch_class", "arguments"),
    [(torch.optim.SGD, {"momentum": 0.9}), (torch.optim.AdamW, {"lr": 0.01}), (torch.optim.SGD, {})],
)
def test_the_state_dict_continues_in_torch_and_back(
    session: FakeSession, torch_class: type[torch.optim.Optimizer], arguments: dict[str, Any]
) -> None:
    arguments = {"lr": 0.1} | arguments
    model, reference = network(), network()
    optimizer = declare(session, model, torch_class, **arguments)
    train(model, optimizer, 3)
    saved = optimizer.state_dict()
    assert len(optimizer.state) == 0

    reference.load_state_dict(model.state_dict())
    plain = torch_class(reference.parameters(), **arguments)
    plain.load_state_dict(saved)
    assert {k: list(v) for k, v in saved["state"].items()} == {
        k: list(v) for k, v in plain.state_dict()["state"].items()
    }
    train(model, optimizer, 2, seed=1)
    train(reference, plain, 2, seed=1)
    assert_same(model, reference)

    # And back: torch goes on alone, then the shards take over its state.
    with job(shards=2) as second:
        resumed = copy.deepcopy(reference)
        continued = declare(second, resumed, torch_class, **arguments)
        continued.load_state_dict(plain.state_dict())
        train(resumed, continued, 2, seed=2)
        train(reference, plain, 2, seed=2)
        assert_same(resumed, reference)


def test_a_loaded_learning_rate_is_used(session: FakeSession) -> None:
    model = network()
    optimizer = declare(session, model)
    saved = optimizer.state_dict()
    saved["param_groups"][0]["lr"] = 0.0
    optimizer.load_state_dict(saved)
    before = [p.detach().clone() for p in model.parameters()]
    train(model, optimizer, 1)
    for parameter, value in zip(model.parameters(), before, strict=True):
        torch.testing.assert_close(parameter, value, rtol=0, atol=0)


def test_a_worker_that_comes_back_to_a_trained_model_leaves_the_shards_state_alone(
    session: FakeSession, caplog: pytest.LogCaptureFixture
) -> None:
    model = network()
    optimizer = declare(session, model, momentum=0.9)
    empty = optimizer.state_dict()
    train(model, optimizer, 2)
    again = session.join(rank=0, incarnation=2)
    returned = declare(again, network(1), momentum=0.9)
    returned.load_state_dict(empty)
    assert "shards keep their optimizer state" in caplog.text
    assert len(optimizer.state_dict()["state"]) == 6
    again.close()


def test_only_the_lowest_rank_sends_loaded_state(session: FakeSession) -> None:
    optimizer = declare(session, network(), momentum=0.9)
    other = session.join(rank=1)
    second = declare(other, network(), momentum=0.9)
    loads = [s.loads for s in session.shards]
    second.load_state_dict(second.state_dict())
    assert [s.loads for s in session.shards] == loads
    optimizer.load_state_dict(optimizer.state_dict())
    assert [s.loads for s in session.shards] == [n + 1 for n in loads]
    other.close()


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


def test_the_state_of_a_parameter_is_read_on_demand(session: FakeSession) -> None:
    model, reference = network(), network()
    optimizer = declare(session, model, torch.optim.Adam, lr=0.01)
    plain = torch.optim.Adam(reference.parameters(), lr=0.01)
    weight = model[0].weight
    assert weight not in optimizer.state
    assert optimizer.state[weight] == {}
    for _ in range(2):
        train(model, optimizer, 2)
        train(reference, plain, 2)
        for own, other in zip(model.parameters(), reference.parameters(), strict=True):
            found, expected = optimizer.state[own], plain.state[other]
            assert found.keys() == expected.keys()
            for name, value in expected.items():
                torch.testing.assert_close(found[name], value, rtol=0, atol=1e-6)
        assert weight in optimizer.state
        assert optimizer.state.get(weight).keys() == optimizer.state[weight].keys()
        assert len(optimizer.state) == 0
        optimizer.load_state_dict(optimizer.state_dict())


def test_the_state_of_what_is_no_parameter_is_an_error(session: FakeSession) -> None:
    optimizer = declare(session, network(), momentum=0.9)
    for stranger in (torch.zeros(3), "weight"):
        assert stranger not in optimizer.state
        assert optimizer.state.get(stranger, 5) == 5
        with pytest.raises(UnsupportedOptimizer, match="own parameters only"):
            optimizer.state[stranger]


def test_writing_the_state_is_an_error_that_names_the_remedy(session: FakeSession) -> None:
    model = network()
    optimizer = declare(session, model, momentum=0.9)
    train(model, optimizer, 1)
    weight = model[0].weight
    state = optimizer.state[weight]
    for write in (
        lambda: state.update(momentum_buffer=torch.zeros(1)),
        lambda: state.pop("momentum_buffer"),
        lambda: state.__setitem__("momentum_buffer", torch.zeros(1)),
        lambda: optimizer.state.__setitem__(weight, {}),
        lambda: optimizer.state.clear(),
        lambda: optimizer.state.pop(weight),
        lambda: optimizer.state.__delitem__(weight),
    ):
        with pytest.raises(UnsupportedOptimizer, match="cannot be written on a worker") as caught:
            write()
        assert "load_state_dict" in caught.value.remedy


def normalised() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))


@pytest.mark.parametrize("give", [lambda m: m.parameters(), lambda m: [{"params": list(m[2].parameters())}]])
def test_buffers_that_are_nobody_s_are_told_of_once_when_training_has_changed_them(
    session: FakeSession, caplog: pytest.LogCaptureFixture, give: Any
) -> None:
    model = normalised()
    model.register_buffer("positions", torch.arange(3))
    optimizer = declare(session, give(model))
    with caplog.at_level(logging.WARNING, "ps_worker"):
        train(model, optimizer, 2)
    told = [record.getMessage() for record in caplog.records if "buffers" in record.getMessage()]
    assert len(told) == 1
    assert "1.running_mean, 1.running_var, 1.num_batches_tracked, which" in told[0]
    assert "positions" not in told[0]
    assert "module=model" in told[0]


@pytest.mark.parametrize("settings", [{"module": True}, {"buffers": "local"}, {"whole": True}, {"frozen": True}])
def test_nothing_is_said_of_buffers_that_have_an_owner(
    session: FakeSession, caplog: pytest.LogCaptureFixture, settings: dict[str, Any]
) -> None:
    model = normalised().train(not settings.pop("frozen", False))
    if settings.pop("module", False):
        settings["module"] = model
    optimizer, _ = declare_optimizer(
        session,
        torch.optim.SGD,
        model if settings.pop("whole", False) else model.parameters(),
        {"lr": 0.1},
        name="model",
        **settings,
    )
    with caplog.at_level(logging.WARNING, "ps_worker"):
        train(model, optimizer, 2)
    assert [record for record in caplog.records if "buffers" in record.getMessage()] == []


def test_more_buffers_than_a_line_holds_are_counted(session: FakeSession, caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(*normalised(), nn.BatchNorm1d(1))
    optimizer = declare(session, model.parameters())
    train(model, optimizer, 1)
    assert "1.num_batches_tracked and 3 more, which" in caplog.text


def test_a_module_that_is_gone_has_no_buffers_to_tell_of(
    session: FakeSession, caplog: pytest.LogCaptureFixture
) -> None:
    model = normalised()
    weight = model[0].weight
    optimizer = declare(session, [weight])
    del model
    gc.collect()
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    assert "buffers" not in caplog.text
