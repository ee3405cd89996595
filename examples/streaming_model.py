"""Train on a stream of clicks, window by window, and rank the next window with what was learnt until then.

ps-run --shards 2 --workers 2 --mode async examples/streaming_model.py --out /tmp/stream

Users and items come and leave in every window; rows are admitted at their second use and expire when they are not used
any more. The workers lease the batches of a window, and rank those of the next one together when all are trained. Each
batch leaves a mark in a table, with the push of its gradients: a batch that comes again, because a worker was killed
before it reported it, is not trained again. With one shard each batch is trained exactly once; with several, a worker
that is killed while it sends may leave that step on some of them only. Ends with the AUC of each window beside the best
there is.
"""

import argparse
import sys
import time
from pathlib import Path

import torch
from streaming.batch import Window
from streaming.events import Stream
from streaming.local import OneProcess
from streaming.ranker import Ranker
from streaming.results import Results
from torch import nn
from torch.utils.data import DataLoader

import ps_worker
from ps_worker import rows


def train(cluster: ps_worker.Cluster | OneProcess, stream: Stream, args: argparse.Namespace) -> int:
    """What every worker runs; one of them says what was reached. Returns the exit code."""
    torch.manual_seed(args.seed)
    adagrad = rows.RowWiseAdagrad(lr=args.row_lr, initial=args.initial)
    # A row is used in a part of the updates only: this is some windows without a use.
    life = {"admit_after": args.admit_after, "expire_after_updates": args.expire_windows * args.updates}
    made = {"optimizer": adagrad, "init": rows.Normal(std=0.01), **life}
    users, items = (cluster.embedding(args.dim, name=name, **made) for name in ("users", "items"))
    model = Ranker(users, items, args.dim, stream.topics).to(cluster.device)
    #: A row for each batch: how many times it was trained.
    marks = cluster.embedding(1, name="batches", optimizer=rows.SGD(lr=1.0), init=rows.Constant(0.0))
    optimizer = cluster.optimizer(torch.optim.Adam, nn.ModuleList([model, marks]), lr=args.lr)
    results = Results(args.out)

    def ids_of(batch):
        return {users: batch.users, items: batch.items, marks: batch.number}

    for window in range(args.windows):
        began, trained = time.perf_counter(), 0
        leased = cluster.shard(Window(stream, window, args.batch).loader(), lease=True, name=f"train {window}")
        for batch in cluster.prefetch(leased, ids_of):
            batch = batch.to(cluster.device)
            mark = marks(batch.number)
            if mark.item():
                results.again(window)
                continue
            loss = nn.functional.binary_cross_entropy_with_logits(model(batch), batch.labels)
            # The gradient of the mark is -1, so that its row becomes 1 with the update of this batch.
            (loss - mark.sum()).backward()
            optimizer.step()
            optimizer.zero_grad()
            cluster.report(loss=loss)
            trained += len(batch.labels)
            results.progress(window, trained)
        results.trained(window, trained, time.perf_counter() - began)
        rank(cluster, model, optimizer, stream, window + 1, args, results)
    code = 0
    # One worker, whichever gets the one item, says what all have reached.
    for _ in cluster.shard(DataLoader([0]), lease=True, name="results"):
        code = results.show(stream, args, marks)
    return code


@torch.no_grad()
def rank(cluster, model, optimizer, stream, window, args, results) -> None:
    """Score batches of ``window``, shared among the workers, with the parameters as they are now."""
    optimizer.pull()
    part = Window(stream, window, args.batch, args.rank_every)
    for batch in cluster.shard(part.loader(), lease=True, name=f"rank {window}"):
        batch = batch.to(cluster.device)
        # Scores are in a file before the batch counts as ranked: none is left out when this worker ends here.
        results.keep(window, batch, model(batch))


def main() -> int:
    """Read the flags and train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--windows", type=int, default=5, help="to train on; the one after each is ranked; default 5")
    add("--events", type=int, default=100_000, help="of a window; default 100000")
    add("--items", type=int, default=400, help="of each of 64 topics, in a window; default 400")
    add("--batch", type=int, default=1024, help="events per worker and step; default 1024")
    add("--dim", type=int, default=16, help="numbers of a vector; default 16")
    add("--lr", type=float, default=0.005, help="of the dense parameters, by Adam; default 0.005")
    add("--row-lr", type=float, default=0.02, help="of the rows, by row-wise Adagrad; default 0.02")
    add("--initial", type=float, default=1e-8, help="first value of the sum of Adagrad; default 1e-8")
    add("--admit-after", type=int, default=2, help="an id gets a row at this use; default 2")
    add("--expire-windows", type=int, default=2, help="rows that are not used for so many windows go; default 2")
    add("--rank-every", type=int, default=2, help="of the next window each so many-th batch is ranked; default 2")
    add("--seed", type=int, default=0, help="of the stream and of the model's first values; default 0")
    add("--out", type=Path, required=True, metavar="FOLDER", help="for scores and counts; all workers write to it")
    add("--plot", type=Path, metavar="FILE", help="write a PNG: AUC by window")
    add("--local", action="store_true", help="train in this process alone, in plain torch, to compare")
    add("--expect-auc", type=float, default=0.6, help="exit with 1 below this AUC of the last window; default 0.6")
    args = parser.parse_args()
    if (args.out / "results.json").exists():
        parser.error(f"{args.out} has the results of another run: name another folder, or remove it")
    stream = Stream(args.seed, args.events, items=args.items)
    args.updates = -(-args.events // args.batch)
    if args.local:
        last = args.windows
        sizes = {"users": stream.users_until(last), "items": stream.items_until(last)}
        cluster = OneProcess({**sizes, "batches": (last + 1) * args.updates})
    else:
        cluster = ps_worker.connect()
    with cluster:
        return train(cluster, stream, args)


if __name__ == "__main__":
    sys.exit(main())
