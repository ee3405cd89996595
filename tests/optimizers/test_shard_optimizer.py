"""What a shard's optimizer costs, what it leaves alone, and what it refuses."""

from __future__ import annotations

import gc

import pytest
import torch

from ps_protocol.errors import InvalidRequest, UnsupportedOptimizer
from ps_protocol.model.layout import Layout
from ps_protocol.model.spec import DType, ModelSpec, Options, ShardMap, Variable
from ps_server.optimizers.shard_optimizer import ShardOptimizer
from ps_server.state.region import Region

from .models import Shard, fill, spec_of, whole_layout

SGD = spec_of("SGD", (DType.FLOAT32,), [{"lr": 0.1, "momentum": 0.9}])


def storages(least_bytes: int) -> dict[int, int]:
    """Bytes of the large storages alive, by address."""
    gc.collect()
    tensors = [o for o in gc.get_objects() if type(o) in (torch.Tensor, torch.nn.Parameter)]
    found = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t.layout is torch.strided}
    return {address: size for address, size in found.items() if size >= least_bytes}


def test_a_model_takes_its_parameters_and_its_state_and_nothing_else_of_that_size() -> None:
    variables = tuple(Variable(f"w{i}", (1000, 25), DType.FLOAT32) for i in range(10))
    layout = whole_layout(ModelSpec("m", "torch.optim.SGD", variables, ({"lr": 0.1, "momentum": 0.9},)))
    least = layout.slices[0].end
    gradients = Region(layout)
    before = storages(least)
    shard = Shard.of(layout)
    for absent in (frozenset({3}), frozenset[int](), frozenset({5, 6}), frozenset[int]()):
        shard.optimizer.apply(gradients, absent)
    shard.optimizer.load_state(shard.saved()[1])
    after = storages(least)
    assert sorted(size for address, size in after.items() if address not in before) == [layout.region_bytes] * 2


def test_gradients_are_read_and_let_go() -> None:
    shard = Shard.of(whole_layout(SGD))
    gradients = Region(shard.region.layout)
    fill(gradients, torch.Generator().manual_seed(1))
    content = bytes(gradients.bytes)
    shard.optimizer.apply(gradients)
    assert bytes(gradients.bytes) == content
    fill(gradients, torch.Generator().manual_seed(2))
    momentum = [t.clone() for _, t in shard.optimizer.state()]
    gradients.data.zero_()
    assert all(torch.equal(a, b) for a, (_, b) in zip(momentum, shard.optimizer.state(), strict=True))


def test_a_step_in_which_all_is_absent_changes_nothing() -> None:
    shard = Shard.of(whole_layout(SGD))
    fill(shard.region, torch.Generator().manual_seed(1))
    gradients = Region(shard.region.layout)
    gradients.data.fill_(0xFF)
    before = bytes(shard.region.bytes)
    shard.optimizer.apply(gradients, frozenset(range(7)))
    assert (bytes(shard.region.bytes), shard.optimizer.state()) == (before, [])


def test_between_others_a_step_in_which_all_is_absent_leaves_state_alone_and_asks_torch_for_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shard = Shard.of(whole_layout(SGD))
    gradients = Region(shard.region.layout)
    fill(gradients, torch.Generator().manual_seed(1))
    shard.optimizer.apply(gradients)
    before, state = bytes(shard.region.bytes), [tensor.clone() for _, tensor in shard.optimizer.state()]
    with monkeypatch.context() as during:
        during.setattr(shard.optimizer, "_step", lambda scale: pytest.fail("torch makes a step"))
        shard.optimizer.apply(gradients, frozenset(range(7)), [{"lr": 0.5}])
    assert bytes(shard.region.bytes) == before
    assert all(torch.equal(a, b) for a, (_, b) in zip(state, shard.optimizer.state(), strict=True))
    with pytest.raises(UnsupportedOptimizer, match="Invalid learning rate"):
        shard.optimizer.apply(gradients, frozenset(range(7)), [{"lr": -1.0}])


def test_options_hold_for_their_step_and_no_options_mean_as_declared() -> None:
    shard = Shard.of(whole_layout(spec_of("SGD", (DType.FLOAT64,), [{"lr": 1.0}])))
    gradients = Region(shard.region.layout)
    gradients.arena(0).fill_(1.0)
    values = []
    for options, scale in (([{"lr": 0.25}], 1.0), ((), 0.5), ((), 1.0), ([{"weight_decay": 0.0}], 1.0)):
        shard.optimizer.apply(gradients, options=options, scale=scale)
        values.append(shard.region.arena(0)[0].item())
    assert values == [-0.25, -0.75, -1.75, -2.75]


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ([{"lr": -1.0}], UnsupportedOptimizer, "Invalid learning rate: -1.0"),
        ([{"lr": "fast"}], UnsupportedOptimizer, "fast"),
        ([{"rate": 1.0}], UnsupportedOptimizer, "unexpected keyword argument 'rate'"),
        ([{"nesterov": True}], InvalidRequest, "'nesterov' of group 0 cannot change"),
        ([{"momentum": 0.0}], InvalidRequest, "'momentum' of group 0 cannot change"),
        ([{"lr": 0.1}, {"lr": 0.1}], InvalidRequest, "expected: 1 groups; actual: 2 groups"),
    ],
)
def test_options_that_torch_would_fail_on_are_refused_before_anything_changes(
    options: list[Options], error: type[Exception], says: str
) -> None:
    shard = Shard.of(whole_layout(SGD))
    gradients = Region(shard.region.layout)
    fill(gradients, torch.Generator().manual_seed(1))
    with pytest.raises(error, match=says):
        shard.optimizer.apply(gradients, options=options)
    assert not any(shard.region.bytes)
    shard.optimizer.apply(gradients)
    assert any(shard.region.bytes)


def test_a_shard_without_parameters_steps_and_has_no_state() -> None:
    layout = Layout.of(ShardMap(1, SGD, 2, ()), 1)
    optimizer = ShardOptimizer(layout, Region(layout))
    optimizer.apply(Region(layout))
    optimizer.load_state([])
    assert optimizer.state() == []
