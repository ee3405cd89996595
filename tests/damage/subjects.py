"""The directories that are damaged: of shards, of a coordinator, of checkpoints, and the files of a reader."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from ps_protocol.errors import DamagedData
from ps_protocol.feed.cursor import load_cursor, save_cursor
from ps_protocol.model.layout import Layout
from ps_server.checkpoint.checkpoint import Checkpoint
from ps_server.checkpoint.directory import latest
from ps_server.checkpoint.model_reader import read_state, read_values
from ps_server.checkpoint.table_reader import saved_table
from ps_server.coordinator.persistence.journal import Journal
from ps_server.log.folder import DataFolder
from ps_server.log.recovery import recover
from ps_server.state.region import Region
from ps_server.tables.row_memory import RowMemory
from ps_server.tables.table import ShardTable
from ps_worker.feed import TableCopy
from tests.checkpoint.support import Job, shard_map_of, small_spec
from tests.checkpoint.tables import TableJob
from tests.checkpoint.tables import table_spec as saved_spec
from tests.damage.judge import Subject
from tests.log.support import go_on, layout_of, opened, write_log, write_snapshot
from tests.log.test_bucket_ages import Writer
from tests.log.test_windows import Shard as WindowShard
from tests.support.table_bits import bits_of
from tests.tables.samples import spec as table_spec
from tests.tables.samples import use as use_rows
from tests.tables.samples import values as row_values


@contextmanager
def small() -> Any:
    """Several segments, blocks and files, also of some bytes."""
    with (
        mock.patch("ps_server.log.segments.SEGMENT_BYTES", 1 << 13),
        mock.patch("ps_server.log.record.MESSAGE_BYTES", 1 << 11),
        mock.patch("ps_server.state.blocks.BLOCK_BYTES", 40),
    ):
        yield


# A shard


def _write_shard(root: Path, seed: int, *, rounds: int, gently: bool) -> None:
    chance = random.Random(seed)
    with small(), opened(root, gently=gently) as (log, _):
        writer = Writer(log, root / "shard-0" / "snapshots", chance)
        for _ in range(rounds):
            for _ in range(8):
                writer.change()
            snapshot = writer.snapshot(lambda: [writer.change() for _ in range(chance.randrange(2))])
            log._folder.holds_snapshot(snapshot.through)
        for _ in range(8):
            writer.change()


def _write_plain_shard(root: Path) -> None:
    layout = layout_of((40, 3), (5,), (7, 7))
    with small():
        write_log(root, layout, 9)
        write_snapshot(root)
        go_on(root, layout, 10, 25)


def _read_shard(root: Path, *, log_goes_on: bool = True) -> object:
    from ps_server.log.durable import DurableLog

    with small():
        folder = DataFolder.open(root, 0)
        try:
            found = recover(folder, log_goes_on=log_goes_on)
            log = DurableLog(folder, found.number, found.end, sync=False, writing=log_goes_on)
            log._close_segment()
            return found.number, {name: _model(model) for name, model in sorted(found.models.items())}
        finally:
            folder.close()


def _model(model: Any) -> object:
    replica = model.replica
    state = {(key.slice_index, key.name): tensor.numpy().tobytes() for key, tensor in replica.state()}
    tables = [table.updates for table in replica.tables], bits_of(replica.tables, replica.layout.buckets)
    return bytes(replica.region.bytes), state, tables, model.tracker.persisted_state(), model.initialised


def _write_windows(root: Path) -> None:
    with small():
        shard = WindowShard(root)
        for _ in range(3):
            shard.step()
            shard.snapshot(cut=True)
            (newest,) = (int(path.name) for path in shard.folder.snapshots.glob("[0-9]*"))
            shard.folder.holds_snapshot(newest)
        shard.killed()


# Rows on disk


def _table_with_rows_on_disk(folder: Path) -> tuple[ShardTable, int]:
    """The same at each call, to the byte; and the descriptor of the file of its rows, which has no name."""
    of = table_spec("adagrad", dim=3)
    table = ShardTable(of, range(of.buckets), RowMemory(1, folder, segment_bytes=1 << 10))
    chance = np.random.default_rng(1)
    for _ in range(3):
        use_rows(table, chance.permutation(120), chance.standard_normal((120, 3), np.float32))
    assert table.paged is not None
    return table, table.paged._rows_file.descriptor


def _write_rows_on_disk(root: Path) -> None:
    _, descriptor = _table_with_rows_on_disk(root)
    (root / "rows").write_bytes(os.pread(descriptor, os.fstat(descriptor).st_size, 0))


def _read_rows_on_disk(root: Path) -> object:
    """The table goes on with what has become of its file."""
    table, descriptor = _table_with_rows_on_disk(root)
    os.ftruncate(descriptor, 0)
    if (root / "rows").exists():
        os.pwrite(descriptor, (root / "rows").read_bytes(), 0)
    served = row_values(table, np.arange(120)).tobytes()
    use_rows(table, np.arange(0, 120, 2), np.ones((60, 3), np.float32))
    return served, [[bytes(piece) for piece in table.contents(bucket).pieces()] for bucket in range(table.spec.buckets)]


# A coordinator


def _write_journal(folder: Path, *, closed: bool) -> None:
    open_folder = folder.with_name("open")
    shutil.rmtree(open_folder, ignore_errors=True)
    with Journal.open(open_folder) as journal:
        for number in range(20):
            rows: Mapping[str, bytes | None] = {
                "cluster": b'{"revision": %d, "mode": "ssp(2)"}' % number,
                f"model {number % 5}": bytes([number]) * 300,
                f"model {(number + 2) % 7}": None if number % 3 else b"again",
            }
            journal.write(rows)
        if not closed:
            shutil.copytree(open_folder, folder, dirs_exist_ok=True)
    if closed:
        shutil.copytree(open_folder, folder, dirs_exist_ok=True)
    shutil.rmtree(open_folder)


def _read_journal(folder: Path) -> object:
    with Journal.open(folder) as journal:
        return journal.read()


# Checkpoints


def _write_checkpoint(folder: Path) -> None:
    Job.of(shard_map_of(small_spec("Adam"), 2), seed=1).train([1]).save(folder)


def _read_checkpoint(folder: Path) -> object:
    checkpoint = Checkpoint.open(_newest(folder))
    checkpoint.verify()
    layout = Layout.of(shard_map_of(small_spec("Adam"), 1), 0)
    region = Region(layout)
    read_values(checkpoint, layout, region.bytes)
    state = read_state(checkpoint, layout)
    return bytes(region.bytes), [(key.slice_index, key.name, tensor.numpy().tobytes()) for key, tensor in state]


def _write_rows(folder: Path) -> None:
    job = TableJob.of(saved_spec(), shards=2)
    for seed in range(3):
        job.push(np.arange(40, dtype=np.int64), seed)
    job.save(folder)
    job.push(np.arange(5, dtype=np.int64), 9)
    job.save(folder)


def _read_rows(folder: Path) -> object:
    checkpoint = Checkpoint.open(_newest(folder))
    checkpoint.verify()
    with saved_table(checkpoint, "model", "ads") as table:
        contents = [table.contents(bucket) for bucket in range(table.spec.buckets)]
        return table.updates, [b"".join(map(bytes, each.pieces())) for each in contents]


def _newest(folder: Path) -> Path:
    """By its name: a folder without a manifest is none, and the one before it is no wrong answer of its reader."""
    return max(folder.glob("checkpoint-*"), default=None) or latest(folder) or folder / "checkpoint-00000001"


# The files of a reader of changes


def _write_copy(folder: Path) -> None:
    copy = TableCopy()
    ids = np.arange(100, dtype=np.int64)
    copy._write(ids, np.random.default_rng(1).standard_normal((100, 3)).astype(np.float32))
    copy.cursor = {"model": "model", "table": "ads", "shards": {}}
    copy.save(folder / "copy")
    save_cursor(folder / "cursor", copy.cursor)


def _read_copy(folder: Path) -> object:
    for name in ("copy", "cursor"):
        if not (folder / name).exists():
            # Its reader starts over, and is right in the end.
            raise DamagedData(f"{folder / name} is missing")
    copy = TableCopy.load(folder / "copy")
    return copy.rows(np.arange(100)).tobytes(), copy.cursor, load_cursor(folder / "cursor")


SUBJECTS = (
    Subject("shard, killed", lambda root: _write_shard(root, 1, rounds=2, gently=False), _read_shard),
    Subject("shard, killed, no snapshot", lambda root: _write_shard(root, 2, rounds=0, gently=False), _read_shard),
    Subject("shard, stopped", lambda root: _write_shard(root, 3, rounds=1, gently=True), _read_shard),
    Subject("shard, no tables", _write_plain_shard, _read_shard),
    Subject("shard, snapshots only", _write_windows, lambda root: _read_shard(root, log_goes_on=False)),
    Subject("rows on disk", _write_rows_on_disk, _read_rows_on_disk),
    Subject("journal, killed", lambda root: _write_journal(root, closed=False), _read_journal),
    Subject("journal, closed", lambda root: _write_journal(root, closed=True), _read_journal),
    Subject("checkpoint", _write_checkpoint, _read_checkpoint),
    Subject("checkpoint of tables", _write_rows, _read_rows),
    Subject("cursor and copy", _write_copy, _read_copy),
)
