"""psctl tables --plan: each size that it says is that of a real table, within a tenth; what cannot be is refused."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from ps_protocol.model.layout import Layout
from ps_protocol.model.spec import ShardMap
from ps_protocol.model.tables import Ids
from ps_server.checkpoint.table_copy import ORDER_BYTES, TableCapture
from ps_server.checkpoint.table_writer import write_table
from ps_server.cli.psctl.main import main
from ps_server.cli.psctl.tables import TablePlan, plan, table_of
from ps_server.consistency import TrackerState
from ps_server.log.messages import encode_steps
from ps_server.log.snapshots import ModelPart, SnapshotWriter
from ps_server.shard.durability.snapshotter import begin_saves
from ps_server.state.blocks import buckets_of, save_group
from ps_server.tables.row_memory import RowMemory
from ps_server.tables.step import RowStep
from ps_server.tables.table import ShardTable
from tests.checkpoint.tables import map_of, spec_of
from tests.support.length import few
from tests.tables.samples import random_ids, use

ROWS, AT_ONCE = 100_000, 5_000

KINDS = {
    "odd width": "dim=3 optimizer=adagrad buckets=64",
    "two states and uses": "dim=8 optimizer=adam eviction=lfu",
    "many buckets": "dim=4 optimizer=ftrl buckets=1024",
    "few numbers": "dim=1 optimizer=sgd",
    "one sum": "dim=16 optimizer=rowwise_adagrad",
}


@dataclass
class Shard:
    """A table with ROWS rows, all on one shard, and what is planned for it."""

    planned: TablePlan
    table: ShardTable
    shard_map: ShardMap
    ids: Ids

    @property
    def layout(self) -> Layout:
        return Layout.of(self.shard_map, 0)


def shard(folder: Path, settings: str) -> Shard:
    spec, rows, shards = table_of([f"rows={ROWS}", *settings.split()])
    planned, together = plan(spec, rows, shards)
    assert planned == together
    table = ShardTable(spec, range(spec.buckets), RowMemory(0, folder, segment_bytes=1 << 14))
    ids = random_ids(np.random.default_rng(1), ROWS)
    for begin in range(0, ROWS, AT_ONCE):
        use(table, ids[begin : begin + AT_ONCE])
    return Shard(planned, table, map_of(spec_of(spec), 1), ids)


def within_a_tenth(planned: int) -> object:
    return pytest.approx(planned, rel=0.1)


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


@pytest.fixture(params=few(KINDS.values(), 3), ids=few(KINDS, 3))
def held(request, tmp_path):
    return shard(tmp_path, request.param)


def test_the_memory_of_a_table_is_as_planned(held):
    assert held.table.rows == held.planned.rows == held.planned.rows_in_memory
    assert held.table.memory_bytes == within_a_tenth(held.planned.memory_bytes)


def test_a_full_checkpoint_and_the_memory_that_it_takes_are_as_planned(held, tmp_path):
    copy = TableCapture(held.table, None)
    while copy.step():
        pass
    copied = sum(array.nbytes for array in (copy.rows.ids, copy.rows.touched, copy.rows.rows, copy.rows.uses))
    assert copied + ORDER_BYTES * ROWS == within_a_tenth(held.planned.checkpoint_memory_bytes)
    write_table(tmp_path / "checkpoint", held.layout, copy)
    assert size_of(tmp_path / "checkpoint") == within_a_tenth(held.planned.checkpoint_bytes)


def test_snapshots_are_as_planned_and_take_no_more_than_that_where_every_row_changes_between_two(held, tmp_path):
    most = 0
    for number in range(6):
        with SnapshotWriter(tmp_path / "snapshots", number) as writer:
            parts, saves = begin_saves([held.table], writer.has)
            writer.begin_model(ModelPart(held.shard_map, True, TrackerState(), number, rows=parts))
            wanted = buckets_of(held.layout)
            while group := save_group(saves, wanted):
                writer.write_saved(number, group)
            most = max(most, size_of(tmp_path / "snapshots"))
            snapshot = writer.commit(number, log_goes_on=True)
        saves[0].end(snapshot.models[0].rows)
        if not number:
            assert size_of(tmp_path / "snapshots") == within_a_tenth(held.planned.snapshot_bytes)
        use(held.table, held.ids[: ROWS if number % 2 else int(0.49 * ROWS)])
    assert 0.8 * held.planned.most_snapshot_bytes < most < 1.1 * held.planned.most_snapshot_bytes


def test_a_pushed_row_is_in_the_log_with_as_many_bytes_as_planned(held):
    spec = held.table.spec
    step = RowStep(0, held.ids, np.zeros((ROWS, spec.dim), np.float32), 1, spec.options)
    _, pieces = encode_steps([step], held.shard_map.spec)
    assert 10 * sum(map(len, pieces)) == held.planned.log_bytes_per_million


@pytest.mark.parametrize("settings", few([KINDS["two states and uses"], KINDS["odd width"], KINDS["one sum"]], 2))
def test_with_rows_on_disk_memory_and_file_are_as_planned_also_after_rows_have_come_and_gone(settings, tmp_path):
    held = shard(tmp_path, f"{settings} memory=5MB")
    planned, paged = held.planned, held.table.paged
    assert planned.rows_in_memory < ROWS
    assert held.table.memory_bytes == within_a_tenth(planned.memory_bytes) == within_a_tenth(5 << 20)
    assert paged.in_memory == within_a_tenth(planned.rows_in_memory)
    assert paged.disk_bytes == within_a_tenth(planned.rows_file_bytes)
    chance, most = np.random.default_rng(2), 0
    for _ in range(100):
        use(held.table, np.unique(chance.choice(held.ids, AT_ONCE)))
        most = max(most, paged.disk_bytes)
    assert held.table.memory_bytes == within_a_tenth(planned.memory_bytes)
    assert 0.8 * planned.most_rows_file_bytes < most < 1.1 * planned.most_rows_file_bytes
    copy = TableCapture(held.table, None)
    while copy.step():
        pass
    kept = copy._kept
    arrays = copy.rows.ids, copy.rows.touched, copy.rows.uses, kept._values, kept._ids, kept._places
    copied = sum(array.nbytes for array in arrays)
    assert copied + ORDER_BYTES * ROWS == within_a_tenth(planned.checkpoint_memory_bytes)


def test_several_shards_have_together_what_one_would_have_and_the_fullest_is_shown():
    spec, rows, _ = table_of(["rows=1e8", "dim=16", "optimizer=adagrad", "memory=5GB"])
    alone, _ = plan(spec, rows, 1)
    fullest, together = plan(spec, rows, 3)
    assert fullest.rows == -(-rows * 86 // 256)
    assert together.rows == pytest.approx(rows, abs=3)
    assert together.memory_bytes == pytest.approx(5 << 30, rel=1e-3)
    assert together.checkpoint_bytes == pytest.approx(alone.checkpoint_bytes, rel=1e-3)
    assert together.most_log_bytes == 3 * alone.most_log_bytes


def psctl(*settings: str, output: str = "text"):
    return CliRunner().invoke(main, ["tables", "--plan", *settings, "-o", output])


GOOD = "rows=1e9", "dim=64", "optimizer=adagrad"


def test_a_plan_needs_no_job_and_is_text_or_json():
    shown = psctl(*GOOD, "shards=4", "memory=64GB")
    assert shown.exit_code == 0
    lines = [line.split("  ") for line in shown.output.splitlines()]
    assert lines[0][-2:] == ["a shard", "all 4"] or shown.output.splitlines()[0].split() == ["a", "shard", "all", "4"]
    assert any(line[0] == "memory" and line[-1].strip() == "64.0 GB" for line in lines)
    found = json.loads(psctl(*GOOD, "shards=4", "memory=64GB", output="json").output)
    assert found["shards"] == 4
    assert found["all"]["rows"] == 10**9 == 4 * found["shard"]["rows"]
    assert found["all"]["memory_bytes"] == pytest.approx(64 << 30, rel=1e-6)


def test_memory_that_ids_and_maps_exceed_is_said():
    shown = psctl(*GOOD, "shards=4", "memory=4GB")
    assert "memory is too little: ids and maps alone take" in shown.output
    assert "rows on disk" in shown.output


BAD = {
    ("rows=1e9", "dim=64"): "a plan needs more",
    (*GOOD, "shard=4"): "shard=4",
    (*GOOD, "shards"): "not a property",
    (*GOOD, "shards="): "not a property",
    (*GOOD, "dim=8"): "dim=64 and dim=8",
    ("rows=-1", *GOOD[1:]): "rows cannot be this",
    ("rows=0", *GOOD[1:]): "rows cannot be this",
    ("rows=1.5", *GOOD[1:]): "rows cannot be this",
    ("rows=nan", *GOOD[1:]): "rows cannot be this",
    ("rows=inf", *GOOD[1:]): "rows cannot be this",
    ("rows=1e999999999", *GOOD[1:]): "rows cannot be this",
    ("rows=many", *GOOD[1:]): "rows cannot be this",
    ("rows=\u0661", *GOOD[1:]): "rows cannot be this",
    ("rows=1e12", *GOOD[1:]): "plan with more shards",
    (*GOOD, "shards=300"): "more shards than buckets",
    (*GOOD, "shards=0"): "shards cannot be this",
    ("rows=1e9", "dim=0", "optimizer=adagrad"): "dim cannot be this",
    ("rows=1e9", "dim=20000", "optimizer=adagrad"): "1 to 16384",
    ("rows=1e9", "dim=64", "optimizer=adamw"): "sgd, adagrad, rowwise_adagrad, adam, ftrl",
    (*GOOD, "memory=much"): "such as 512MB or 4GB",
    (*GOOD, "memory=0"): "such as 512MB or 4GB",
    (*GOOD, "buckets=100"): "a power of two",
    (*GOOD, "eviction=random"): "refuse, lru, lfu",
    (): "a plan needs more",
}


@pytest.mark.parametrize("settings", BAD, ids=" ".join)
def test_what_cannot_be_is_refused_with_what_can(settings):
    refused = psctl(*settings)
    assert refused.exit_code == 2
    assert BAD[settings] in " ".join(refused.output.split())
    assert refused.output.startswith("Error:")


def test_without_plan_the_command_says_what_is_missing():
    refused = CliRunner().invoke(main, ["tables", *GOOD])
    assert refused.exit_code == 2
    assert "--plan" in refused.output
