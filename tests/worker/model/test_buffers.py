"""Which worker sends a model's buffers, and what is said of buffers that nobody sends."""

from __future__ import annotations

import gc
import logging
from typing import Any

import pytest
import torch
from torch import nn

from ps_protocol.errors import ConfigError
from ps_worker.on_shards import declare_optimizer
from tests.worker.fakes import FakeSession
from tests.worker.model.optimizers import declare, train


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


class Quantized(nn.Module):
    """A codebook that forward keeps, as VQ-VAE's by moving averages, a counter, and statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.net = normalised()
        self.vq = nn.Module()
        self.vq.register_buffer("codebook", torch.zeros(3))
        self.vq.register_buffer("steps", torch.tensor(0))
        self.register_buffer("constant", torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.vq.codebook.data.lerp_(x.mean() + torch.arange(3), 0.5)
        self.vq.steps += 1
        return self.net(x)


@pytest.mark.parametrize(
    ("workers", "buffers", "tells"),
    [(2, "rank0", True), (1, "rank0", False), (2, {"vq": "local"}, False), (2, {"vq.codebook": "rank0"}, False)],
)
def test_buffers_that_forward_writes_are_told_of_once(
    session: FakeSession,
    caplog: pytest.LogCaptureFixture,
    workers: int,
    buffers: Any,
    tells: bool,
) -> None:
    session.workers = tuple(range(workers))
    model = Quantized()
    optimizer = declare(session, model, buffers=buffers)
    with caplog.at_level(logging.WARNING, "ps_worker"):
        train(model, optimizer, 4)
    told = [record.getMessage() for record in caplog.records if "forward writes" in record.getMessage()]
    assert len(told) == tells
    if tells:
        assert "the buffers vq.codebook: each worker has its own" in told[0]
        assert 'buffers={"vq.codebook": "local"}' in told[0]


def test_buffers_are_kept_by_name(session: FakeSession) -> None:
    other = session.join(rank=1)
    mine, theirs = Quantized(), Quantized()
    settings = {"buffers": {"": "rank0", "vq": "local", "vq.steps": "rank0"}}
    optimizer, reader = declare(session, mine, **settings), declare(other, theirs, **settings)
    train(mine, optimizer, 3)
    reader.pull()
    assert theirs.vq.steps == mine.vq.steps == 3
    assert not theirs.vq.codebook.any()
    torch.testing.assert_close(theirs.net[1].running_mean, mine.net[1].running_mean)
    other.close()


@pytest.mark.parametrize(
    ("buffers", "text"),
    [
        ({"queue": "local"}, "names 'queue', and the model has no buffer of that name"),
        ({"vq": "average"}, "two policies for buffers that the cluster keeps"),
        ({"vq": "mine"}, r"unknown value for buffers\['vq'\]"),
    ],
)
def test_buffers_by_names_that_fit_nothing_are_refused(session: FakeSession, buffers: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        declare(session, Quantized(), buffers=buffers)


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


def test_a_module_whose_constructor_failed_is_not_looked_at(session: FakeSession) -> None:
    class Half(nn.Module):
        def __init__(self) -> None:
            raise ValueError("before torch's own constructor")

    half = Half.__new__(Half)
    with pytest.raises(ValueError, match="before"):
        half.__init__()
    around = nn.Sequential(half)
    model = normalised()
    optimizer = declare(session, model.parameters())
    assert optimizer.param_groups[0]["params"] == list(model.parameters())
    del around


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
