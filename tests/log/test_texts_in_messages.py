"""What was written while options and positions were JSON text inside messages is read as it was meant."""

from __future__ import annotations

import tarfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from ps_protocol.model.layout import Layout
from ps_protocol.model.spec import DType, ModelSpec, Option, Options, ShardMap, Slice, Variable
from ps_server.consistency import ParticipantStatus, Position, PushInfo, TrackerState, WorkerKey
from ps_server.log.durable import DurableLog
from ps_server.log.entries import AppliedUpdate, Loaded, Placed, Resharded, RowsLoaded, StagedReshard
from ps_server.log.manifest import ModelPart
from ps_server.log.recovery import Recovered
from ps_server.log.row_messages import describe_buckets
from ps_server.log.snapshots import SnapshotWriter
from ps_server.optimizers.state import StateKey
from ps_server.state.blocks import blocks_of
from ps_server.state.bucket_groups import buckets_of
from ps_server.state.model_state import ModelState
from ps_server.state.replica import Step
from ps_server.tables.step import RowStep
from tests.log.support import opened, random_region
from tests.support.table_bits import bits_of
from tests.support.tables import spec_with, table_spec, whole_table_map

DIRECTORY = Path(__file__).with_name("directory_of_format_2.tar.xz")

#: Every shape that an option may have.
GROUPS: tuple[dict[str, Option], ...] = (
    {"lr": 0.1, "betas": [0.5, 0.75], "eps": 1e-8, "amsgrad": True, "foreach": None, "weight_decay": 0},
    {"lr": 1, "betas": [0.25, 0.5], "eps": 1e-8, "amsgrad": False, "maximize": True},
)
KNOWN = TrackerState(
    7,
    Position(1, 2),
    Position(1, 3),
    (
        ParticipantStatus(WorkerKey(0, 5), Position(1, 3), 9),
        ParticipantStatus(WorkerKey(1, 6), Position(0, 4), 1 << 40),
    ),
    {"applied": 7, "duplicate": 2},
    (3, 0, 4),
)


def trained_map() -> ShardMap:
    """Two groups and two tables, all of it here."""
    tables = (table_spec("ads", 3, "adagrad", buckets=4), table_spec("words", 2, "adam", buckets=2))
    spec = spec_with(*tables, shapes=((4, 3), (5,)), optimizer="torch.optim.Adam")
    variables = tuple(replace(variable, group=number) for number, variable in enumerate(spec.variables))
    return whole_table_map(replace(spec, variables=variables, group_options=GROUPS))


def moved_map(epoch: int) -> ShardMap:
    """Its second variable comes to this shard at epoch 2."""
    variables = (Variable("a", (3, 2), DType.FLOAT32), Variable("b", (5,), DType.FLOAT32))
    spec = ModelSpec("moved", "torch.optim.SGD", variables, ({"lr": 0.1, "momentum": 0.9},))
    slices = tuple(Slice(i, 0, v.rows, 0 if i < epoch else 1) for i, v in enumerate(variables))
    return ShardMap(epoch, spec, 2, slices)


def step_of(layout: Layout, version: int, options: tuple[Options, ...]) -> AppliedUpdate:
    steps = [
        RowStep(
            number,
            np.arange(version, version + 6, dtype=np.int64),
            np.full((6, table.dim), version / 4, np.float32),
            version,
            {**table.options, "lr": 0.5 / version},
        )
        for number, table in enumerate(layout.shard_map.spec.tables)
    ]
    pushes = (PushInfo(WorkerKey(0, 5), version, Position(0, version), version - 1),)
    step = Step(random_region(layout, version), frozenset(), options, 0.5, tables=steps)
    return AppliedUpdate(layout.shard_map.spec.name, version, pushes, False, step)


