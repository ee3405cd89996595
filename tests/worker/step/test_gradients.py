"""Gradients of variables on several devices, some split over shards, on their way to where pushes are taken from."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ps_protocol.errors import InternalError, InvalidRequest
from ps_protocol.wire.shared_memory import SharedMemory
from ps_worker.memory.flat import FlatModel
from ps_worker.memory.plan import FlatPlan
from ps_worker.model.declare import build_spec
from ps_worker.step.gradients import GradientBuffers
from tests.support.length import examples
from tests.worker.devices import HOST, ONE, TWO, Devices, bytes_of, everywhere, mixed_module, module_of, placed
from tests.worker.fakes import place

SHARDS = pytest.mark.parametrize("shards", [1, 2, 3])


@contextmanager
def flat(module: nn.Module, devices: Devices, shards: int) -> Iterator[tuple[FlatPlan, GradientBuffers]]:
    with placed(module, devices):
        declaration = build_spec(torch.optim.SGD, module, {"lr": 0.1}, name="model")
        model = FlatModel(declaration.bindings, place(declaration.spec, shards))
        yield model.plan, GradientBuffers(model.plan, declaration.bindings)


def set_gradients(module: nn.Module, seed: int = 0) -> list[torch.Tensor]:
    """Random gradients of their own memory; returns them on the host."""
    generator, found = torch.Generator().manual_seed(seed), []
    for parameter in module.parameters():
        value = torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(parameter.dtype)
        parameter.grad = value.clone().to(parameter.device)
        found.append(value)
    return found


def pushed(
    plan: FlatPlan, gradients: GradientBuffers, absent: tuple[int, ...] = (), *, buffers: bool = False
) -> list[bytes]:
    """What a push carries, by shard."""
    return [
        b"".join(gradients.pieces(shard, plan.contents(shard, absent, buffers)[1]))
        for shard in range(len(plan.layouts))
    ]


def wanted(plan: FlatPlan, values: list[torch.Tensor], absent: tuple[int, ...] = ()) -> list[bytes]:
    """The slices of ``values`` with their padding, by shard, in the order of its region."""
    return [
        b"".join(
            bytes_of(
                values[s.slice.variable][s.slice.row_begin : s.slice.row_end] if s.variable.shape else value
            ).ljust(s.padded_end - s.begin, b"\0")
            for s in layout.slices
            if s.slice.variable < len(values)
            and s.slice.variable not in absent
            and (value := values[s.slice.variable]) is not None
        )
        for layout in plan.layouts
    ]


@everywhere
@SHARDS
def test_a_push_carries_each_slices_gradient_wherever_it_was_computed(devices: Devices, shards: int):
    module = mixed_module()
    with flat(module, devices, shards) as (plan, gradients):
        for seed in range(2):
            values = set_gradients(module, seed)
            assert gradients.collect() == ()
            assert pushed(plan, gradients) == wanted(plan, values)


@everywhere
@SHARDS
def test_variables_without_gradient_are_left_out(devices: Devices, shards: int):
    module = mixed_module()
    with flat(module, devices, shards) as (plan, gradients):
        values = set_gradients(module)
        parameters = list(module.parameters())
        for number in (0, 6):
            parameters[number].grad = None
        assert gradients.collect() == (0, 6)
        assert pushed(plan, gradients, (0, 6)) == wanted(plan, values, (0, 6))


@everywhere
def test_gradients_taken_early_are_not_taken_again(devices: Devices):
    module = mixed_module()
    with flat(module, devices, 2) as (plan, gradients):
        set_gradients(module, 1)
        gradients.collect()
        values = set_gradients(module, 2)
        for number in (1, 2, 6):
            gradients.gather(number)
        for number in (1, 2, 6):
            list(module.parameters())[number].grad.zero_()
        for shard, layout in enumerate(plan.layouts):
            gradients.bring(shard, (0, layout.parameter_bytes))()
        assert gradients.collect({1, 2, 6}) == ()
        assert pushed(plan, gradients) == wanted(plan, values)


@everywhere
def test_what_was_taken_early_is_on_the_host_when_it_was_brought_there(devices: Devices):
    module = mixed_module()
    with flat(module, devices, 2) as (plan, gradients):
        set_gradients(module, 1)
        gradients.collect()
        before = [bytes(gradients.memory(shard)) for shard in range(2)]
        values = set_gradients(module, 2)
        for number in range(len(values)):
            gradients.gather(number)
        for shard, layout in enumerate(plan.layouts):
            span = layout.slices[0]
            gradients.bring(shard, (span.begin, span.end))()
            number, (first, last) = span.slice.variable, (span.slice.row_begin, span.slice.row_end)
            value = values[number][first:last] if values[number].dim() else values[number]
            assert bytes(gradients.memory(shard)[span.begin : span.end]) == bytes_of(value)
            # Of what is at home elsewhere, nothing else was touched.
            for other in layout.slices[1 : layout.parameter_slices]:
                if devices[other.slice.variable % len(devices)] != HOST:
                    here = slice(other.begin, other.end)
                    assert bytes(gradients.memory(shard)[here]) == before[shard][here]


def test_a_variable_without_gradient_gives_nothing_early():
    module = mixed_module()
    with flat(module, (HOST, ONE), 2) as (_, gradients):
        gradients.gather(0)
        assert next(module.parameters()).grad is None


@everywhere
@SHARDS
def test_gradients_kept_in_place_are_added_up_there_and_pushed_from_there(devices: Devices, shards: int):
    module = mixed_module()
    with flat(module, devices, shards) as (plan, gradients):
        set_gradients(module)
        gradients.collect()
        gradients.keep_in_place()
        kept = [p.grad.data_ptr() for p in module.parameters()]
        values = []
        for number, parameter in enumerate(module.parameters()):
            parameter.grad.zero_()
            parameter.grad.add_(number + 1)
            values.append(torch.full(parameter.shape, number + 1, dtype=parameter.dtype))
        gradients.collect()
        assert [p.grad.data_ptr() for p in module.parameters()] == kept
        assert pushed(plan, gradients) == wanted(plan, values)


@everywhere
@SHARDS
def test_when_the_memory_changes_what_was_collected_goes_with_it(devices: Devices, shards: int):
    module = mixed_module()
    with flat(module, devices, shards) as (plan, gradients):
        values = set_gradients(module)
        gradients.collect()
        for placing in alternatives(plan):
            for shard, segment in enumerate(placing):
                gradients.place(shard, segment)
                if segment is not None:
                    assert bytes(gradients.memory(shard)) == bytes(segment.bytes)
            assert pushed(plan, gradients) == wanted(plan, values)
            assert gradients.first_nonfinite(()) is None


@everywhere
@SHARDS
def test_when_the_memory_changes_what_backward_has_added_up_since_the_last_push_goes_with_it(
    devices: Devices, shards: int
):
    """On a device it has not reached the host then."""
    module = mixed_module()
    with flat(module, devices, shards) as (plan, gradients):
        values = set_gradients(module)
        gradients.collect()
        gradients.keep_in_place()
        for parameter, value in zip(module.parameters(), values, strict=True):
            parameter.grad.copy_(value)
        for placing in alternatives(plan):
            for parameter, value in zip(module.parameters(), values, strict=True):
                parameter.grad += 1
                value += 1
            for shard, segment in enumerate(placing):
                gradients.place(shard, segment)
            for parameter, value in zip(module.parameters(), values, strict=True):
                assert torch.equal(parameter.grad.cpu(), value)
            for parameter, value in zip(module.parameters(), values, strict=True):
                parameter.grad *= 2
                value *= 2
            gradients.collect()
            assert pushed(plan, gradients) == wanted(plan, values)


@pytest.mark.parametrize("devices", [(ONE,), (ONE, TWO)], ids=["one", "one+two"])
def test_a_push_that_may_have_to_be_repeated_keeps_its_bytes_when_the_memory_changes(devices: Devices):
    """What backward adds up on a device meanwhile reaches neither the memory that is left nor the new on the host."""
    module = mixed_module()
    with flat(module, devices, 1) as (plan, gradients):
        values = set_gradients(module)
        for segment in (SharedMemory.create(plan.layouts[0].region_bytes), None):
            if segment is not None:
                gradients.place(0, segment)
            gradients.collect()
            shared, region = bytes(gradients.memory(0)), gradients.memory(0)
            gradients.keep_in_place()
            for parameter in module.parameters():
                parameter.grad += 1
            gradients.place(0)
            assert bytes(region) == shared
            assert pushed(plan, gradients) == wanted(plan, values)
            for value in values:
                value += 1


def alternatives(plan: FlatPlan) -> list[list[SharedMemory | None]]:
    """Memory that a worker gets in turn: shared, its own, its own again, shared."""
    shared = [[SharedMemory.create(layout.region_bytes) for layout in plan.layouts] for _ in range(2)]
    own: list[SharedMemory | None] = [None] * len(plan.layouts)
    return [[*shared[0]], own, own, [*shared[1]]]


@everywhere
def test_memory_that_was_left_is_free_when_nobody_views_it(devices: Devices):
    module = mixed_module()
    with flat(module, devices, 1) as (plan, gradients):
        segment = SharedMemory.create(plan.layouts[0].region_bytes)
        inode = os.fstat(segment.fd).st_ino
        gradients.place(0, segment)
        del segment
        set_gradients(module)
        gradients.collect()
        gradients.keep_in_place()
        gc.collect()
        assert _is_mapped(inode)
        gradients.place(0)
        gc.collect()
        assert not _is_mapped(inode)


def _is_mapped(inode: int) -> bool:
    """Whether this file in memory is: what earlier tests mapped may go at any time."""
    with open("/proc/self/maps") as maps:  # noqa: PTH123
        return any("memfd:torch-ps" in line and line.split()[4] == str(inode) for line in maps)


def test_a_gradient_of_the_users_own_stays_his_when_the_memory_changes():
    module = mixed_module()
    with flat(module, (ONE, HOST), 2) as (_, gradients):
        set_gradients(module)
        gradients.collect()
        own = [p.grad for p in module.parameters()]
        gradients.place(0)
        assert all(p.grad is mine for p, mine in zip(module.parameters(), own, strict=True))


def test_a_variable_split_over_shards_is_not_kept_in_place():
    module = module_of(torch.zeros(4), torch.zeros(30, 2))
    with flat(module, (ONE, TWO), 3) as (plan, gradients):
        values = set_gradients(module)
        gradients.collect()
        whole, split = (p.grad for p in module.parameters())
        gradients.keep_in_place()
        assert module.p0.grad is not whole
        assert module.p1.grad is split
        module.p0.grad.copy_(values[0])
        gradients.collect()
        assert pushed(plan, gradients) == wanted(plan, values)


@everywhere
@SHARDS
def test_buffers_are_taken_from_where_the_module_has_them(devices: Devices, shards: int):
    module = mixed_module()
    with flat(module, devices, shards) as (plan, gradients):
        values = set_gradients(module)
        gradients.collect()
        module.b0 = torch.tensor([4.0, 5.0, 6.0], device=module.b0.device)  # modules may replace theirs
        gradients.collect_buffers()
        everything = [*values, *(b.cpu() for b in module.buffers())]
        assert pushed(plan, gradients, buffers=True) == wanted(plan, everything)


@everywhere
@SHARDS
def test_the_first_gradient_that_is_not_finite_is_named_wherever_it_is(devices: Devices, shards: int):
    module = mixed_module()
    with flat(module, devices, shards) as (_, gradients):
        for number, parameter in enumerate(module.parameters()):
            if not parameter.numel():
                continue
            for value in (float("nan"), float("inf"), float("-inf")):
                set_gradients(module)
                gradients.collect()
                assert gradients.first_nonfinite(()) is None
                parameter.grad.view(-1)[-1] = value
                gradients.collect()
                assert gradients.first_nonfinite(()) == f"p{number}"
                assert gradients.first_nonfinite((number,)) is None


def test_what_is_not_finite_on_two_devices_is_named_once_the_first_of_them():
    module = mixed_module()
    with flat(module, (HOST, ONE, TWO), 2) as (_, gradients):
        set_gradients(module)
        for number in (7, 2, 3):
            list(module.parameters())[number].grad.view(-1)[0] = float("inf")
        gradients.collect()
        assert gradients.first_nonfinite(()) == "p2"
        assert gradients.first_nonfinite((2,)) == "p3"


@examples(50)
@given(
    variables=st.lists(
        st.tuples(
            st.lists(st.integers(0, 9), max_size=2),
            st.sampled_from([torch.float32, torch.float64, torch.float16]),
            st.sampled_from([HOST, ONE, TWO]),
            st.booleans(),
        ),
        min_size=1,
        max_size=9,
    ),
    shards=st.integers(1, 3),
    moves=st.lists(st.tuples(st.integers(0, 2), st.booleans()), max_size=4),
)
def test_any_model_pushes_its_gradients_whatever_becomes_of_its_memory(variables, shards, moves):
    module = module_of(*(torch.zeros(shape, dtype=dtype) for shape, dtype, _, _ in variables))
    absent = tuple(number for number, (*_, has) in enumerate(variables) if not has)
    with flat(module, tuple(device for _, _, device, _ in variables), shards) as (plan, gradients):
        for step in range(2):
            values = set_gradients(module, step)
            for number, parameter in enumerate(module.parameters()):
                if number in absent:
                    parameter.grad = None
            assert gradients.collect() == absent
            gradients.keep_in_place()
            for number, parameter in enumerate(module.parameters()):
                if number not in absent:
                    parameter.grad.copy_(values[number])
            for shard, shared in moves:
                if shard < shards:
                    size = plan.layouts[shard].region_bytes
                    gradients.place(shard, SharedMemory.create(size) if shared and size else None)
            assert gradients.collect() == absent
            assert pushed(plan, gradients, absent) == wanted(plan, values, absent)


def test_a_sparse_gradient_on_any_device_is_refused_by_name():
    module = module_of(torch.zeros(3), torch.zeros(4, 2))
    with flat(module, (HOST, ONE), 2) as (_, gradients):
        module.p1.grad = torch.sparse_coo_tensor([[1]], torch.ones(1, 2), (4, 2), check_invariants=True)
        with pytest.raises(InvalidRequest, match="sparse") as caught:
            gradients.collect()
        assert caught.value.variable == "p1"
        assert "cluster.convert_embeddings" in caught.value.remedy
        gradients.keep_in_place()
        assert module.p1.grad.is_sparse


def test_there_is_no_memory_before_it_is_placed():
    module = mixed_module()
    with flat(module, (HOST, ONE), 2) as (_, gradients):
        assert not gradients.has_place(0)
        with pytest.raises(InternalError, match="shard 1"):
            gradients.region(1)
        gradients.place(0)
        assert (gradients.has_place(0), gradients.has_place(1)) == (True, False)
        gradients.collect()
        assert gradients.has_place(1)
