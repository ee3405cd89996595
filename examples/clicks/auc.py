"""Owns how ranking is judged: the area under the ROC curve, exact."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def auc(labels: npt.ArrayLike, scores: npt.ArrayLike) -> float:
    """The part of all (click, no click) pairs that ``scores`` puts in the right order, ties counted half.

    Mann and Whitney's U by sorting. NaN when all labels are alike.
    """
    clicked = np.asarray(labels).ravel() > 0.5
    _, place, counts = np.unique(np.asarray(scores).ravel(), return_inverse=True, return_counts=True)
    clicks = int(clicked.sum())
    others = clicked.size - clicks
    if not clicks or not others:
        return float("nan")
    #: Mean rank, from 1, of all samples with this score.
    ranks = np.cumsum(counts) - (counts - 1) / 2
    return float((ranks[place[clicked]].sum() - clicks * (clicks + 1) / 2) / (clicks * others))
