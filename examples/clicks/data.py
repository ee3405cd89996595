"""Chooses what is trained on and what is held out: parts of a generated stream, or files."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from torch.utils.data import DataLoader

from ps_worker import files

from .batch import Batch, whole
from .criteo import reading
from .generated import HELD_OUT, ClickStream

SAMPLES = 300_000
"""Trained on unless ``--samples`` says otherwise; of files all."""

_HELD_OUT_BATCH = 4096


@dataclass(frozen=True, slots=True)
class ClickData:
    """One source of samples, a ``Batch`` at a time."""

    #: This worker's part, for a cluster or one process.
    train: Callable[[Any], Iterable[Batch]]
    held_out: Iterable[Batch]
    #: The best scores there are for a batch, where the truth is known.
    best_scores: Callable[[Batch], npt.NDArray[np.float32]] | None = None


def open_data(args: argparse.Namespace) -> ClickData:
    """What the flags ask for."""
    return _files(args) if args.data else _stream(args)


def _stream(args: argparse.Namespace) -> ClickData:
    of = {"seed": args.seed, "vocabulary": args.features_vocabulary}
    stream = ClickStream(args.samples or SAMPLES, **of)
    held_out = ClickStream(args.eval_samples, first=HELD_OUT, **of)
    loader = DataLoader(stream, batch_size=args.batch, collate_fn=whole)
    return ClickData(
        lambda cluster: cluster.shard(loader),
        DataLoader(held_out, batch_size=_HELD_OUT_BATCH, collate_fn=whole),
        stream.best_scores,
    )


def _files(args: argparse.Namespace) -> ClickData:
    skip = {"on_bad_file": "skip" if args.skip_wrong else "raise"}
    held_out: Iterable[Batch] = ()
    if args.held_out:
        held_out = files.read(**reading(args.held_out, _HELD_OUT_BATCH), shuffle=False, **skip)
    return ClickData(lambda cluster: cluster.files(**reading(args.data, args.batch), **skip), held_out)
