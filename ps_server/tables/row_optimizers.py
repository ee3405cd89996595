"""Runs the row optimizer of a table with its arguments for one update."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from ps_protocol.model.tables import RowOptions, TableSpec
from ps_server.tables.kernels import row_updates
from ps_server.tables.step import RowStep

_Kernel = Callable[..., Any]


def prepared(spec: TableSpec, step: RowStep, scale: float) -> tuple[float, _Kernel, list[float]] | None:
    """What ``update`` will run: the largest norm of a gradient, the loop, its arguments; None: nothing. May raise."""
    options = {**spec.options, **step.options}
    if spec.optimizer == "ftrl" and options["lr"] == 0:
        return None  # All of the past would be divided by it.
    return options["max_norm"], *_PREPARE[spec.optimizer](options, step.updates, scale)


def update(
    spec: TableSpec,
    rows: npt.NDArray[np.float32],
    found: npt.NDArray[np.int64],
    gradients: npt.NDArray[np.float32],
    step: RowStep,
    scale: float,
) -> None:
    """One step of the table's optimizer on the rows ``found`` of ``rows``; negative ones are skipped.

    ``gradients``: float32 [n, dim], C-contiguous, one for each of ``found``; of ``step`` the rest counts.
    ``scale`` multiplies the learning rate; for FTRL, whose learning rate weighs all of the past, the gradients. With a
    learning rate of 0 FTRL leaves rows and their state as they are.
    """
    if made := prepared(spec, step, scale):
        max_norm, kernel, arguments = made
        kernel(rows, found, gradients, max_norm, np.array(arguments, np.float64))


def _sgd(options: RowOptions, updates: int, scale: float) -> tuple[_Kernel, list[float]]:
    return row_updates.sgd, [options["lr"] * scale, options["weight_decay"]]


def _adagrad(options: RowOptions, updates: int, scale: float) -> tuple[_Kernel, list[float]]:
    lr = options["lr"] / (1 + (updates - 1) * options["lr_decay"])
    return row_updates.adagrad, [lr * scale, options["eps"]]


def _rowwise_adagrad(options: RowOptions, updates: int, scale: float) -> tuple[_Kernel, list[float]]:
    return row_updates.rowwise_adagrad, [options["lr"] * scale, options["eps"]]


def _adam(options: RowOptions, updates: int, scale: float) -> tuple[_Kernel, list[float]]:
    corrected = math.sqrt(1 - options["beta2"] ** updates) / (1 - options["beta1"] ** updates)
    new = 1 - options["beta1"], 1 - options["beta2"]
    return row_updates.adam, [options["lr"] * scale * corrected, *new, options["eps"]]


def _ftrl(options: RowOptions, updates: int, scale: float) -> tuple[_Kernel, list[float]]:
    names = "lr", "power", "l1", "l2", "beta"
    return row_updates.ftrl, [*(options[name] for name in names), scale]


_PREPARE: dict[str, Callable[[RowOptions, int, float], tuple[_Kernel, list[float]]]] = {
    "sgd": _sgd,
    "adagrad": _adagrad,
    "rowwise_adagrad": _rowwise_adagrad,
    "adam": _adam,
    "ftrl": _ftrl,
}
