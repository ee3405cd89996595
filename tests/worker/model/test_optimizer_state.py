"""Optimizer state between torch's form and the shards' slices."""

from __future__ import annotations

import pytest
import torch

from ps_protocol.errors import InvalidRequest
from ps_protocol.model.layout import Layout
from ps_protocol.model.spec import DType, ModelSpec, Variable
from ps_worker.model.optimizer_state import join_state, split_state, tensor_bytes
from tests.worker.fakes import place

SHAPES = ((9, 2), (3,), (), (30,))


def layouts(shards: int = 3) -> list[Layout]:
    variables = tuple(Variable(f"v{i}", shape, DType.FLOAT32) for i, shape in enumerate(SHAPES))
    shard_map = place(ModelSpec("model", "torch.optim.Adam", variables, ({},)), shards)
    return [Layout.of(shard_map, i) for i in range(shards)]


def test_state_split_over_shards_and_joined_again_is_the_same() -> None:
    state = {
        i: {"exp_avg": torch.randn(shape), "step": torch.tensor(float(i))} for i, shape in enumerate(SHAPES) if i != 1
    }
    found = join_state(layouts(), [split_state(layout, state) for layout in layouts()])
    assert found.keys() == state.keys()
    for number, values in state.items():
        assert list(found[number]) == list(values)
        for name, value in values.items():
            torch.testing.assert_close(found[number][name], value, rtol=0, atol=0)


def test_a_scalar_goes_with_every_slice_of_a_variable() -> None:
    entries = [split_state(layout, {0: {"step": torch.tensor(5.0)}}) for layout in layouts()]
    assert [len(of_shard) for of_shard in entries] == [1, 1, 1]
    assert all(of_shard[0].tensor.item() == 5.0 for of_shard in entries)


def test_a_python_number_becomes_a_tensor_and_none_is_left_out() -> None:
    (entry,) = split_state(layouts(1)[0], {1: {"step": 4, "momentum_buffer": None}})
    assert entry.name == "step"
    assert entry.tensor.item() == 4.0


def test_state_of_a_whole_variable_may_have_another_shape() -> None:
    (entry,) = split_state(layouts(1)[0], {0: {"row_var": torch.randn(9, 1)}})
    assert tuple(entry.tensor.shape) == (9, 1)


@pytest.mark.parametrize("value", [torch.zeros(4, 2), "text"])
def test_state_that_does_not_fit_its_variable_is_named(value: object) -> None:
    with pytest.raises(InvalidRequest) as caught:
        split_state(layouts()[0], {0: {"exp_avg": value}})
    assert caught.value.variable == "v0"


def test_the_bytes_of_a_tensor_are_a_writable_view_of_it() -> None:
    tensor = torch.zeros((), dtype=torch.bfloat16)
    tensor_bytes(tensor)[:] = torch.ones((1,), dtype=torch.bfloat16).view(torch.uint8).numpy().tobytes()
    assert tensor.item() == 1.0
