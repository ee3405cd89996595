"""Tables whose rows come, wait, expire and are evicted, and pushes on them by chance."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np

from ps_protocol.model.tables import Eviction, RowLife
from ps_protocol.v1 import shard_pb2 as pb
from ps_server.shard.step.model import ShardModel
from tests.support.shards import TestShard
from tests.support.tables import Rows, RowStream, array, table_spec

TABLES = (
    table_spec("ads", 4, "rowwise_adagrad", life=RowLife(admit_after=2, max_rows=32, eviction=Eviction.LRU)),
    table_spec("users", 3, "adam", life=RowLife(expire_after_updates=6), buckets=4),
    table_spec("words", 2, "ftrl", life=RowLife(max_rows=64, eviction=Eviction.LFU, admit_probability=0.5), buckets=64),
)
DENSE_BYTES = 64
_IDS = 120


def push(chance: random.Random, streams: Sequence[RowStream]) -> list[tuple[pb.StepResult, bytes]]:
    """The same push on each of some streams."""
    rows = {}
    for number, table in enumerate(TABLES):
        if chance.random() < 0.8:
            ids = array(*chance.sample(range(-_IDS, _IDS), chance.randrange(30)))
            rows[number] = ids, numbers(chance, ids.size, table.dim)
    dense = numbers(chance, 1, 12).tobytes().ljust(DENSE_BYTES, b"\0")
    return [stream.exchange_rows(dense, rows) for stream in streams]


def numbers(chance: random.Random, rows: int, width: int) -> Rows:
    return np.random.default_rng(chance.randrange(1 << 30)).standard_normal((rows, width), np.float32)


def age(shard: TestShard, model: ShardModel) -> None:
    """Let all rows go that have to."""
    for table in range(len(TABLES)):
        while shard.loop.run(model.rows.expire(table, 0.0)):
            pass


def train(chance: random.Random, shard: TestShard, model: ShardModel, stream: RowStream, steps: int) -> None:
    """Push, and let rows go from time to time."""
    for _ in range(steps):
        push(chance, [stream])
        if chance.random() < 0.3:
            age(shard, model)
