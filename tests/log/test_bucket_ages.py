"""Buckets that were copied at any moment, in any order, and the records since then are the table that was."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from ps_protocol.errors import DamagedData
from ps_protocol.model.tables import RowLife
from ps_protocol.sealed import load, seal
from ps_server.consistency import Position, PushInfo, WorkerKey
from ps_server.log.entries import AppliedUpdate, BucketsPut, Loaded, Placed, RowsDropped, RowsLoaded
from ps_server.log.messages import apply_rows, describe_buckets
from ps_server.log.snapshots import FIRST_FORMAT, FORMAT, ModelPart, SnapshotWriter, encode_index, part_of
from ps_server.shard.durability.snapshotter import begin_saves
from ps_server.state.blocks import blocks_of, buckets_of, copy_group
from ps_server.state.model_state import new_model
from ps_server.state.replica import Step
from ps_server.tables.step import RowStep
from tests.log.support import opened, random_region
from tests.support.length import few
from tests.support.seeds import seeded
from tests.support.table_bits import bits_of
from tests.support.tables import spec_with, table_spec, whole_table_map

TABLES = (
    table_spec("plain", 3, "rowwise_adagrad", buckets=4),
    table_spec("waiting", 2, "adam", life=RowLife(admit_after=2), buckets=8),
    table_spec("chance", 1, "ftrl", life=RowLife(admit_probability=0.4), buckets=2),
)
IDS = 60


class Writer:
    """A model that is changed and logged as a shard does it, by chance; and snapshots of it, piece by piece."""

    def __init__(self, log, snapshots, chance, tables=TABLES, **spec):
        self.log, self.chance, self.snapshots = log, chance, snapshots
        self.model = new_model(whole_table_map(spec_with(*tables, **spec)), 0)
        self.layout, self.tables = self.model.replica.layout, self.model.replica.tables
        loaded = Loaded("model", random_region(self.layout, 0), None)
        log.append(Placed(self.layout.shard_map))
        self.model.replica.load(loaded.region, None)
        log.append(loaded)
        self.model.initialised = True

    def ids(self, count):
        return np.array(self.chance.sample(range(-IDS // 2, IDS // 2), count), np.int64)

    def numbers(self, rows, width):
        generator = np.random.default_rng(self.chance.randrange(1 << 30))
        return generator.standard_normal((rows, width), np.float32)

    def update(self, takes_part=0.7):
        steps = []
        for number, table in enumerate(self.tables):
            if self.chance.random() < takes_part:
                ids = self.ids(self.chance.randrange(20))
                gradients = self.numbers(ids.size, table.spec.dim)
                steps.append(RowStep(number, ids, gradients, table.updates + 1, table.spec.options))
        version = self.model.tracker.version + 1
        push = PushInfo(WorkerKey(0, 1), version, Position(0, version), version - 1)
        region, options = random_region(self.layout, version), self.layout.shard_map.spec.group_options
        step = Step(region, frozenset(), options, self.chance.choice([1.0, 0.5]), tables=steps)
        self.log.append(AppliedUpdate("model", version, (push,), False, step))
        self.model.replica.apply(step)
        self.model.tracker.replay((push,), version, is_round=False)

    def drop(self):
        number = self.chance.randrange(len(self.tables))
        held = [self.tables[number].contents(bucket) for bucket in self.layout.buckets[number]]
        ids, waiting = (
            np.array(self.chance.sample(known, self.chance.randrange(len(known) + 1)), np.int64)
            for known in (
                [i for each in held for i in each.ids.tolist()],
                [i for each in held for i in each.waiting_ids.tolist()],
            )
        )
        self.rows(RowsDropped("model", number, ids, waiting))

    def load(self, most=10):
        number, with_state, only_new = self.chance.randrange(len(self.tables)), *self.chance.choices([True, False], k=2)
        spec, ids = self.tables[number].spec, self.ids(self.chance.randrange(most))
        values = np.abs(self.numbers(ids.size, spec.width if with_state else spec.dim))
        self.rows(RowsLoaded("model", number, ids, values, with_state, only_new))

    def put(self):
        """A bucket becomes what it was some updates ago, in a job that may have been further."""
        number = self.chance.randrange(len(self.tables))
        bucket = self.chance.choice(self.layout.buckets[number])
        contents = self.tables[number].contents(bucket)
        for _ in range(self.chance.randrange(3)):
            self.update()
        contents = replace(contents, updates=contents.updates + self.chance.randrange(3))
        self.rows(BucketsPut("model", [(number, contents)]))

    def rows(self, entry):
        self.log.append(entry)
        apply_rows(self.model.replica, entry)

    def change(self):
        self.chance.choices([self.update, self.drop, self.load, self.put], [3, 2, 3, 2])[0]()

    def snapshot(self, change=lambda: None):
        """A snapshot; ``change`` is called between any two of its pieces."""
        with SnapshotWriter(self.snapshots, self.log.number) as writer:
            change()
            tracker, number = self.model.tracker.persisted_state(), self.log.number
            parts, saves = begin_saves(self.tables, writer.has)
            writer.begin_model(ModelPart(self.layout.shard_map, True, tracker, number, rows=parts))
            pieces = [*blocks_of(self.layout), *buckets_of(self.layout)]
            self.chance.shuffle(pieces)
            while pieces:
                change()
                self.copy(writer, pieces, saves)
            change()
            self.log.flush(0)
            snapshot = writer.commit(self.log.number, log_goes_on=True)
        for save in saves:
            save.end(snapshot.models[0].rows)
        self.log.cut(snapshot.number, 0)
        return snapshot

    def copy(self, writer, pieces, saves):
        """One block, or some buckets."""
        replica, piece = self.model.replica, pieces.pop()
        if not isinstance(piece, tuple):
            values = replica.region.bytes[piece.begin : piece.end]
            writer.write_block(piece, self.log.number, values, replica.state(piece.slices))
            return
        group = [piece]
        while pieces and isinstance(pieces[-1], tuple) and self.chance.random() < 0.5:
            group.append(pieces.pop())
        writer.write_saved(self.log.number, [(table, saves[table].copy(bucket)) for table, bucket in group])

    def assert_same(self, found):
        replica = found.replica
        assert torch.equal(replica.region.data, self.model.replica.region.data)
        assert [table.updates for table in replica.tables] == [table.updates for table in self.tables]
        assert bits_of(replica.tables, self.layout.buckets) == bits_of(self.tables, self.layout.buckets)
        assert found.tracker.persisted_state() == self.model.tracker.persisted_state()


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr("ps_server.log.segments.SEGMENT_BYTES", 1 << 13)
    monkeypatch.setattr("ps_server.log.record.MESSAGE_BYTES", 1 << 11)
    monkeypatch.setattr("ps_server.state.blocks.BLOCK_BYTES", 40)


def written(root, chance, rounds):
    """A log with so many snapshots, each made while the model was changed; its writer."""
    with opened(root) as (log, _):
        writer = Writer(log, root / "shard-0" / "snapshots", chance)
        for _ in range(rounds):
            for _ in range(chance.randrange(20)):
                writer.change()
            writer.snapshot(lambda: [writer.change() for _ in range(chance.randrange(4))])
        for _ in range(chance.randrange(20)):
            writer.change()
    return writer


@pytest.mark.parametrize("rounds", few([5, 1, 0, 2], 2))
def test_buckets_of_many_ages_and_the_records_behind_them_are_what_was_served(tmp_path, rounds):
    for number in range(4):
        root = tmp_path / str(number)
        writer = written(root, seeded(), rounds)
        for _ in range(2):
            with opened(root) as (_, found):
                writer.assert_same(found.models["model"])


def test_rows_loaded_between_two_updates_are_of_that_age_in_a_bucket_copied_before_and_in_one_after(tmp_path):
    with opened(tmp_path) as (log, _):
        writer = Writer(log, tmp_path / "shard-0" / "snapshots", seeded(), TABLES[:1], shapes=())
        for _ in range(5):
            writer.update(1.0)
        pieces = iter(range(1000))

        def change():
            if next(pieces) >= 2:
                writer.load(IDS)
                writer.update(1.0)

        writer.snapshot(change)
    with opened(tmp_path) as (_, found):
        writer.assert_same(found.models["model"])


def snapshot_of(tmp_path, **fields):
    with opened(tmp_path) as (log, _):
        writer = Writer(log, tmp_path / "shard-0" / "snapshots", seeded(), **fields)
        for _ in range(5):
            writer.update()
        return writer, writer.snapshot()


def as_of_the_first_release(snapshot):
    """All buckets beside the blocks, in one file, as 0.1.0 wrote them."""
    blocks, manifest = snapshot.folder / "blocks.bin", snapshot.folder / "manifest.json"
    body = load(manifest, FORMAT, dict, "")
    for part, model in zip(body["models"], snapshot.models, strict=True):
        begin, rows = len(blocks.read_bytes()), (snapshot.folder / "rows.bin").read_bytes()
        moved = [replace(group, part=replace(group.part, offset=begin + group.part.offset)) for group in model.groups]
        index = encode_index(moved)
        blocks.write_bytes(blocks.read_bytes() + rows + index)
        place = part_of(begin + len(rows), [index])
        part["buckets"] = {"offset": place.offset, "size_bytes": place.size_bytes, "checksum": place.checksum}
        del part["rows"]
    (snapshot.folder / "rows.bin").unlink()
    manifest.write_bytes(seal(FIRST_FORMAT, body))


def test_a_snapshot_of_the_first_release_is_read_and_built_upon(tmp_path):
    writer, snapshot = snapshot_of(tmp_path)
    as_of_the_first_release(snapshot)
    with opened(tmp_path) as (log, found):
        again = found.models["model"]
        writer.assert_same(again)
        writer.log, writer.model, writer.tables = log, again, again.replica.tables
        writer.update()
        built = writer.snapshot()
        assert [rows.file for rows in built.models[0].rows] == ["blocks.bin", "rows.bin"]
    with opened(tmp_path) as (_, found):
        writer.assert_same(found.models["model"])


@pytest.mark.parametrize("part", ["bucket", "index"])
def test_a_damaged_bucket_is_found_and_nothing_is_changed(tmp_path, part):
    _, snapshot = snapshot_of(tmp_path)
    (model,) = snapshot.models
    place = model.rows[-1].index if part == "index" else model.groups[-1].part
    path = snapshot.folder / "rows.bin"
    with path.open("r+b") as file:
        file.seek(place.offset + place.size_bytes - 1)
        last = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([last[0] ^ 1]))
    before = path.read_bytes()
    wrong = f"what begins at byte {place.offset} is not what was written"
    with pytest.raises(DamagedData, match=wrong), opened(tmp_path):
        pass
    assert path.read_bytes() == before


def test_thousands_of_buckets_make_few_groups_and_a_short_manifest(tmp_path):
    with opened(tmp_path) as (log, _):
        tables = [table_spec(f"t{number}", buckets=256) for number in range(26)]
        writer = Writer(log, tmp_path / "shard-0" / "snapshots", seeded(), tables)
        writer.update()
        with SnapshotWriter(writer.snapshots, log.number) as snapshots:
            snapshots.begin_model(
                ModelPart(writer.layout.shard_map, True, writer.model.tracker.persisted_state(), log.number)
            )
            wanted = buckets_of(writer.layout)
            while group := copy_group(writer.tables, wanted):
                pieces = [piece for _, contents in group for piece in contents.pieces()]
                snapshots.write_buckets(log.number, describe_buckets(group), pieces)
            log.flush(0)
            snapshot = snapshots.commit(log.number, log_goes_on=True)
    (model,) = snapshot.models
    assert len(model.groups) == 26 * 256 // 64
    assert (snapshot.folder / "manifest.json").stat().st_size < 50_000
    with opened(tmp_path) as (_, found):
        # The blocks were left out: only rows are compared.
        replica = found.models["model"].replica
        assert bits_of(replica.tables, writer.layout.buckets) == bits_of(writer.tables, writer.layout.buckets)
