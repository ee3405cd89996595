"""Jobs of a few shards in one process, saved to and restored from checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from hypothesis import strategies as st
from torch import Tensor

from ps_protocol.model.layout import Layout
from ps_protocol.model.optimizers import SHAPED
from ps_protocol.model.spec import DType, Kind, ModelSpec, Options, ShardMap, Variable
from ps_server.checkpoint.checkpoint import Checkpoint
from ps_server.checkpoint.commit import commit
from ps_server.checkpoint.directory import begin
from ps_server.checkpoint.model_reader import read_state, read_values
from ps_server.checkpoint.model_writer import write_part
from ps_server.checkpoint.record import ShardPart
from ps_server.coordinator.placement.variables import Balanced, FixedShards, PartitionRule, place
from ps_server.state.region import Region, torch_dtype
from tests.optimizers.models import Shard

SHAPES = ((), (1,), (0, 3), (3, 0), (7,), (40,), (5, 7), (12, 2, 3), (64, 3))
FLOATS = (DType.FLOAT32, DType.FLOAT64, DType.FLOAT16, DType.BFLOAT16)

OPTIMIZERS: dict[str, Options] = {
    "SGD": {"lr": 0.1, "momentum": 0.9},
    "Adam": {"lr": 0.01, "amsgrad": True},
    "Adagrad": {"lr": 0.05, "initial_accumulator_value": 0.1},
    "Adafactor": {"lr": 0.05},
}


def spec_of(optimizer: str, variables: Sequence[Variable], name: str = "model") -> ModelSpec:
    full = f"torch.optim.{optimizer}"
    return ModelSpec(name, full, tuple(variables), (OPTIMIZERS[optimizer],), unsplit=full in SHAPED)


def small_spec(optimizer: str = "Adam", name: str = "model") -> ModelSpec:
    variables = [Variable(f"layer.{i}", shape, DType.FLOAT32) for i, shape in enumerate(SHAPES)]
    return spec_of(optimizer, [*variables, Variable("count", (9,), DType.INT64, Kind.BUFFER)], name)


@st.composite
def specs(draw: st.DrawFn) -> ModelSpec:
    optimizer = draw(st.sampled_from(sorted(OPTIMIZERS)))
    shapes = st.sampled_from(SHAPES)
    parameters = draw(st.lists(st.tuples(shapes, st.sampled_from(FLOATS)), min_size=1, max_size=7))
    buffers = draw(st.lists(st.tuples(shapes, st.sampled_from(list(DType))), max_size=4))
    variables = [Variable(f"p{i}.weight", shape, dtype) for i, (shape, dtype) in enumerate(parameters)]
    variables += [Variable(f"b{i}", shape, dtype, Kind.BUFFER) for i, (shape, dtype) in enumerate(buffers)]
    return spec_of(optimizer, draw(st.permutations(variables)))


def rules() -> st.SearchStrategy[PartitionRule]:
    return st.one_of(st.just(Balanced()), st.integers(1, 4).map(FixedShards))


def shard_map_of(spec: ModelSpec, shards: int, rule: PartitionRule | None = None) -> ShardMap:
    return ShardMap(3, spec, shards, place(spec, shards, rule or Balanced()))


@dataclass
class Job:
    """One model on its shards. Gradients are drawn per variable, so that every shard map sees the same."""

    shard_map: ShardMap
    shards: list[Shard]

    @classmethod
    def of(cls, shard_map: ShardMap, seed: int | None = None) -> Job:
        """Values are random with a seed, otherwise zero."""
        job = cls(shard_map, [Shard.of(Layout.of(shard_map, shard)) for shard in range(shard_map.shards)])
        if seed is not None:
            fill([shard.region for shard in job.shards], seed)
        return job

    def train(self, seeds: Sequence[int], absent: frozenset[str] = frozenset()) -> Job:
        for seed in seeds:
            gradients = [Region(shard.region.layout) for shard in self.shards]
            fill(gradients, seed)
            for shard, gradient in zip(self.shards, gradients, strict=True):
                spans = enumerate(shard.region.layout.slices)
                shard.optimizer.apply(gradient, frozenset(i for i, span in spans if span.variable.name in absent))
        return self

    def parts(self, folder: Path) -> list[ShardPart]:
        """All shards write at the same time."""

        def write(shard: Shard) -> ShardPart:
            layout = shard.region.layout
            return write_part(folder, layout, shard.region.bytes, shard.optimizer.state(), {"version": layout.shard})

        with ThreadPoolExecutor(len(self.shards)) as pool:
            return list(pool.map(write, self.shards))

    def save(self, directory: Path, now: float = 1234.5) -> Checkpoint:
        folder = begin(directory)
        commit(folder, [self.shard_map], self.parts(folder), {"epoch": 4}, now)
        return Checkpoint.open(folder)

    @classmethod
    def restored(cls, checkpoint: Checkpoint, shard_map: ShardMap) -> Job:
        job = cls.of(checkpoint.aligned(shard_map))
        for shard in job.shards:
            read_values(checkpoint, shard.region.layout, shard.region.bytes)
            shard.optimizer.load_state(read_state(checkpoint, shard.region.layout))
        return job

    def values(self) -> dict[str, Tensor]:
        return whole([shard.region for shard in self.shards])

    def state(self) -> dict[tuple[str, str, int], Tensor]:
        """Variable, state, row → the state of one row; a counter is listed for every row."""
        rows: dict[tuple[str, str, int], Tensor] = {}
        for shard in self.shards:
            for key, tensor in shard.optimizer.state():
                span = shard.region.layout.slices[key.slice_index]
                for row in range(span.slice.row_begin, span.slice.row_end):
                    row_wise = bool(tensor.dim()) and tuple(tensor.shape) == span.shape
                    part = tensor[row - span.slice.row_begin] if row_wise else tensor
                    rows[span.variable.name, key.name, row] = part.clone()
        return rows


def fill(regions: Sequence[Region], seed: int) -> None:
    """Give the variables in ``regions`` random values that depend on ``seed`` alone."""
    spec = regions[0].layout.shard_map.spec
    generator = torch.Generator().manual_seed(seed)
    drawn = {v.name: drawn_like(v, generator) for v in spec.variables}
    for region in regions:
        for index, span in enumerate(region.layout.slices):
            value = drawn[span.variable.name]
            rows = value[span.slice.row_begin : span.slice.row_end] if value.dim() else value
            region.slice(index).copy_(rows)


def drawn_like(variable: Variable, generator: torch.Generator) -> Tensor:
    if variable.dtype in FLOATS:
        return torch.randn(variable.shape, generator=generator).to(torch_dtype(variable.dtype))
    return torch.randint(0, 100, variable.shape, generator=generator).to(torch_dtype(variable.dtype))


def whole(regions: Sequence[Region]) -> dict[str, Tensor]:
    spec = regions[0].layout.shard_map.spec
    values = {v.name: torch.zeros(v.shape, dtype=torch_dtype(v.dtype)) for v in spec.variables}
    for region in regions:
        for index, span in enumerate(region.layout.slices):
            value = values[span.variable.name]
            target = value[span.slice.row_begin : span.slice.row_end] if value.dim() else value
            target.copy_(region.slice(index))
    return values


def raw(tensor: Tensor) -> tuple[torch.dtype, tuple[int, ...], bytes]:
    data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
    return tensor.dtype, tuple(tensor.shape), data


def same_bits(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return {k: raw(t) for k, t in one.items()} == {k: raw(t) for k, t in other.items()}


def same_state(one: Job, other: Job) -> bool:
    return {k: raw(t) for k, t in one.state().items()} == {k: raw(t) for k, t in other.state().items()}
