"""A serving copy that follows a table while it is trained, and shows at the end that it is equal to the shards.

ps-run --shards 2 --workers 2 --evaluators 1 --mode async examples/follow_table.py --steps 300

The workers train click rates of ads in a table that keeps the most recent 2000. The evaluator follows its changes, and
says now and then how far its copy is. When training is over it reads every bucket from the shards, and compares: the
exit code is 0 when nothing differs.

A running job of your own is followed from outside, to its end, with the copy kept in a file between two runs:

python examples/follow_table.py --follow HOST:PORT --table ads --copy ads.npz
"""

import argparse
import os
import sys
import time
from pathlib import Path

import numpy as np
import torch

import ps_worker
from ps_protocol.client.coordinator import CoordinatorClient
from ps_protocol.cluster.view import Role
from ps_protocol.security.roles import AccessRole
from ps_protocol.security.security import Security
from ps_protocol.v1 import shard_pb2, shard_pb2_grpc
from ps_worker import rows
from ps_worker.feed import follow_table
from ps_worker.table_feed.table_copy import TableCopy

ADS, RECENT, BATCH, DIM = 100_000, 2000, 256, 8
SAY_SECONDS = 2.0


def train(cluster: ps_worker.Cluster, args: argparse.Namespace) -> int:
    """What every worker runs: ads come and go, so most rows are soon evicted."""
    ads = cluster.embedding(
        DIM, name=args.table, optimizer=rows.RowWiseAdagrad(lr=0.1), max_rows=RECENT, eviction="lru"
    )
    torch.manual_seed(args.seed)
    model = torch.nn.ModuleList([ads, torch.nn.Linear(DIM, 1)])
    optimizer = cluster.optimizer(torch.optim.SGD, model, lr=0.1, name=args.model)
    draw = torch.Generator().manual_seed(args.seed + cluster.rank)
    for step in range(args.steps):
        # What is shown changes with time: each step a window of ads a little further.
        ids = 50 * step + (torch.randn(BATCH, generator=draw).abs() * 500).long() % ADS
        clicks = (torch.rand(BATCH, generator=draw) < 0.1 + 0.8 * (ids % 2)).float()
        loss = torch.nn.functional.binary_cross_entropy_with_logits(model[1](ads(ids)).squeeze(1), clicks)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        cluster.report(loss=loss)
    return 0


def follow(coordinator: str, args: argparse.Namespace) -> int:
    """Follow the table until the job ends, then compare. Returns the exit code."""
    copy = TableCopy.load(args.copy) if args.copy else TableCopy()
    said = 0.0
    for change in follow_table(coordinator, args.table, args.model, copy.cursor):
        copy.apply(change)
        if change.whole and time.monotonic() - said >= SAY_SECONDS:
            said = time.monotonic()
            print(f"following: {len(copy)} rows", flush=True)
            if args.copy:
                copy.save(args.copy)
    differences = compare(coordinator, args, copy)
    if args.copy:
        copy.save(args.copy)
    print(f"{len(copy)} rows: {differences or 'equal to the shards'}", flush=True)
    return int(bool(differences))


def compare(coordinator: str, args: argparse.Namespace, copy: TableCopy) -> str:
    """What differs between the copy and the shards, in words; rows may still be evicted after the last push."""
    while True:
        ids, values = read_shards(coordinator, args)
        late = 0
        for change in follow_table(coordinator, args.table, args.model, copy.cursor, follow=False):
            copy.apply(change)
            late += change.ids.size + change.deleted.size + len(change.reset_buckets)
        # Else the shards may have been read before these changes, or after.
        if not late:
            break
    there = copy.has(ids)
    wrong = (copy.rows(ids[there]) != values[there]).any(axis=1)
    parts = ((sum(~there), "missing"), (len(copy) - sum(there), "too many"), (sum(wrong), "with other values"))
    return ", ".join(f"{count} {what}" for count, what in parts if count)


def read_shards(coordinator: str, args: argparse.Namespace) -> tuple[np.ndarray, np.ndarray]:
    """Ids and values of all rows, read bucket by bucket with the stubs that any gRPC client has."""
    security = Security.from_environment(os.environ, AccessRole.READER)
    with CoordinatorClient(coordinator, security) as client:
        shards = client.get_status().view.live(Role.SHARD)
        shard_map = client.get_shard_map(args.model)
    number = [table.name for table in shard_map.spec.tables].index(args.table)
    table = shard_map.spec.tables[number]
    ids, values = [np.empty(0, np.int64)], [np.empty((0, table.dim), np.float32)]
    for shard in sorted(set(shard_map.tables[number])):
        with client.open_shard(shards[shard].address) as channel:
            wanted = shard_pb2.SaveBucketsRequest(
                model=args.model, table=number, buckets=shard_map.buckets(number, shard), epoch=shard_map.epoch
            )
            bucket, payload = shard_pb2.Bucket(), bytearray()
            for reply in shard_pb2_grpc.ShardStub(channel).SaveBuckets(wanted):
                if reply.HasField("bucket"):
                    bucket, payload = reply.bucket, bytearray()
                payload += reply.chunk.payload
                if bucket.rows and len(payload) == bucket.payload_bytes:
                    # Ids, last uses, then rows with their state: see message Bucket.
                    found = np.frombuffer(payload, np.float32, bucket.rows * bucket.width, 16 * bucket.rows)
                    ids.append(np.frombuffer(payload, np.int64, bucket.rows))
                    values.append(found.reshape(bucket.rows, bucket.width)[:, : table.dim])
    return np.concatenate(ids), np.concatenate(values)


def main() -> int:
    """Read the flags; train, or follow."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--follow", metavar="HOST:PORT", help="follow the job of this coordinator, from outside")
    parser.add_argument("--model", default="model")
    parser.add_argument("--table", default="ads")
    parser.add_argument("--copy", type=Path, metavar="FILE", help="keeps the copy between two runs")
    parser.add_argument("--steps", type=int, default=300, help="of each worker")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.follow:
        return follow(args.follow, args)
    with ps_worker.connect() as cluster:
        if cluster.role == "evaluator":
            return follow(os.environ["PS_COORDINATOR"], args)
        return train(cluster, args)


if __name__ == "__main__":
    sys.exit(main())
