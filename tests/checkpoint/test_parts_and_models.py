"""Parts must make whole models, and a model goes on only from its own checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ps_protocol.errors import DamagedData, InvalidRequest, ModelMismatch
from ps_protocol.model.layout import Layout
from ps_protocol.model.spec import DType, Kind, ModelSpec, Variable
from ps_server.checkpoint.checkpoint import Checkpoint
from ps_server.checkpoint.commit import commit
from ps_server.checkpoint.directory import begin, committed
from ps_server.checkpoint.messages import part_from_pb, part_to_pb
from ps_server.checkpoint.model_reader import read_state, read_values
from ps_server.checkpoint.model_writer import write_part
from ps_server.checkpoint.record import ShardPart
from ps_server.consistency import TrackerState
from ps_server.optimizers.state import StateKey
from ps_server.state.region import Region

from .support import Job, shard_map_of, small_spec

Parts = list[ShardPart]

WRONG: list[tuple[Callable[[Parts], Parts], str]] = [
    (lambda parts: parts[:1], "the shards differ; expected: 1; actual: none"),
    (lambda parts: [*parts, parts[0]], "the shards differ; expected: none; actual: 0"),
    (
        lambda parts: [parts[0], replace(parts[1], epoch=9)],
        "the epochs of the shard map differ; expected: 3; actual: 9",
    ),
    (
        lambda parts: [parts[0], replace(parts[1], pieces=parts[1].pieces[1:])],
        r"the slices differ; expected: \('count'",
    ),
    (
        lambda parts: [replace(parts[0], pieces=parts[0].pieces * 2), parts[1]],
        "the slices differ; expected: none; actual: .'layer",
    ),
    (lambda parts: [parts[0], replace(parts[1], files=parts[0].files)], "the files and their bytes differ"),
    (
        lambda parts: [replace(p, files=tuple(replace(f, size_bytes=p.shard) for f in p.files)) for p in parts],
        "the (forms of model-.*|files and their bytes) differ",
    ),
    (lambda parts: [*parts, replace(parts[0], model="other")], "a model that is not in this checkpoint; actual: other"),
]


@pytest.mark.parametrize(("change", "says"), WRONG, ids=[says.split(";")[0] for _, says in WRONG])
def test_parts_that_do_not_make_a_whole_model_make_no_checkpoint(
    tmp_path: Path, change: Callable[[Parts], Parts], says: str
) -> None:
    job = Job.of(shard_map_of(small_spec(), 2), seed=1).train([1])
    folder = begin(tmp_path)
    with pytest.raises(InvalidRequest, match=says):
        commit(folder, [job.shard_map], change(job.parts(folder)), {}, 0.0)
    assert committed(tmp_path) == []


@pytest.mark.parametrize("harm", ["cut", "removed"])
def test_a_file_that_changed_before_the_commit_makes_no_checkpoint(tmp_path: Path, harm: str) -> None:
    job = Job.of(shard_map_of(small_spec(), 2), seed=1)
    folder = begin(tmp_path)
    parts = job.parts(folder)
    path = folder / "model" / parts[0].files[0].name
    if harm == "cut":
        path.write_bytes(path.read_bytes()[:-1])
    else:
        path.unlink()
    with pytest.raises(DamagedData, match=str(path)):
        commit(folder, [job.shard_map], parts, {}, 0.0)
    assert committed(tmp_path) == []


def test_values_of_another_layout_are_refused(tmp_path: Path) -> None:
    shard = Job.of(shard_map_of(small_spec(), 1)).shards[0]
    with pytest.raises(InvalidRequest, match="these are not the values of this layout; shard: 0; expected: "):
        write_part(tmp_path, shard.region.layout, shard.region.bytes[:-1], [], {})
    assert list(tmp_path.iterdir()) == []


def test_state_that_is_given_twice_or_has_no_dtype_of_ours_is_refused(tmp_path: Path) -> None:
    shard = Job.of(shard_map_of(small_spec(), 1), seed=1).train([1]).shards[0]
    layout, state = shard.region.layout, shard.optimizer.state()
    with pytest.raises(InvalidRequest, match="cannot hold this tensor; variable: layer"):
        write_part(tmp_path, layout, shard.region.bytes, [*state, state[0]], {})
    odd = [(StateKey(0, "step"), torch.zeros((), dtype=torch.complex64))]
    with pytest.raises(InvalidRequest, match=r"variable: layer.*/step; .*actual: torch\.complex64"):
        write_part(tmp_path, layout, shard.region.bytes, odd, {})


def test_a_part_with_a_dtype_of_a_later_version_is_refused(tmp_path: Path) -> None:
    shard = Job.of(shard_map_of(small_spec(), 1)).shards[0]
    message = part_to_pb(write_part(tmp_path, shard.region.layout, shard.region.bytes, [], {}), TrackerState())
    message.pieces[0].dtype = 99
    with pytest.raises(InvalidRequest, match="dtype 99 is not known here"):
        part_from_pb(message)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return Job.of(shard_map_of(small_spec("SGD"), 2), seed=1).train([1]).save(tmp_path_factory.mktemp("checkpoints"))


def other_spec() -> ModelSpec:
    saved = small_spec("SGD")
    variables = list(saved.variables[:-2])
    variables[0] = replace(variables[0], dtype=DType.FLOAT64)
    variables[4] = replace(variables[4], shape=(8,), kind=Kind.BUFFER)
    variables.append(Variable("new", (1,), DType.FLOAT32))
    return replace(saved, variables=tuple(variables), group_options=({"lr": 0.5, "momentum": 0, "nesterov": False},))


def test_another_model_is_refused_with_every_difference(checkpoint: Checkpoint) -> None:
    with pytest.raises(ModelMismatch) as caught:
        checkpoint.check_matches(other_spec())
    head, *lines = caught.value.message.splitlines()
    assert head == f"model 'model' is not the one in {checkpoint.folder}, 7 differences:"
    assert [line.strip() for line in lines] == [
        "variable 'layer.0': dtype float64 instead of float32",
        "variable 'layer.4': shape (8,) instead of (7,)",
        "variable 'layer.4': kind buffer instead of parameter",
        "variable 'layer.8' is missing",
        "variable 'count' is missing",
        "variable 'new' is extra",
        "parameter group 0: momentum 0 instead of 0.9",
    ]


def test_reading_another_model_changes_no_byte(checkpoint: Checkpoint) -> None:
    layout = Layout.of(shard_map_of(other_spec(), 1), 0)
    region = Region(layout)
    with pytest.raises(ModelMismatch):
        read_values(checkpoint, layout, region.bytes)
    with pytest.raises(ModelMismatch):
        read_state(checkpoint, layout)
    assert not region.data.any()


def test_another_optimizer_is_refused(checkpoint: Checkpoint) -> None:
    with pytest.raises(ModelMismatch, match=r"optimizer: torch.optim.Adam instead of torch.optim.SGD"):
        checkpoint.check_matches(small_spec("Adam"))


def test_another_learning_rate_is_no_other_model(checkpoint: Checkpoint) -> None:
    saved = small_spec("SGD")
    checkpoint.check_matches(replace(saved, group_options=({"lr": 7.0, "momentum": 0.5},)))


def test_a_model_of_another_name_is_refused_with_the_names_there_are(checkpoint: Checkpoint) -> None:
    with pytest.raises(ModelMismatch, match="has no model 'other'; expected: other; actual: model; "):
        checkpoint.check_matches(small_spec("SGD", name="other"))