def write(root: Path) -> None:
    """A snapshot, and behind it records of every kind that held text."""
    trained, before = Layout.of(trained_map(), 0), Layout.of(moved_map(1), 0)
    decayed = tuple({**group, "lr": 0.01} for group in GROUPS)
    with opened(root, gently=True) as (log, _):
        for layout in (trained, before):
            log.append(Placed(layout.shard_map))
            log.append(Loaded(layout.shard_map.spec.name, random_region(layout, 0), None))
        for number, table in enumerate(trained.shard_map.spec.tables):
            rows = np.arange(6 * table.dim, dtype=np.float32).reshape(6, table.dim)
            log.append(RowsLoaded("model", number, np.arange(6), rows, with_state=False, only_new=False))
    with opened(root, gently=True) as (log, found):
        snapshot(log, found)
        for version, options in enumerate((GROUPS, GROUPS, decayed, decayed), 1):
            log.append(step_of(trained, version, options))
        entries = [(StateKey(0, "momentum_buffer"), torch.arange(6.0).reshape(3, 2))]
        log.append(Loaded("moved", random_region(before, 3), entries, KNOWN))
        values = memoryview(bytearray(np.arange(5, dtype=np.float32).tobytes()))
        arrived = [(StateKey(1, "momentum_buffer"), torch.arange(5.0))]
        log.append(StagedReshard(moved_map(2), (1,), values, arrived, KNOWN))
        log.append(Resharded("moved", 2))
        log.append(StagedReshard(moved_map(3), (), memoryview(b""), [], KNOWN))


def snapshot(log: DurableLog, found: Recovered) -> None:
    with SnapshotWriter(log._folder.snapshots, found.number) as writer:
        for model in found.models.values():
            replica, layout = model.replica, model.replica.layout
            writer.begin_model(ModelPart(model.shard_map, True, model.tracker.persisted_state(), found.number))
            for block in blocks_of(layout):
                values = replica.region.bytes[block.begin : block.end]
                writer.write_block(block, found.number, values, replica.state(block.slices))
            if pieces := list(buckets_of(layout)):
                copies = [(table, replica.tables[table].contents(bucket)) for table, bucket in pieces]
                payload = [data for _, contents in copies for data in contents.pieces()]
                writer.write_buckets(found.number, describe_buckets(copies), payload)
        log.flush()
        made = writer.commit(found.number, log_goes_on=True)
    log._folder.holds_snapshot(made.through)


def read(root: Path) -> tuple[int, dict[str, tuple[object, ...]]]:
    """All that a shard knows again."""
    with opened(root) as (_, found):
        return found.number, {name: described(model) for name, model in sorted(found.models.items())}


def described(model: ModelState) -> tuple[object, ...]:
    replica, pending = model.replica, model.pending
    state = {(key.slice_index, key.name): tensor.numpy().tobytes() for key, tensor in replica.state_views()}
    rows = [table.updates for table in replica.tables], bits_of(replica.tables, replica.layout.buckets)
    waits = pending and (pending.shard_map, pending.incoming, bytes(pending.values), pending.tracker)
    return model.shard_map, bytes(replica.region.bytes), state, rows, model.tracker.persisted_state(), waits


def test_a_directory_with_texts_in_its_messages_holds_what_was_written(tmp_path: Path) -> None:
    with tarfile.open(DIRECTORY) as archive:
        archive.extractall(tmp_path / "old", filter="data")
    write(tmp_path / "new")
    assert read(tmp_path / "old") == read(tmp_path / "new")


def test_such_a_directory_goes_on_and_is_read_again(tmp_path: Path) -> None:
    with tarfile.open(DIRECTORY) as archive:
        archive.extractall(tmp_path, filter="data")
    with opened(tmp_path, gently=True) as (log, found):
        snapshot(log, found)
        layout = found.models["model"].replica.layout
        log.append(step_of(layout, 5, GROUPS))
    write(tmp_path / "new")
    with opened(tmp_path / "new", gently=True) as (log, _):
        log.append(step_of(layout, 5, GROUPS))
    (_, mine), (_, other) = read(tmp_path), read(tmp_path / "new")
    assert mine["model"] == other["model"]
    # A snapshot leaves out what was prepared.
    assert mine["moved"][:-1] == other["moved"][:-1]
