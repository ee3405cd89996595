"""A shard updates a flat arena as plain torch updates its variables one by one, whatever is absent."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ps_protocol.model.spec import DType
from tests.support.length import examples

from .models import (
    ELEMENTWISE_CASES,
    SHAPED_CASES,
    Shard,
    Step,
    Twin,
    case_id,
    close,
    fill,
    run,
    spec_of,
    steps,
    whole_layout,
)

DTYPES = st.sampled_from(
    [
        (DType.FLOAT32,),
        (DType.FLOAT64,),
        (DType.FLOAT16,),
        (DType.BFLOAT16,),
        (DType.FLOAT32, DType.BFLOAT16, DType.FLOAT64),
    ]
)


def compare(name: str, options: list[dict[str, Any]], dtypes: tuple[DType, ...], pushes: list[Step], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    if {DType.FLOAT16, DType.BFLOAT16} & set(dtypes) and name not in ("SGD", "ASGD", "Rprop"):
        # torch's default eps is below the resolution of 16 bits: quotients of rounding errors would be compared.
        options = [{**group, "eps": 0.1} for group in options]
    shard = Shard.of(whole_layout(spec_of(name, dtypes, options)))
    fill(shard.region, generator)
    twin = Twin(shard.region)
    gradients = type(shard.region)(shard.region.layout)
    for push in pushes:
        fill(gradients, generator)
        run(shard, gradients, push)
        twin.step(gradients, push.absent, push.options(shard.region.layout.shard_map.spec), push.scale)
    for index, parameter in twin.parameters.items():
        close(shard.region.slice(index), parameter, shard.region.layout.slices[index].variable.dtype)
    state = {(key.slice_index, key.name): tensor for key, tensor in shard.optimizer.state()}
    expected = {
        (index, name): tensor
        for index, parameter in twin.parameters.items()
        if parameter.numel()
        for name, tensor in twin.optimizer.state.get(parameter, {}).items()
    }
    assert state.keys() == expected.keys()
    for key, tensor in expected.items():
        assert state[key].shape == tensor.shape
        if tensor.dim() == 0 and key[1] == "step":
            assert state[key].item() == tensor.item()


@pytest.mark.parametrize(("name", "options"), ELEMENTWISE_CASES, ids=case_id)
@examples(12)
@given(dtypes=DTYPES, pushes=steps(), seed=st.integers(0, 9))
def test_an_elementwise_optimizer_steps_a_flat_arena_as_torch_steps_its_variables(
    name: str, options: dict[str, Any], dtypes: tuple[DType, ...], pushes: list[Step], seed: int
) -> None:
    compare(name, [options], dtypes, pushes, seed)


@pytest.mark.parametrize(("name", "options"), SHAPED_CASES, ids=case_id)
@examples(6)
@given(pushes=steps(), seed=st.integers(0, 9))
def test_an_optimizer_that_reads_shapes_steps_whole_variables(
    name: str, options: dict[str, Any], pushes: list[Step], seed: int
) -> None:
    compare(name, [options], (DType.FLOAT32,), pushes, seed)


@pytest.mark.parametrize("name", ["SGD", "AdamW", "Adagrad", "NAdam", "Adafactor"])
@examples(8)
@given(pushes=steps(), seed=st.integers(0, 9))
def test_groups_keep_their_own_options(name: str, pushes: list[Step], seed: int) -> None:
    options = [{"lr": 0.1, "weight_decay": 0.1}, {"lr": 0.02, "weight_decay": 0.0}]
    compare(name, options, (DType.FLOAT32, DType.FLOAT64), pushes, seed)
