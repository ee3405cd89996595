"""Small models on shards, their twins in plain torch, and hypothesis strategies for what can happen to them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from ps_protocol.model.layout import Layout
from ps_protocol.model.optimizers import SHAPED
from ps_protocol.model.spec import DType, Kind, ModelSpec, Options, ShardMap, Slice, Variable
from ps_server.optimizers.shard_optimizer import ShardOptimizer
from ps_server.optimizers.state import StateEntry
from ps_server.state.region import Region, torch_dtype

#: Sizes around and above a vector register, a scalar and an empty variable.
SHAPES = ((5, 7), (), (33,), (0, 3), (2, 3, 4), (1,), (16,))
MATRICES = ((5, 7), (6, 2), (3, 3), (1, 4))

#: Class name, arguments of its groups.
ELEMENTWISE_CASES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("SGD", {"lr": 0.1}),
    ("SGD", {"lr": 0.1, "weight_decay": 0.1, "maximize": True}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "dampening": 0.3}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    ("Adam", {"lr": 0.01}),
    ("Adam", {"lr": 0.01, "betas": [0.8, 0.95], "amsgrad": True, "weight_decay": 0.1}),
    ("AdamW", {"lr": 0.01, "weight_decay": 0.1}),
    ("AdamW", {"lr": 0.01, "amsgrad": True, "maximize": True, "decoupled_weight_decay": True}),
    ("Adagrad", {"lr": 0.05, "initial_accumulator_value": 0.1}),
    ("Adagrad", {"lr": 0.05, "lr_decay": 0.1, "weight_decay": 0.1, "maximize": True}),
    ("Adadelta", {"lr": 1.0, "weight_decay": 0.01}),
    ("Adamax", {"lr": 0.01, "weight_decay": 0.1}),
    ("ASGD", {"lr": 0.05, "t0": 2, "lambd": 0.01}),
    ("NAdam", {"lr": 0.01, "weight_decay": 0.1, "decoupled_weight_decay": True}),
    ("RAdam", {"lr": 0.01, "weight_decay": 0.1}),
    ("RMSprop", {"lr": 0.01}),
    ("RMSprop", {"lr": 0.01, "momentum": 0.9, "centered": True, "weight_decay": 0.1}),
    ("Rprop", {"lr": 0.01, "etas": [0.4, 1.3]}),
)
SHAPED_CASES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("Adafactor", {"lr": 0.05}),
    ("Adafactor", {"lr": 0.05, "eps": [None, 0.01], "weight_decay": 0.1, "maximize": True}),
    ("Muon", {"lr": 0.05}),
    ("Muon", {"lr": 0.05, "nesterov": False, "adjust_lr_fn": "match_rms_adamw"}),
)


def case_id(value: object) -> str:
    return value if isinstance(value, str) else ",".join(value) if isinstance(value, dict) else repr(value)


def spec_of(name: str, dtypes: Sequence[DType], options: Sequence[Options]) -> ModelSpec:
    """Variable i has ``dtypes[i % …]`` and is in group i % groups."""
    shapes = MATRICES if name == "Muon" else SHAPES
    variables = tuple(
        Variable(f"v{i}", shape, dtypes[i % len(dtypes)], Kind.PARAMETER, i % len(options))
        for i, shape in enumerate(shapes)
    )
    optimizer = f"torch.optim.{name}"
    return ModelSpec("model", optimizer, variables, tuple(options), unsplit=optimizer in SHAPED)


def whole_layout(spec: ModelSpec) -> Layout:
    slices = tuple(Slice(i, 0, v.rows, 0) for i, v in enumerate(spec.variables))
    return Layout.of(ShardMap(1, spec, 1, slices), 0)


def fill(region: Region, generator: torch.Generator) -> None:
    """Random parameters; padding stays zero, as the sender of a region leaves it."""
    for index in range(region.layout.parameter_slices):
        values = region.slice(index)
        values.copy_(torch.randn(values.shape, generator=generator))


@dataclass
class Shard:
    """A region and the optimizer over it."""

    region: Region
    optimizer: ShardOptimizer

    @classmethod
    def of(cls, layout: Layout, values: bytes | None = None) -> Shard:
        region = Region(layout)
        if values is not None:
            region.bytes[:] = values
        return cls(region, ShardOptimizer(layout, region))

    def saved(self) -> tuple[bytes, list[StateEntry]]:
        return bytes(self.region.bytes), [(key, tensor.clone()) for key, tensor in self.optimizer.state()]


class Twin:
    """The same model as plain torch would train it: one parameter per variable, torch's default implementation."""

    def __init__(self, region: Region) -> None:
        spec = region.layout.shard_map.spec
        self.parameters = {i: region.slice(i).clone() for i in range(len(region.layout.slices))}
        groups = [
            {**arguments(options), "params": [p for i, p in self.parameters.items() if self._group(region, i) == g]}
            for g, options in enumerate(spec.group_options)
        ]
        cls = getattr(torch.optim, spec.optimizer.rpartition(".")[2])
        defaults = {k: v for k, v in arguments(spec.group_options[0]).items() if k == "initial_accumulator_value"}
        self.optimizer = cls(groups, **defaults)

    @staticmethod
    def _group(region: Region, index: int) -> int:
        return region.layout.slices[index].variable.group

    def step(self, gradients: Region, absent: frozenset[int], options: Sequence[Options], scale: float) -> None:
        for index, parameter in self.parameters.items():
            # torch's Adafactor divides by the size of a variable.
            gone = index in absent or not parameter.numel()
            parameter.grad = None if gone else gradients.slice(index).clone()
        for group, changed in zip(self.optimizer.param_groups, options, strict=True):
            group.update(arguments(changed))
            group["lr"] *= scale
        self.optimizer.step()


def arguments(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in options.items()}


@dataclass(frozen=True)
class Step:
    """One push: what it lacks, with which learning rates, scaled by how much."""

    absent: frozenset[int]
    rates: tuple[float, float]
    scale: float

    def options(self, spec: ModelSpec) -> list[Options]:
        return [
            {**declared, "lr": float(declared["lr"]) * rate}  # type: ignore[arg-type]
            for declared, rate in zip(spec.group_options, self.rates, strict=False)
        ]


def steps(least: int = 1, most: int = 6) -> st.SearchStrategy[list[Step]]:
    """Few distinct patterns of absence, so that slices part and meet again."""
    absent = st.one_of(st.just(frozenset[int]()), st.frozensets(st.integers(0, len(SHAPES) - 1)))
    rate = st.sampled_from([1.0, 0.5, 0.1])
    step = st.builds(Step, absent, st.tuples(rate, rate), st.sampled_from([1.0, 1.0, 0.5]))
    return st.lists(step, min_size=least, max_size=most)


def run(shard: Shard, gradients: Region, step: Step) -> None:
    shard.optimizer.apply(gradients, step.absent, step.options(shard.region.layout.shard_map.spec), step.scale)


def close(actual: Tensor, expected: Tensor, dtype: DType) -> None:
    tolerance = {DType.FLOAT64: 1e-12, DType.FLOAT32: 1e-6, DType.FLOAT16: 1e-2, DType.BFLOAT16: 6e-2}[dtype]
    assert actual.dtype == torch_dtype(dtype)
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance, equal_nan=True)
