"""Flat memory with mirrors on several devices: every byte at home in one place, and copies of no more than is asked."""

from __future__ import annotations

import gc
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ps_protocol.model.spec import DType
from ps_protocol.wire.shared_memory import SharedMemory
from ps_worker.memory import blocks
from ps_worker.memory.blocks import FlatMemory, overlap
from ps_worker.memory.flat import FlatModel
from ps_worker.memory.payloads import copy_end_to_end
from ps_worker.model.declare import build_spec
from tests.support.length import examples
from tests.worker.devices import HOST, ONE, TWO, Devices, bytes_of, everywhere, mixed_module, module_of, placed
from tests.worker.fakes import place

PLACES = (HOST, ONE, TWO)
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def pattern(size: int) -> torch.Tensor:
    return torch.arange(size, dtype=torch.int64).to(torch.uint8)


@st.composite
def homes(draw: st.DrawFn) -> tuple[int, dict[torch.device, list[tuple[int, int]]]]:
    """A size, and which bytes are at home where: neighbours, with gaps here and there."""
    at, found = draw(st.integers(0, 80)), dict[torch.device, list[tuple[int, int]]]()
    for _ in range(draw(st.integers(0, 12))):
        size = draw(st.integers(0, 150))
        found.setdefault(draw(st.sampled_from(PLACES)), []).append((at, at + size))
        at += size + draw(st.sampled_from([0, 0, 1, 40]))
    return at + draw(st.integers(0, 5)), found


def byte_view(block: FlatMemory, device: torch.device, span: tuple[int, int]) -> torch.Tensor:
    return block.view(device, span[0], DType.UINT8, (span[1] - span[0],))


@examples(80)
@given(made=homes(), data=st.data())
def test_copies_move_the_bytes_of_the_span_that_are_at_home_there_and_no_others(made, data):
    size, where = made
    begin = data.draw(st.integers(0, size))
    span = (begin, data.draw(st.integers(begin, size)))
    block = FlatMemory(size, where)
    values = pattern(size)
    at_home = {device: {b for r in ranges for b in range(*r)} for device, ranges in where.items() if device != HOST}

    block.host.copy_(values)
    block.to_devices(span)
    for device, ranges in where.items():
        for one in ranges:
            wanted = [values[b].item() if device == HOST or span[0] <= b < span[1] else 0 for b in range(*one)]
            assert byte_view(block, device, one).tolist() == wanted

    for device, ranges in where.items():
        for one in ranges:
            if device != HOST:
                byte_view(block, device, one).copy_(255 - values[one[0] : one[1]])
    block.to_host(span)
    away = set().union(*at_home.values()) if at_home else set()
    for b in range(size):
        moved = b in away and span[0] <= b < span[1]
        assert block.host[b].item() == (255 - values[b].item() if moved else values[b].item())


@examples(60)
@given(made=homes(), data=st.data())
def test_the_parts_of_a_span_are_the_bytes_at_home_in_it_each_once(made, data):
    size, where = made
    begin = data.draw(st.integers(0, size))
    span = (begin, data.draw(st.integers(begin, size)))
    block = FlatMemory(size, where)
    for part in block.parts(span):
        part += 1
    block.to_host((0, size))
    wanted = {b for ranges in where.values() for r in ranges for b in range(*r) if span[0] <= b < span[1]}
    assert {b for b in range(size) if block.host[b]} == wanted
    assert all(value in (0, 1) for value in block.host.tolist())


@examples(60)
@given(
    variables=st.lists(
        st.tuples(st.integers(0, 40), st.sampled_from(DTYPES), st.integers(0, 2)), min_size=1, max_size=10
    ),
    shards=st.integers(1, 3),
)
def test_any_model_on_any_devices_becomes_flat_with_its_values(variables, shards):
    """Elements of every dtype are where torch can read them, also behind narrower ones on the same device."""
    parameters = [torch.arange(rows).to(dtype) for rows, dtype, _ in variables]
    module = module_of(*(p.clone() for p in parameters))
    places = [PLACES[number] for *_, number in variables]
    with placed(module, places):
        declaration = build_spec(torch.optim.SGD, module, {"lr": 0.1}, name="model")
        model = FlatModel(declaration.bindings, place(declaration.spec, shards))
    model.collect_values()
    for offset, wanted, parameter in zip(model.plan.offsets, parameters, module.parameters(), strict=True):
        assert torch.equal(parameter, wanted)
        assert bytes(model.parameters.bytes[offset : offset + wanted.nbytes]) == bytes_of(wanted)


def test_wide_elements_behind_narrow_ones_that_do_not_begin_a_line_are_readable():
    """One float32 stays on the host; those behind it fill a line of 64 bytes up to the float64s."""
    module = module_of(torch.ones(1), torch.full((15,), 2.0), torch.full((2,), 3.0, dtype=torch.float64))
    with placed(module, (HOST, ONE, ONE)):
        declaration = build_spec(torch.optim.SGD, module, {"lr": 0.1}, name="model")
        FlatModel(declaration.bindings, place(declaration.spec, 1))
    assert [p.tolist() for p in module.parameters()] == [[1.0], [2.0] * 15, [3.0, 3.0]]


