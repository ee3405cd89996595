"""A step that calls torch's fused kernels itself gives torch's own bits."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ps_protocol.model.spec import DType
from ps_server.optimizers import shard_optimizer
from ps_server.optimizers.fused import FusedStep
from tests.support.length import examples

from .models import ELEMENTWISE_CASES, Shard, Step, arguments, case_id, fill, run, spec_of, steps, whole_layout

CASES = [(name, options) for name, options in ELEMENTWISE_CASES if name in ("SGD", "Adam", "AdamW")]
SIZES = (35, 1, 16)


def made(name: str, options: dict[str, Any], dtype: torch.dtype = torch.float32) -> torch.optim.Optimizer:
    generator = torch.Generator().manual_seed(3)
    parameters = [torch.randn(size, generator=generator, dtype=dtype) for size in SIZES]
    groups = [{"params": parameters[:2]}, {"params": []}, {"params": parameters[2:], "lr": 0.03}]
    given = {k: v for k, v in arguments(options).items() if (name, k) != ("AdamW", "decoupled_weight_decay")}
    return getattr(torch.optim, name)(groups, fused=True, **given)


def parameters_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def set_gradients(optimizer: torch.optim.Optimizer, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in parameters_of(optimizer):
        parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)


def everything(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    states = [optimizer.state[parameter] for parameter in parameters_of(optimizer) if parameter in optimizer.state]
    return [*parameters_of(optimizer), *(state[name] for state in states for name in sorted(state))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(("name", "options"), CASES, ids=case_id)
def test_it_gives_the_bits_of_torchs_step(name: str, options: dict[str, Any], dtype: torch.dtype) -> None:
    ours, theirs = made(name, options, dtype), made(name, options, dtype)
    for optimizer in (ours, theirs):
        set_gradients(optimizer, 0)
        optimizer.step()
    fused = FusedStep.of(ours)
    assert fused is not None
    for number, scale in enumerate((1.0, 0.5, 0.3), 1):
        for optimizer in (ours, theirs):
            set_gradients(optimizer, number)
            optimizer.param_groups[0]["lr"] = 0.2 / number
            optimizer.param_groups[0]["weight_decay"] = 0.01 * number
        fused.step([[parameter.grad for parameter in group["params"]] for group in ours.param_groups], scale)
        rates = [group["lr"] for group in theirs.param_groups]
        for group in theirs.param_groups:
            group["lr"] *= scale
        theirs.step()
        for group, rate in zip(theirs.param_groups, rates, strict=True):
            group["lr"] = rate
        for mine, expected in zip(everything(ours), everything(theirs), strict=True):
            assert torch.equal(mine, expected)


def test_torch_makes_the_step_where_there_is_no_state_yet() -> None:
    for name, options in CASES:
        keeps = name != "SGD" or "momentum" in options
        assert (FusedStep.of(made(name, options)) is None) == keeps


def test_torch_makes_the_step_of_other_classes_and_of_several_dtypes() -> None:
    value = torch.ones(3)
    assert FusedStep.of(torch.optim.Adagrad([value], fused=True)) is None
    assert FusedStep.of(torch.optim.SGD([value])) is None
    assert FusedStep.of(torch.optim.SGD([value, value.double()], fused=True)) is None
    subclass = type("SGD", (torch.optim.SGD,), {})
    assert FusedStep.of(subclass([value], fused=True)) is None


@pytest.mark.parametrize(("name", "options"), CASES, ids=case_id)
@examples(10)
@given(pushes=steps(most=8), restored=st.integers(0, 8), seed=st.integers(0, 9))
def test_a_shard_computes_the_same_with_it_and_without(
    name: str, options: dict[str, Any], pushes: list[Step], restored: int, seed: int
) -> None:
    """Whatever is absent in between, and with its state replaced once."""

    def trained() -> tuple[bytes, list[Tensor]]:
        generator = torch.Generator().manual_seed(seed)
        shard = Shard.of(whole_layout(spec_of(name, (DType.FLOAT32,), [options, {**options, "lr": 0.07}])))
        fill(shard.region, generator)
        gradients = type(shard.region)(shard.region.layout)
        for number, push in enumerate(pushes):
            if number == restored:
                shard.optimizer.load_state(shard.saved()[1])
            fill(gradients, generator)
            run(shard, gradients, push)
        values, state = shard.saved()
        return values, [tensor for _, tensor in state]

    values, state = trained()
    with patch.object(shard_optimizer.FusedStep, "of", return_value=None):
        expected_values, expected_state = trained()
    assert values == expected_values
    assert all(map(torch.equal, state, expected_state))
