"""A model that shards cannot optimize is refused with the reason, before it is placed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from ps_protocol.errors import InvalidRequest, PsError, UnsupportedOptimizer
from ps_protocol.model.optimizers import ELEMENTWISE, EXECUTION_HINTS, REFUSED, SHAPED
from ps_protocol.model.spec import DType, Kind, Variable
from ps_server.optimizers import catalog
from ps_server.optimizers.catalog import validate

from .models import ELEMENTWISE_CASES, SHAPED_CASES, spec_of


@pytest.mark.parametrize("name", sorted(ELEMENTWISE | SHAPED))
def test_every_listed_optimizer_is_accepted_with_its_defaults_and_any_execution_hint(name: str) -> None:
    options = dict.fromkeys(EXECUTION_HINTS, True)
    validate(spec_of(name.rpartition(".")[2], (DType.FLOAT32,), [options]))


def test_every_listed_optimizer_is_compared_with_torch_and_none_of_torchs_is_forgotten() -> None:
    assert {f"torch.optim.{name}" for name, _ in ELEMENTWISE_CASES} == ELEMENTWISE
    assert {f"torch.optim.{name}" for name, _ in SHAPED_CASES} == SHAPED
    classes = {
        f"torch.optim.{name}"
        for name, value in vars(torch.optim).items()
        if isinstance(value, type) and issubclass(value, torch.optim.Optimizer) and value is not torch.optim.Optimizer
    }
    assert classes <= ELEMENTWISE | SHAPED | REFUSED.keys()


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_a_refused_optimizer_is_refused_with_its_reason(name: str) -> None:
    with pytest.raises(UnsupportedOptimizer) as caught:
        validate(spec_of(name.rpartition(".")[2], (DType.FLOAT32,), [{}]))
    assert REFUSED[name] in str(caught.value)


@pytest.mark.parametrize("name", ["my.own.SGD", "torch.optim.Lion", "os.system", ""])
def test_an_unknown_optimizer_is_refused_with_the_list_of_known_ones(name: str) -> None:
    spec = replace(spec_of("SGD", (DType.FLOAT32,), [{}]), optimizer=name)
    with pytest.raises(UnsupportedOptimizer, match=r"torch\.optim\.Adam, .*torch\.optim\.SGD") as caught:
        validate(spec)
    assert f"'{name}'" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "options", "error", "says"),
    [
        ("SGD", [{"lr": -0.1}], UnsupportedOptimizer, "Invalid learning rate: -0.1"),
        ("SGD", [{"lr": 0.1}, {"lr": 0.1, "warmup": 3}], UnsupportedOptimizer, "unexpected keyword argument 'warmup'"),
        ("SGD", [{"nesterov": True}], UnsupportedOptimizer, "Nesterov momentum requires a momentum"),
        ("SGD", [{"decoupled_weight_decay": True}], UnsupportedOptimizer, "decoupled_weight_decay"),
        ("Adam", [{"betas": [0.9]}], UnsupportedOptimizer, "betas"),
        ("Adam", [{"betas": 0.9}], UnsupportedOptimizer, "betas"),
        ("Adam", [{"differentiable": True}], UnsupportedOptimizer, "differentiable"),
        ("Adagrad", [{"initial_accumulator_value": 0.1}, {}], UnsupportedOptimizer, "all parameter groups"),
        ("SGD", [], InvalidRequest, "no parameter group"),
    ],
)
def test_wrong_arguments_are_refused_in_torchs_own_words(
    name: str, options: list[dict[str, Any]], error: type[PsError], says: str
) -> None:
    spec = replace(spec_of(name, (DType.FLOAT32,), [{}]), group_options=tuple(options))
    with pytest.raises(error, match=says):
        validate(spec)


def test_a_variable_that_cannot_be_optimized_is_named() -> None:
    sgd, muon = spec_of("SGD", (DType.FLOAT32,), [{}]), spec_of("Muon", (DType.FLOAT32,), [{}])
    for spec, bad, error, says in (
        (sgd, Variable("steps", (2,), DType.INT64), UnsupportedOptimizer, "variable: steps.*actual: int64.*buffer"),
        (sgd, Variable("lost", (2,), DType.FLOAT32, group=3), InvalidRequest, "variable: lost"),
        (muon, Variable("bias", (4,), DType.FLOAT32), UnsupportedOptimizer, r"variable: bias.*shape \(4,\).*AdamW"),
    ):
        with pytest.raises(error, match=says):
            validate(replace(spec, variables=(*spec.variables, bad)))
        validate(replace(spec, variables=(*spec.variables, replace(bad, kind=Kind.BUFFER, group=0))))


def test_an_optimizer_that_reads_shapes_needs_whole_variables() -> None:
    with pytest.raises(InvalidRequest, match="unsplit"):
        validate(replace(spec_of("Adafactor", (DType.FLOAT32,), [{}]), unsplit=False))


@pytest.mark.parametrize(
    ("name", "dtype", "fused"),
    [
        ("SGD", DType.FLOAT32, True),
        ("Adam", DType.FLOAT64, True),
        ("SGD", DType.BFLOAT16, None),
        ("NAdam", DType.FLOAT32, None),
    ],
)
def test_torchs_fused_kernels_run_where_they_are_right(name: str, dtype: DType, fused: bool | None) -> None:
    spec = spec_of(name, (dtype,), [{"fused": False}])
    built = catalog.build(spec, [[torch.zeros(3)]], catalog.arguments_of(spec))
    assert built.param_groups[0].get("fused") is fused
