"""A factorization machine for clicks: a weight and a vector for each id, in one table that all features share.

ps-run --shards 2 --workers 2 --mode ssp --staleness 4 examples/factorization_machine.py

The generated clicks come from such a machine. Ends with the AUC on held-out samples beside the best that any model can
reach.
"""

import argparse
import sys

import torch
from clicks.batch import FEATURES
from clicks.data import open_data
from clicks.local import OneProcess
from clicks.models import FactorizationMachine
from clicks.training import Meter, joined, measure, parser_of
from torch import nn

import ps_worker
from ps_worker import rows
from ps_worker.tables import Table


def train(cluster: ps_worker.Cluster | OneProcess, args: argparse.Namespace) -> int:
    """What every worker runs; rank 0 measures at the end. Returns the exit code."""
    torch.manual_seed(args.seed)
    data = open_data(args)
    # With the square of the batch size below it, what a single sample teaches a rare id is the same for all sizes.
    adagrad = rows.Adagrad(lr=args.row_lr, initial=4 / args.batch**2)
    table = Table(1 + args.dim, name="ids", optimizer=adagrad, init=rows.Normal(std=0.01))
    bags = cluster.embedding_bags(dict.fromkeys(FEATURES, table), mode="sum")
    model = FactorizationMachine(bags, args.dim).to(cluster.device)
    optimizer = cluster.optimizer(torch.optim.Adam, model, lr=args.lr)
    meter = Meter()
    for batch in cluster.prefetch(data.train(cluster), lambda batch: batch.ids):
        logits = model(batch.numbers.to(cluster.device), batch.ids)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, batch.labels.to(cluster.device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        meter.count(batch)
        cluster.report(loss=loss)
    print(meter)
    cluster.barrier()
    return measure(cluster, model, data, args.expect_auc) if cluster.rank == 0 else 0


def main() -> int:
    """Read the flags and train."""
    args = parser_of(__doc__, dim=16, lr=0.001, row_lr=0.03).parse_args()
    with joined(args) as cluster:
        return train(cluster, args)


if __name__ == "__main__":
    sys.exit(main())
