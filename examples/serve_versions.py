"""A server whose weights and table rows fit together: it follows versions of the weights, and a copy of the table.

ps-run --shards 2 --workers 2 --evaluators 1 examples/serve_versions.py --expect-accuracy 0.8

The workers train click rates of ads, and rank 0 publishes its model every 20 steps. The evaluator is the server. For
each version it waits until its copy of the rows has come to it, and then predicts: its rows are as new as its weights,
or newer. The exit code is 0 when the last version is accurate enough.

A running job is served from outside, to its end:

python examples/serve_versions.py --serve HOST:PORT
"""

import argparse
import os
import sys
import threading

import torch
from torch import Tensor, nn

import ps_worker
from ps_worker import rows
from ps_worker.feed import TableCopy

ADS, BATCH, DIM, PUBLISH_EVERY = 500, 128, 8, 20


def clicks(ads: Tensor, draw: torch.Generator) -> Tensor:
    """Whether each of some ads [n] is clicked, as 0 or 1: every third ad nearly always, others hardly ever."""
    return (torch.rand(ads.shape, generator=draw) < 0.05 + 0.9 * (ads % 3 == 0)).float()


def train(cluster: ps_worker.Cluster, args: argparse.Namespace) -> int:
    """What every worker runs."""
    table = cluster.embedding(DIM, name="ads", optimizer=rows.Adagrad(lr=0.3))
    torch.manual_seed(args.seed)
    model = nn.ModuleDict({"ads": table, "top": nn.Linear(DIM, 1)})
    optimizer = cluster.optimizer(torch.optim.Adam, model, lr=0.01)
    draw = torch.Generator().manual_seed(args.seed + cluster.rank)
    for step in range(1, args.steps + 1):
        ads = torch.randint(ADS, (BATCH,), generator=draw)
        logits = model["top"](model["ads"](ads)).squeeze(1)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, clicks(ads, draw))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if cluster.rank == 0 and (step % PUBLISH_EVERY == 0 or step == args.steps):
            cluster.publish("clicks", optimizer, step=step)
    return 0


def serve(coordinator: str, args: argparse.Namespace) -> int:
    """Predict with each version until the job ends. Returns the exit code."""
    copy, model = TableCopy(), nn.ModuleDict({"top": nn.Linear(DIM, 1)})
    threading.Thread(target=copy.follow, args=(coordinator, "ads"), daemon=True).start()
    ads, reached = torch.arange(ADS), 0.0
    for version in ps_worker.subscribe("clicks", coordinator=coordinator):
        copy.wait_for(version.tables, timeout_seconds=60)
        version.apply_(model)
        with torch.no_grad():
            guesses = model["top"](torch.from_numpy(copy.rows(ads))).squeeze(1) > 0
        reached = float((guesses == (ads % 3 == 0)).float().mean())
        print(f"version {version.number}, step {version.step}: {reached:.0%} of the ads are known", flush=True)
    return int(reached < args.expect_accuracy)


def main() -> int:
    """Read the flags; train, or serve."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--serve", metavar="HOST:PORT", help="serve the job of this coordinator, from outside")
    parser.add_argument("--steps", type=int, default=300, help="of each worker")
    parser.add_argument("--expect-accuracy", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.serve:
        return serve(args.serve, args)
    with ps_worker.connect() as cluster:
        if cluster.role == "evaluator":
            return serve(os.environ["PS_COORDINATOR"], args)
        return train(cluster, args)


if __name__ == "__main__":
    sys.exit(main())