@everywhere
@pytest.mark.parametrize("shards", [1, 2, 3])
def test_becoming_flat_changes_no_value_and_no_device(devices: Devices, shards: int):
    module = mixed_module()
    with placed(module, devices):
        before = {name: (value.clone(), value.device) for name, value in module.state_dict().items()}
        declaration = build_spec(torch.optim.SGD, module, {"lr": 0.1}, name="model")
        model = FlatModel(declaration.bindings, place(declaration.spec, shards))
    for name, value in module.state_dict().items():
        assert torch.equal(value, before[name][0])
        assert (value.dtype, value.device) == (before[name][0].dtype, before[name][1])
    model.collect_values()
    for number, value in enumerate([*module.parameters(), *module.buffers()]):
        begin = model.plan.offsets[number]
        assert bytes(model.parameters.bytes[begin : begin + value.nbytes]) == bytes_of(value)


@everywhere
def test_what_arrives_on_the_host_is_the_models_when_published_parameters_and_buffers_apart(devices: Devices):
    module = mixed_module()
    with placed(module, devices):
        declaration = build_spec(torch.optim.SGD, module, {"lr": 0.1}, name="model")
        model = FlatModel(declaration.bindings, place(declaration.spec, 2))
    buffers = [value.clone() for value in module.buffers()]
    versions = [p._version for p in module.parameters()]
    (piece,) = model.parameters.pieces([(0, model.plan.total_bytes)])
    piece[:] = bytes(len(piece))
    model.publish_parameters()
    assert all(not p.any() for p in module.parameters())
    assert all(p._version > before for p, before in zip(module.parameters(), versions, strict=True))
    assert all(torch.equal(value, before) for value, before in zip(module.buffers(), buffers, strict=True))
    model.publish_buffers()
    assert all(not value.any() for value in module.buffers())


@everywhere
def test_training_reads_and_writes_the_mirrors(devices: Devices):
    module = mixed_module()
    with placed(module, devices):
        declaration = build_spec(torch.optim.SGD, module, {"lr": 0.1}, name="model")
        model = FlatModel(declaration.bindings, place(declaration.spec, 2))
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(2)
    model.check_in_place()
    model.collect_values()
    for number, value in enumerate(module.parameters()):
        begin = model.plan.offsets[number]
        assert bytes(model.parameters.bytes[begin : begin + value.nbytes]) == bytes_of(value)


def test_a_block_in_a_segment_is_the_segments_memory_and_keeps_it():
    segment = SharedMemory.create(200)
    segment.bytes[:3] = b"abc"
    block = FlatMemory(200, {HOST: [(0, 100)], ONE: [(100, 200)]}, segment)
    view, memory_of = block.view(ONE, 100, DType.UINT8, (4,)), segment.bytes
    assert bytes(block.bytes[:3]) == b"abc"
    view.fill_(5)
    assert memory_of[100] == 0
    block.to_host((0, 200))
    assert bytes(memory_of[99:105]) == b"\x00\x05\x05\x05\x05\x00"
    del segment
    gc.collect()
    assert bytes(block.bytes[:3]) == b"abc"


def test_memory_that_was_pinned_is_released_before_it_is_unmapped(monkeypatch: pytest.MonkeyPatch):
    """Else the same addresses, mapped again, would still mean the old pages."""
    calls: list[tuple[str, int]] = []
    runtime = SimpleNamespace(
        cudaHostRegister=lambda address, size, flags: calls.append(("pin", address)) or 0,
        cudaHostUnregister=lambda address: calls.append(("release", address)) or 0,
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    owner, host = SimpleNamespace(), torch.zeros(64, dtype=torch.uint8)

    class Owner:
        pass

    owner = Owner()
    blocks._pin(host, owner)
    address = host.data_ptr()
    assert calls == [("pin", address)]
    del owner
    gc.collect()
    assert calls == [("pin", address), ("release", address)]


@given(
    ranges=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=8),
    span=st.tuples(st.integers(0, 60), st.integers(0, 60)),
)
def test_the_overlap_of_ranges_and_a_span_is_what_lies_in_both(ranges, span):
    at, found = 0, []
    for gap, size in ranges:
        found.append((at + gap, at + gap + size))
        at += gap + size
    got = list(overlap(found, span))
    assert all(begin < end for begin, end in got)
    assert [b for r in got for b in range(*r)] == [b for r in found for b in range(*r) if span[0] <= b < span[1]]


def split(sizes: list[int], total: int) -> list[int]:
    """``sizes`` cut or filled up to ``total``."""
    found, left = [], total
    for size in sizes:
        found.append(min(size, left))
        left -= found[-1]
    return [*found, left]


@given(
    total=st.integers(0, 300),
    targets=st.lists(st.integers(0, 60), max_size=12),
    sources=st.lists(st.integers(0, 60), max_size=12),
)
def test_sources_end_to_end_are_the_targets_end_to_end_however_both_are_cut(total, targets, sources):
    whole = pattern(total)
    received = torch.full((total + 2,), 77, dtype=torch.uint8)
    copy_end_to_end(received[1:-1].split(split(targets, total)), whole.split(split(sources, total)))
    assert torch.equal(received[1:-1], whole)
    assert (received[0].item(), received[-1].item()) == (77, 77)


def test_copying_end_to_end_leaves_the_lists_it_was_given_alone():
    targets = [torch.zeros(n, dtype=torch.uint8) for n in (2, 0, 3)]
    sources = [torch.ones(n, dtype=torch.uint8) for n in (4, 1)]
    copy_end_to_end(targets, sources)
    assert ([len(t) for t in targets], [len(s) for s in sources]) == ([2, 0, 3], [4, 1])
    assert all(bool(t.all()) for t in targets)
