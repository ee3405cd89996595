"""The state of an optimizer on the shards: read, saved, loaded, and never written on a worker."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from ps_protocol.errors import UnsupportedOptimizer
from tests.worker.fakes import FakeSession, job
from tests.worker.model.optimizers import assert_same, declare, network, train


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
