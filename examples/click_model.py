"""A DLRM-style click model: 26 tables of embeddings that grow with the ids seen, on generated or Criteo data.

ps-run --shards 2 --workers 2 --mode ssp --staleness 4 examples/click_model.py
ps-run --shards 2 --workers 2 examples/click_model.py --data "train/*.parquet" --held-out "test/*.parquet"

The generated clicks have a known truth. Ends with the AUC on held-out samples beside the best that any model can reach.
Each feature has a table of its own; all are looked up in one message per shard, those of the next batch ahead of time.
"""

import argparse
import sys

import torch
from clicks.batch import FEATURES
from clicks.data import open_data
from clicks.local import OneProcess
from clicks.models import Dlrm
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
    adagrad = rows.Adagrad(lr=args.row_lr, initial=20 / args.batch**2)
    tables = {name: Table(args.dim, name=name, optimizer=adagrad, init=rows.Normal(std=0.01)) for name in FEATURES}
    model = Dlrm(cluster.embedding_bags(tables, mode="sum"), args.dim).to(cluster.device)
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
    args = parser_of(__doc__, dim=16, lr=0.002, row_lr=0.1).parse_args()
    with joined(args) as cluster:
        return train(cluster, args)


if __name__ == "__main__":
    sys.exit(main())
