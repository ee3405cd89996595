"""Tables on a few shards in one process, changed at random, saved to and restored from checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from ps_protocol.model.ids import buckets_of
from ps_protocol.model.layout import Layout
from ps_protocol.model.row_optimizers import ROW_OPTIMIZERS
from ps_protocol.model.spec import ModelSpec, ShardMap
from ps_protocol.model.tables import Ids, RowInit, RowLife, TableSpec
from ps_server.checkpoint.checkpoint import Checkpoint
from ps_server.checkpoint.commit import commit
from ps_server.checkpoint.directory import begin
from ps_server.checkpoint.messages import part_from_pb, part_to_pb
from ps_server.checkpoint.model_writer import write_part
from ps_server.checkpoint.record import ShardPart
from ps_server.checkpoint.table_copy import TableCapture
from ps_server.consistency import TrackerState
from ps_server.shard.placing import batches
from ps_server.shard.quiesce import CheckpointBases
from ps_server.tables.bucket_contents import BucketContents
from ps_server.tables.row_memory import RowMemory
from ps_server.tables.step import RowStep
from ps_server.tables.table import ShardTable

BUCKETS = 8


def table_spec(name: str = "ads", dim: int = 3, optimizer: str = "adagrad", life: RowLife | None = None) -> TableSpec:
    options = ROW_OPTIMIZERS[optimizer].defaults()
    return TableSpec(
        name, dim, 7, RowInit("uniform", -1.0, 1.0), optimizer, options, life or RowLife(), buckets=BUCKETS
    )


def map_of(spec: ModelSpec, shards: int, epoch: int = 3) -> ShardMap:
    """Buckets round and round."""
    places = tuple(tuple(bucket % shards for bucket in range(table.buckets)) for table in spec.tables)
    return ShardMap(epoch, spec, shards, (), tables=places)


def spec_of(*tables: TableSpec) -> ModelSpec:
    return ModelSpec("model", "torch.optim.SGD", (), ({"lr": 0.1},), tables=tables)


@dataclass
class TableJob:
    """A model of tables alone. What is done to it does not depend on its number of shards."""

    shard_map: ShardMap
    shards: list[list[ShardTable]]
    marks: list[CheckpointBases] = field(default_factory=list)

    @classmethod
    def of(cls, *tables: TableSpec, shards: int = 2, memory: RowMemory | None = None) -> TableJob:
        """``memory``: above it, rows are on disk."""
        shard_map = map_of(spec_of(*tables), shards)
        layouts = [Layout.of(shard_map, shard) for shard in range(shards)]
        made = [
            [ShardTable(spec, buckets, memory) for spec, buckets in zip(tables, layout.buckets, strict=True)]
            for layout in layouts
        ]
        return cls(shard_map, made, [CheckpointBases() for _ in layouts])

    def push(self, ids: Ids, seed: int = 0, number: int = 0) -> None:
        """One update of one table: gradients drawn for each id."""
        spec = self.shard_map.spec.tables[number]
        gradients = np.random.default_rng(seed).standard_normal((ids.size, spec.dim)).astype(np.float32)
        for tables in self.shards:
            table = tables[number]
            here = table.here[buckets_of(ids, spec.buckets)]
            table.apply(RowStep(number, ids[here], gradients[here], table.updates + 1, spec.options))

    def load(self, ids: Ids, value: float, number: int = 0) -> None:
        spec = self.shard_map.spec.tables[number]
        for tables in self.shards:
            here = ids[tables[number].here[buckets_of(ids, spec.buckets)]]
            rows = np.full((here.size, spec.dim), value, np.float32)
            tables[number].load(here, rows, with_state=False, only_new=False)

    def drop(self, ids: Ids, waiting: Ids, number: int = 0) -> None:
        for tables in self.shards:
            tables[number].drop(ids, waiting)

    def move(self, bucket: int, target: int, number: int = 0) -> None:
        """As a switch does."""
        places = [list(each) for each in self.shard_map.tables]
        source, places[number][bucket] = places[number][bucket], target
        if source != target:
            self.shards[target][number].put(self.shards[source][number].contents(bucket))
            self.shards[source][number].forget(bucket)
        held = self.shard_map
        self.shard_map = ShardMap(held.epoch + 1, held.spec, held.shards, (), tables=tuple(map(tuple, places)))

    def copies(self, shard: int, folder: Path, full_every: int) -> list[TableCapture]:
        tables, marks = self.shards[shard], self.marks[shard]
        bases = marks.bases(tables, folder, full_every)
        made = [TableCapture(table, bases.get(table)) for table in tables]
        while any(copy.step() for copy in made):
            pass
        for table, copy in zip(tables, made, strict=True):
            marks.wrote(table, folder, copy)
        return made

    def parts(self, folder: Path, full_every: int = 1) -> list[ShardPart]:
        written = []
        for shard in range(self.shard_map.shards):
            layout = Layout.of(self.shard_map, shard)
            copies = self.copies(shard, folder, full_every)
            written.append(write_part(folder, layout, memoryview(b""), [], {}, tables=copies))
        return [part_from_pb(part_to_pb(part, TrackerState())) for part in written]

    def save(self, directory: Path, full_every: int = 1) -> Checkpoint:
        folder = begin(directory)
        commit(folder, [self.shard_map], self.parts(folder, full_every), {}, 1.0)
        return Checkpoint.open(folder)

    @classmethod
    def restored(cls, checkpoint: Checkpoint, shards: int, memory: RowMemory | None = None) -> TableJob:
        job = cls.of(*checkpoint.model("model").shard_map.spec.tables, shards=shards, memory=memory)
        for shard in range(shards):
            for lot in batches(checkpoint, Layout.of(job.shard_map, shard)):
                for number, contents in lot:
                    job.shards[shard][number].put(contents)
        return job

    def contents(self) -> list[BucketContents]:
        """Every bucket of every table, wherever it lies."""
        return [
            self.shards[shard][number].contents(bucket)
            for number, places in enumerate(self.shard_map.tables)
            for bucket, shard in enumerate(places)
        ]


def same(one: Sequence[BucketContents], other: Sequence[BucketContents]) -> bool:
    """Bit for bit, with last uses, counters and waiting ids."""

    def raw(contents: BucketContents) -> tuple[object, ...]:
        return contents.bucket, contents.updates, contents.rows.shape, *map(bytes, contents.pieces())

    return [raw(each) for each in one] == [raw(each) for each in other]


def size_of(checkpoint: Checkpoint) -> int:
    """Bytes of the whole folder."""
    return sum(path.stat().st_size for path in checkpoint.folder.rglob("*") if path.is_file())
