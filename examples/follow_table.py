"""A serving copy that follows a table while it is trained, and shows at the end that it is equal to the shards.

ps-run --shards 2 --workers 2 --evaluators 1 --mode async examples/follow_table.py --steps 300

The workers train click rates of ads in a table that keeps the most recent 2000. The evaluator follows its changes, and
says now and then how far its copy is. When training is over it reads all rows again, into a second copy, and compares:
the exit code is 0 when nothing differs.

A running job of your own is followed from outside, to its end, with the copy kept in a file between two runs:

python examples/follow_table.py --follow HOST:PORT --table ads --copy ads.npz
"""

import argparse
import os
import sys
import time
from pathlib import Path

import torch

import ps_worker
from ps_worker import rows
from ps_worker.feed import TableCopy, follow_table

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
        shards = TableCopy()
        for change in follow_table(coordinator, args.table, args.model, follow=False):
            shards.apply(change)
        late = 0
        for change in follow_table(coordinator, args.table, args.model, copy.cursor, follow=False):
            copy.apply(change)
            late += change.ids.size + change.deleted.size + len(change.reset_buckets)
        # Else the shards may have been read before these changes, or after.
        if not late:
            break
    ids = shards.ids
    there = copy.has(ids)
    wrong = (copy.rows(ids[there]) != shards.rows(ids[there])).any(axis=1)
    parts = ((sum(~there), "missing"), (len(copy) - sum(there), "too many"), (sum(wrong), "with other values"))
    return ", ".join(f"{count} {what}" for count, what in parts if count)


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
