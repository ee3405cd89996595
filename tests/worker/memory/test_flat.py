"""The worker's flat memory: few ranges, values kept, gradients gathered, buffers copied."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ps_protocol.errors import InvalidRequest
from ps_protocol.model.layout import total_bytes
from ps_protocol.wire.frames import Scatter, cut
from ps_worker.memory.flat import FlatModel
from ps_worker.memory.plan import FlatPlan
from ps_worker.model.declare import build_spec
from ps_worker.step.gradients import GradientBuffers
from tests.support.length import examples
from tests.worker.fakes import place


def flatten(source: object, shards: int = 2, **policies: str) -> tuple[FlatModel, GradientBuffers]:
    declaration = build_spec(torch.optim.SGD, source, {"lr": 0.1}, name="model", **policies)
    model = FlatModel(declaration.bindings, place(declaration.spec, shards))
    return model, GradientBuffers(model.plan, declaration.bindings)


def payload(gradients: GradientBuffers, model: FlatModel, shard: int, absent: tuple[int, ...] = ()) -> bytes:
    """What a push to ``shard`` carries."""
    return b"".join(gradients.pieces(shard, model.plan.layouts[shard].ranges(absent, buffers=False)))


def mixed_model() -> nn.Module:
    """Several dtypes, a scalar, an empty variable, variables of many rows, buffers."""
    model = nn.Module()
    for i, (shape, dtype) in enumerate(
        [
            ((3, 2), torch.float32),
            ((), torch.float32),
            ((10, 2), torch.float64),
            ((9,), torch.float32),
            ((5,), torch.bfloat16),
            ((0, 4), torch.float32),
            ((16, 3), torch.float16),
        ]
    ):
        model.register_parameter(f"p{i}", nn.Parameter(torch.randn(shape).to(dtype)))
    model.norm = nn.BatchNorm1d(3)
    return model


def test_a_thousand_variables_are_one_range_per_shard() -> None:
    parameters = [nn.Parameter(torch.zeros(i % 7 + 1)) for i in range(1000)]
    model, _ = flatten(parameters, shards=3)
    assert [len(model.plan.ranges(shard)) for shard in range(3)] == [1, 1, 1]


@pytest.mark.parametrize(("columns", "ranges"), [(16, 2), (2, 3)])
def test_a_variable_split_over_three_shards_adds_one_range_to_each_and_one_for_its_padding(
    columns: int, ranges: int
) -> None:
    parameters = [nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(30, columns)), nn.Parameter(torch.zeros(4))]
    model, _ = flatten(parameters, shards=3)
    assert all(len(model.plan.ranges(shard)) <= ranges for shard in range(3))


@examples(40)
@given(
    shapes=st.lists(st.lists(st.integers(0, 12), max_size=3), min_size=1, max_size=12),
    shards=st.integers(1, 4),
    seed=st.integers(0, 10),
)
def test_the_ranges_of_all_shards_cover_every_byte_of_every_variable_once(
    shapes: list[list[int]], shards: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    kinds = (torch.float32, torch.float64, torch.float16)
    parameters = [
        nn.Parameter(torch.zeros(shape, dtype=kinds[int(torch.randint(3, (1,), generator=generator))]))
        for shape in shapes
    ]
    model, _ = flatten(parameters, shards)
    variables = model.plan.variables
    values = {
        b for offset, v in zip(model.plan.offsets, variables, strict=True) for b in range(offset, offset + v.nbytes)
    }
    covered = [
        b for s in range(shards) for begin, end in model.plan.ranges(s) for b in range(begin, end) if b in values
    ]
    assert len(covered) == len(set(covered)) == len(values) == sum(v.nbytes for v in variables)
    for shard in range(shards):
        layout = model.plan.layouts[shard]
        assert total_bytes(model.plan.ranges(shard)) == total_bytes(layout.ranges())
    assert all(offset % 64 == 0 for offset in model.plan.offsets)


def test_received_bytes_are_the_parameters() -> None:
    module = mixed_model()
    model, _ = flatten(module, shards=3)
    for shard in range(3):
        pieces = model.parameters.pieces(model.plan.ranges(shard, buffers=False))
        scatter = Scatter(pieces)
        data = memoryview(bytes(scatter.expected_bytes))
        for position, parts in cut([data], 100):
            scatter.write(position, memoryview(b"".join(parts)))
    assert all(bool((p == 0).all()) for p in module.parameters())


def test_autograd_notices_that_parameters_changed_under_a_graph() -> None:
    module = nn.Linear(2, 2)
    model, _ = flatten(module)
    # The gradient of a product needs the weight as it was.
    loss = module(torch.ones(1, 2, requires_grad=True)).sum()
    model.publish_parameters()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_buffers_are_sent_only_when_collected_and_changed_only_when_published() -> None:
    module = nn.BatchNorm1d(3)
    model, gradients = flatten(module, shards=1)
    module(torch.randn(8, 3))
    gradients.collect_buffers()
    pushed = b"".join(gradients.pieces(0, model.plan.layouts[0].ranges()))
    assert len(pushed) == len(payload(gradients, model, 0)) + 64 + 64 + 64
    assert module.running_mean.numpy().tobytes() in pushed
    assert module.num_batches_tracked.numpy().tobytes() in pushed
    before = module.running_mean.clone()
    model.parameters.host.zero_()
    torch.testing.assert_close(module.running_mean, before)
    model.publish_buffers()
    assert bool((module.running_mean == 0).all())
    assert module.num_batches_tracked == 0


def test_a_buffer_that_the_module_replaced_is_found_again() -> None:
    module = nn.BatchNorm1d(2)
    model, _ = flatten(module, shards=1)
    module.running_mean = torch.tensor([3.0, 4.0])
    model.collect_values()
    model.publish_buffers()
    assert module.running_mean.tolist() == [3.0, 4.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_large_finite_gradients_whose_sum_overflows_are_finite(dtype: torch.dtype) -> None:
    parameter = nn.Parameter(torch.zeros(100, dtype=dtype))
    _, gradients = flatten([parameter])
    parameter.grad = torch.full_like(parameter, torch.finfo(dtype).max)
    gradients.collect()
    assert gradients.first_nonfinite(()) is None


@pytest.mark.parametrize("use", ["collect_values", "publish_buffers", "collect_buffers"])
def test_a_buffer_that_was_resized_is_refused_by_name(use: str) -> None:
    module = nn.BatchNorm1d(2)
    model, gradients = flatten(module)
    module.running_mean = torch.zeros(5)
    with pytest.raises(InvalidRequest, match="'running_mean' has another shape") as caught:
        getattr(gradients if use == "collect_buffers" else model, use)()
    assert (caught.value.expected, caught.value.actual) == ("(2,)", "(5,)")
    assert 'buffers="local"' in caught.value.remedy


def test_a_parameter_converted_after_the_declaration_is_refused_by_name() -> None:
    module = nn.Linear(2, 2)
    model, _ = flatten(module)
    module.double()
    with pytest.raises(InvalidRequest, match="moved or converted") as caught:
        model.check_in_place()
    assert caught.value.variable == "weight"


def test_every_parameter_and_gradient_begins_on_64_bytes_behind_one_of_an_odd_size() -> None:
    module = nn.ParameterList([nn.Parameter(torch.randn(size)) for size in (3, 5, 1, 16, 7)])
    declaration = build_spec(torch.optim.SGD, module, {"lr": 0.1}, name="model")
    model = FlatModel(declaration.bindings, place(declaration.spec, 2))
    assert [p.data_ptr() % 64 for p in module] == [0] * 5
    gradients = GradientBuffers(model.plan, declaration.bindings)
    for p in module:
        p.grad = torch.ones_like(p)
    gradients.collect()
    gradients.keep_in_place()
    assert [p.grad.data_ptr() % 64 for p in module] == [0] * 5


def test_padding_that_is_received_or_uploaded_touches_no_value() -> None:
    module = nn.ParameterList([nn.Parameter(torch.ones(30, 2)), nn.Parameter(torch.ones(3))])
    model, _ = flatten(module, shards=3)
    for shard in range(3):
        for span in model.plan.layouts[shard].slices:
            places = model.plan.ranges(
                shard, tuple(i for i, s in enumerate(model.plan.layouts[shard].slices) if s != span)
            )
            first = span.end - span.begin
            padding = [piece for begin, end in places for piece in range(begin, end)][first:]
            model.parameters.host[padding] = 255
    assert all(bool((p == 1).all()) for p in module)


def test_patterns_of_absent_variables_do_not_pile_up() -> None:
    declaration = build_spec(torch.optim.SGD, [nn.Parameter(torch.zeros(1)) for _ in range(12)], {}, name="model")
    plan = FlatPlan(place(declaration.spec, 1))
    for pattern in range(1 << 12):
        plan.ranges(0, tuple(i for i in range(12) if pattern >> i & 1))
    assert plan.ranges.cache_info().currsize <= 64
