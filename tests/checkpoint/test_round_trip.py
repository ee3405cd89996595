"""What is saved on some shards comes back on any number of them, bit for bit, and training goes on from it."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ps_protocol.errors import InvalidRequest
from ps_protocol.model.layout import Layout
from ps_protocol.model.spec import DType, ModelSpec, Variable
from ps_protocol.v1 import shard_pb2 as pb
from ps_server.checkpoint.checkpoint import Checkpoint
from ps_server.checkpoint.commit import commit
from ps_server.checkpoint.directory import begin
from ps_server.checkpoint.messages import part_from_pb, part_to_pb
from ps_server.checkpoint.model_reader import read_state, read_values
from ps_server.checkpoint.model_writer import write_part
from ps_server.consistency import Position, TrackerState
from ps_server.coordinator.placement.variables import FixedShards, PartitionRule
from ps_server.state.region import Region
from tests.support.length import examples, paired

from .support import OPTIMIZERS, Job, raw, rules, same_bits, same_state, shard_map_of, small_spec, spec_of, specs

CHANGES = [(1, 1), (2, 3), (3, 2), (3, 1), (1, 3)]
ELEMENTWISE = [name for name in OPTIMIZERS if name != "Adafactor"]


@examples(120)
@given(specs(), st.sampled_from(CHANGES), rules(), rules(), st.integers(0, 99))
def test_any_model_comes_back_bit_for_bit_on_any_number_of_shards(
    spec: ModelSpec, shards: tuple[int, int], first: PartitionRule, then: PartitionRule, seed: int
) -> None:
    with tempfile.TemporaryDirectory() as directory:
        saved = Job.of(shard_map_of(spec, shards[0], first), seed)
        saved.train([seed + 1], absent=frozenset({"p1.weight"})).train([seed + 2], absent=frozenset({"p2.weight"}))
        checkpoint = saved.save(Path(directory))
        checkpoint.verify()
        restored = Job.restored(checkpoint, shard_map_of(spec, shards[1], then))
    assert same_bits(restored.values(), saved.values())
    assert same_state(restored, saved)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_training_on_the_same_shards_goes_on_bit_equal_to_training_that_never_stopped(
    tmp_path: Path, optimizer: str
) -> None:
    shard_map = shard_map_of(small_spec(optimizer), 2)
    never_stopped = Job.of(shard_map, seed=1).train(range(5))
    checkpoint = never_stopped.save(tmp_path)
    restored = Job.restored(checkpoint, checkpoint.model("model").shard_map)
    for job in (never_stopped, restored):
        job.train(range(5, 10))
    assert same_bits(restored.values(), never_stopped.values())
    assert same_state(restored, never_stopped)


@pytest.mark.parametrize(("optimizer", "shards"), paired(list(OPTIMIZERS), CHANGES), ids=str)
def test_training_on_another_number_of_shards_goes_on_to_the_same_numbers(
    tmp_path: Path, optimizer: str, shards: tuple[int, int]
) -> None:
    spec = small_spec(optimizer)
    never_stopped = Job.of(shard_map_of(spec, shards[0]), seed=1).train(range(5))
    restored = Job.restored(never_stopped.save(tmp_path), shard_map_of(spec, shards[1]))
    for job in (never_stopped, restored):
        job.train(range(5, 10))
    expected = never_stopped.values()
    for name, value in restored.values().items():
        torch.testing.assert_close(value, expected[name], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("optimizer", "shards"), paired(list(ELEMENTWISE), [1, 3]))
def test_slices_that_saw_different_numbers_of_steps_each_go_on_with_their_own(
    tmp_path: Path, optimizer: str, shards: int
) -> None:
    spec = spec_of(optimizer, [Variable("table", (40, 3), DType.FLOAT32)])
    job = Job.of(shard_map_of(spec, 2, FixedShards(4)), seed=1).train([1])
    Job(job.shard_map, job.shards[:1]).train([2])
    restored = Job.restored(job.save(tmp_path), shard_map_of(spec, shards))
    assert same_state(restored, job)
    for each in (job, restored):
        each.train([3])
    torch.testing.assert_close(restored.values()["table"], job.values()["table"], rtol=1e-6, atol=1e-6)


def test_joining_slices_with_different_counters_is_refused_and_the_remedy_named(tmp_path: Path) -> None:
    spec = spec_of("Adam", [Variable("table", (40, 3), DType.FLOAT32)])
    job = Job.of(shard_map_of(spec, 2), seed=1).train([1])
    Job(job.shard_map, job.shards[:1]).train([2])
    with pytest.raises(InvalidRequest, match=r"variable: table; .*remedy: lay the model out with Checkpoint.aligned"):
        read_state(job.save(tmp_path), Layout.of(shard_map_of(spec, 1), 0))


def test_joining_rows_with_state_and_rows_without_is_refused(tmp_path: Path) -> None:
    spec = spec_of("Adam", [Variable("table", (40, 3), DType.FLOAT32)])
    job = Job.of(shard_map_of(spec, 2), seed=1)
    Job(job.shard_map, job.shards[:1]).train([1])
    with pytest.raises(InvalidRequest, match="different step counts"):
        read_state(job.save(tmp_path), Layout.of(shard_map_of(spec, 1), 0))


def test_slices_with_equal_counters_are_joined_and_nothing_is_cut(tmp_path: Path) -> None:
    spec = small_spec("Adam")
    checkpoint = Job.of(shard_map_of(spec, 3), seed=1).train([1, 2]).save(tmp_path)
    alone = shard_map_of(spec, 1)
    assert checkpoint.aligned(alone) == alone


def test_a_model_that_was_never_trained_is_saved_without_state(tmp_path: Path) -> None:
    job = Job.of(shard_map_of(small_spec("Adam"), 2), seed=1)
    checkpoint = job.save(tmp_path)
    assert not list(checkpoint.folder.rglob("optimizer-*"))
    assert Job.restored(checkpoint, job.shard_map).state() == {}


def test_more_shards_than_rows_leave_some_shards_empty(tmp_path: Path) -> None:
    spec = spec_of("SGD", [Variable("w", (2,), DType.FLOAT32)])
    job = Job.of(shard_map_of(spec, 4), seed=1).train([1])
    restored = Job.restored(job.save(tmp_path), shard_map_of(spec, 3))
    assert same_bits(restored.values(), job.values())


def test_tensors_larger_than_a_checksum_are_cut_and_joined_anywhere(tmp_path: Path) -> None:
    spec = spec_of("SGD", [Variable("table", (1001, 700), DType.FLOAT32), Variable("w", (3,), DType.FLOAT32)])
    job = Job.of(shard_map_of(spec, 2), seed=1).train([1])
    checkpoint = job.save(tmp_path)
    checkpoint.verify()
    for shards in (1, 3, 5):
        restored = Job.restored(checkpoint, shard_map_of(spec, shards))
        assert same_bits(restored.values(), job.values())
        assert same_state(restored, job)


def test_the_order_of_variables_may_change_between_saving_and_restoring(tmp_path: Path) -> None:
    spec = small_spec("Adam")
    job = Job.of(shard_map_of(spec, 2), seed=1).train([1])
    turned = spec_of("Adam", spec.variables[::-1])
    restored = Job.restored(job.save(tmp_path), shard_map_of(turned, 2))
    assert same_bits(restored.values(), job.values())


def test_facts_of_the_job_and_of_every_shard_come_back(tmp_path: Path) -> None:
    checkpoint = Job.of(shard_map_of(small_spec(), 2), seed=1).save(tmp_path)
    assert checkpoint.manifest.facts == {"epoch": 4}
    assert checkpoint.manifest.committed_seconds == 1234.5
    assert checkpoint.model("model").facts == ({"version": 0}, {"version": 1})
    assert checkpoint.model("model").shard_map == shard_map_of(small_spec(), 2)


def test_facts_may_hold_whatever_json_holds(tmp_path: Path) -> None:
    shard_map = shard_map_of(small_spec(), 1)
    folder = begin(tmp_path)
    facts = {"positions": {2: 1, 10: 2**63}, "name": 'ä\n"', "rate": 0.1, "none": [None, True, {}]}
    commit(folder, [shard_map], Job.of(shard_map).parts(folder), facts, 0.0)
    # Keys of JSON are text.
    assert Checkpoint.open(folder).manifest.facts == {**facts, "positions": {"2": 1, "10": 2**63}}


def test_a_part_survives_the_wire(tmp_path: Path) -> None:
    pushes = TrackerState(7, Position(1, 2), Position(1, 3), outcomes={"applied": 7})
    for part in Job.of(shard_map_of(small_spec(), 2), seed=1).train([1]).parts(tmp_path):
        data = part_to_pb(part, pushes).SerializeToString()
        assert part_from_pb(pb.CheckpointPart.FromString(data)) == replace(part, facts={"tracker": pushes.to_json()})


def test_progress_is_told_up_to_the_last_byte(tmp_path: Path) -> None:
    spec = spec_of("SGD", [Variable("table", (1001, 700), DType.FLOAT32)])
    shard = Job.of(shard_map_of(spec, 1), seed=1).train([1]).shards[0]
    heard: list[tuple[int, int]] = []
    layout, state = shard.region.layout, shard.optimizer.state()
    write_part(tmp_path, layout, shard.region.bytes, state, {}, lambda done, total: heard.append((done, total)))
    total = 2 * 1001 * 700 * 4
    assert heard[-1] == (total, total)
    assert heard == sorted(heard)
    assert len(heard) >= 6


def test_a_region_may_be_restored_before_any_other_shard_is_there(tmp_path: Path) -> None:
    spec = small_spec()
    job = Job.of(shard_map_of(spec, 2), seed=1)
    checkpoint = job.save(tmp_path)
    layout = Layout.of(shard_map_of(spec, 3), 2)
    region = Region(layout)
    read_values(checkpoint, layout, region.bytes)
    values = job.values()
    for index, span in enumerate(layout.slices):
        value = values[span.variable.name]
        rows = value[span.slice.row_begin : span.slice.row_end] if value.dim() else value
        assert raw(region.slice(index)) == raw(rows)
