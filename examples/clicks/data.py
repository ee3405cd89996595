"""Chooses what is trained on and what is held out: parts of a generated stream, or of a file."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from torch.utils.data import DataLoader

from .batch import Batch, whole
from .criteo import LineBlocks, Parser
from .generated import HELD_OUT, ClickStream

SAMPLES = 300_000
"""Trained on unless ``--samples`` says otherwise; of a file all that is not held out."""

_HELD_OUT_BATCH = 4096


@dataclass(frozen=True, slots=True)
class ClickData:
    """One source of samples. Both loaders give a ``Batch`` at a time; ``train`` is for ``cluster.shard``."""

    train: DataLoader[Any]
    held_out: DataLoader[Any]
    #: The best scores there are for a batch, where the truth is known.
    best_scores: Callable[[Batch], npt.NDArray[np.float32]] | None = None
    #: Of a file, and what this process parses of it.
    parser: Parser | None = None


def open_data(args: argparse.Namespace) -> ClickData:
    """What the flags ask for."""
    return _file(args) if args.data else _stream(args)


def _stream(args: argparse.Namespace) -> ClickData:
    of = {"seed": args.seed, "vocabulary": args.features_vocabulary}
    train = ClickStream(args.samples or SAMPLES, **of)
    held_out = ClickStream(args.eval_samples, first=HELD_OUT, **of)
    return ClickData(
        DataLoader(train, batch_size=args.batch, collate_fn=whole),
        DataLoader(held_out, batch_size=_HELD_OUT_BATCH, collate_fn=whole),
        train.best_scores,
    )


def _file(args: argparse.Namespace) -> ClickData:
    parser = Parser(args.data, skip_wrong=args.skip_wrong_lines)
    train = LineBlocks(args.data, args.batch, skip=args.eval_samples, lines=args.samples)
    held_out = LineBlocks(args.data, _HELD_OUT_BATCH, lines=args.eval_samples)
    return ClickData(
        DataLoader(train, batch_size=1, collate_fn=parser),
        DataLoader(held_out, batch_size=1, collate_fn=parser),
        parser=parser,
    )
