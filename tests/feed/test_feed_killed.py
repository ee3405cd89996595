"""A copy follows a table while rows come and go, its shards are killed and come back, and the reader breaks off."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import grpc
import numpy as np
from click.testing import CliRunner

from ps_protocol.cluster.view import Role
from ps_protocol.v1 import shard_pb2, shard_pb2_grpc
from ps_server.cli.psctl import main
from ps_worker.feed import TableCopy, follow_table
from tests.feed.following import rows_of
from tests.recovery.cluster import Cluster
from tests.recovery.row_scripts import MOST_ROWS
from tests.support.seeds import seeded
from tests.support.shards import wait_until

STEPS, ROWS = 50, 200
DIM, BUCKETS, TABLE = 4, 256, 1


def follow(address: str, path: Path) -> None:
    """Apply changes until the job ends; every few of them begin again with what lies on the disk."""
    while True:
        copy = TableCopy.load(path)
        changes = follow_table(address, "recent", cursor=copy.cursor, reconnect_timeout_seconds=60)
        for count, change in enumerate(changes):
            copy.apply(change)
            if count == 20:
                copy.save(path)
                break
        else:
            copy.save(path)
            return
        changes.close()


def held(cluster: Cluster) -> dict[int, tuple[float, ...]]:
    """The rows on all shards, read bucket by bucket."""
    found: dict[int, tuple[float, ...]] = {}
    for member in cluster.status().view.live(Role.SHARD).values():
        with grpc.insecure_channel(member.address) as channel:
            stub = shard_pb2_grpc.ShardStub(channel)
            placed = stub.GetModel(shard_pb2.GetModelRequest(model="model")).shard_map.tables[TABLE].shards
            here = [bucket for bucket, shard in enumerate(placed) if shard == member.index]
            payload = bytearray()
            for reply in stub.SaveBuckets(shard_pb2.SaveBucketsRequest(model="model", table=TABLE, buckets=here)):
                if reply.HasField("bucket"):
                    bucket, payload = reply.bucket, bytearray()
                else:
                    payload += reply.chunk.payload
                if bucket.rows and len(payload) == bucket.payload_bytes:
                    ids = np.frombuffer(payload, np.int64, bucket.rows)
                    rows = np.frombuffer(payload, np.float32, bucket.rows * bucket.width, 16 * bucket.rows)
                    values = rows.reshape(bucket.rows, -1)[:, :DIM].tolist()
                    found |= {id_: tuple(row) for id_, row in zip(ids.tolist(), values, strict=True)}
    return found


def evicted(cluster: Cluster) -> bool:
    rows = 0
    for member in cluster.status().view.live(Role.SHARD).values():
        with grpc.insecure_channel(member.address) as channel:
            stub = shard_pb2_grpc.ShardStub(channel)
            rows += stub.GetModel(shard_pb2.GetModelRequest(model="model")).tables[TABLE].rows
    return rows <= MOST_ROWS


def test_a_copy_is_equal_after_shards_were_killed_and_the_reader_began_again(launch, tmp_path):
    chance = seeded()
    cluster, path = launch(2, lease_seconds=10.0, shard=["--snapshot-seconds", "0.1"]), tmp_path / "copy"
    worker = cluster.worker(steps=STEPS, rows=ROWS)
    following = threading.Thread(target=follow, args=(cluster.address, path))
    following.start()
    for step in sorted(chance.sample(range(5, STEPS - 5), 3)):
        worker.read(f"step {step}")
        shard = chance.choice(cluster.shards)
        shard.kill()
        shard.start()
    worker.read("stays")
    wait_until(lambda: evicted(cluster))
    worker.tell()
    worker.read("digest")
    assert worker.wait() == 0
    following.join()
    copy = TableCopy.load(path)
    assert 0 < len(copy) <= MOST_ROWS
    assert rows_of(copy) == held(cluster)
    printed = CliRunner().invoke(
        main.main, ["feed", "--table", "recent", "--once", "--json", "--coordinator", cluster.address]
    )
    assert printed.exit_code == 0
    changes = [json.loads(line) for line in printed.output.splitlines()]
    told = {id_: tuple(row) for change in changes for id_, row in zip(change["ids"], change["rows"], strict=True)}
    assert told == held(cluster)
