"""What the click examples have in common around their loops: flags, counts, and what is measured at the end."""

from __future__ import annotations

import argparse
import os
import time

import numpy as np
import torch
from torch import nn

import ps_worker

from .auc import auc
from .batch import Batch, in_columns
from .data import SAMPLES, ClickData
from .generated import VOCABULARY
from .local import LocalBags, OneProcess

_LARGEST = 3


def parser_of(text: str | None, *, dim: int, lr: float, row_lr: float) -> argparse.ArgumentParser:
    """The flags of both examples, with the defaults that differ."""
    parser = argparse.ArgumentParser(
        description=text, formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, width=120)
    )
    add = parser.add_argument
    data = parser.add_argument_group("data")
    data.add_argument("--samples", type=int, help=f"of the stream to train on; default {SAMPLES}")
    data.add_argument("--eval-samples", type=int, default=50_000, help="of the stream, held out; default 50000")
    data.add_argument(
        "--features-vocabulary",
        type=int,
        default=VOCABULARY,
        help="distinct ids the stream may have; default 100000000",
    )
    data.add_argument("--data", metavar="FILES", help="of Criteo's layout, text or Parquet, instead of a stream")
    data.add_argument("--held-out", metavar="FILES", help="that --data is measured with")
    data.add_argument("--skip-wrong", action="store_true", help="leave out what cannot be read of the files")
    add("--batch", type=int, default=128, help="samples per worker and step; default 128")
    add("--dim", type=int, default=dim, help=f"numbers of a vector; default {dim}")
    add("--lr", type=float, default=lr, help=f"of the dense parameters, by Adam; default {lr}")
    add("--row-lr", type=float, default=row_lr, help=f"of the rows, by Adagrad; default {row_lr}")
    add("--seed", type=int, default=0, help="of the stream, its truth, and the model's first values; default 0")
    add("--local", action="store_true", help="train in this process alone with a sparse nn.Embedding, to compare")
    add("--local-rows", type=int, default=1 << 20, help="with --local: ids that come later share rows; default 1048576")
    add("--expect-auc", type=float, default=0.7, help="exit with 1 below this held-out AUC; default 0.7")
    return parser


def joined(args: argparse.Namespace) -> ps_worker.Cluster | OneProcess:
    """The cluster, or what ``--local`` puts in its place."""
    return OneProcess(args.local_rows) if args.local else ps_worker.connect()


class Meter:
    """Counts what a loop trains, from its first step on. Used by the training thread."""

    def __init__(self) -> None:
        self._began = float("nan")
        self._samples = self._rows = self._all_samples = 0

    def count(self, batch: Batch) -> None:
        """A step was made with ``batch``. The first only starts the clock: it waits for compilers and connections."""
        self._all_samples += len(batch.labels)
        if self._all_samples == len(batch.labels):
            self._began = time.perf_counter()
            return
        self._samples += len(batch.labels)
        self._rows += len(np.unique(in_columns(batch.ids).numpy()))

    def __str__(self) -> str:
        seconds = time.perf_counter() - self._began
        rates = f"{self._samples / seconds:,.0f} samples/s, {self._rows / seconds:,.0f} rows/s"
        return f"{self._all_samples:,} samples in {seconds:.1f} s after the first step: {rates}"


@torch.no_grad()
def measure(cluster: ps_worker.Cluster | OneProcess, model: nn.Module, data: ClickData, expected: float) -> int:
    """Print the AUC on what was held out, the best reachable and the sizes of tables. Returns the exit code."""
    model.eval()
    labels, scores, best = [], [], []
    for batch in data.held_out:
        labels.append(batch.labels.numpy())
        scores.append(model(batch.numbers.to(cluster.device), batch.ids).cpu().numpy())
        if data.best_scores:
            best.append(data.best_scores(batch))
    if not labels:
        print("nothing was held out: no AUC")
        return 0
    reached = auc(np.concatenate(labels), np.concatenate(scores))
    print(f"held-out AUC {reached:.4f} (expected at least {expected:.4f})")
    if best:
        print(f"best reachable AUC {auc(np.concatenate(labels), np.concatenate(best)):.4f}")
    print(sizes(model))
    return int(not reached >= expected)


def sizes(model: nn.Module) -> str:
    """Rows and bytes of the model's tables, as the shards tell."""
    local = [module for module in model.modules() if isinstance(module, LocalBags)]
    if local:
        return f"rows of this process: {sum(bags.used for bags in local):,}"
    if not os.environ.get("PS_COORDINATOR"):
        return "sizes of tables: see psctl status"
    with ps_worker.admin.connect() as job:
        tables = job.tables()
    largest = sorted(tables, key=lambda table: -table.rows)[:_LARGEST]
    return (
        f"tables: {len(tables)} with {sum(table.rows for table in tables):,} rows,"
        f" {sum(table.size_bytes for table in tables) / 1e6:.1f} MB;"
        f" the largest: {', '.join(f'{table.table} {table.rows:,}' for table in largest)}"
    )
