"""Runs the row optimizers: for each, its compiled loop over the rows of an update, and the arguments of that.

A row is its values, then its optimizer's state (``ps_protocol/model/row_optimizers.py``). ``found`` holds the row of
each gradient, -1 for one that has none. Everything is float32 and taken in order, so a row after an update depends on
the row before and on its gradient, and on nothing else. Division is numpy's: by zero it gives an infinity or a NaN, and
never raises with half of the rows done.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit, types

from ps_protocol.model.kernels import kernel
from ps_protocol.model.tables import RowOptions, TableSpec
from ps_server.tables.memory import FLOATS, IDS, ROWS, next_row
from ps_server.tables.step import RowStep

_LOOP = types.void(FLOATS, IDS, ROWS, types.float64, types.float64[::1])
_ONE = np.float32(1)

_Loop = Callable[..., Any]
_Arguments = Callable[[RowOptions, int, float], list[float]]

_ROW_OPTIMIZERS: dict[str, tuple[_Loop, _Arguments]] = {}


def _runs(kind: str, loop: _Loop) -> Callable[[_Arguments], _Arguments]:
    """The function gives the arguments of ``loop`` for the options and number of an update, and a factor on its
    learning rate; none: the update changes nothing.
    """

    def add(arguments: _Arguments) -> _Arguments:
        _ROW_OPTIMIZERS[kind] = loop, arguments
        return arguments

    return add


def prepared(spec: TableSpec, step: RowStep, scale: float) -> tuple[float, _Loop, list[float]] | None:
    """What ``update`` will run: the largest norm of a gradient, the loop, its arguments; None: nothing. May raise."""
    options = {**spec.options, **step.options}
    loop, arguments = _ROW_OPTIMIZERS[spec.optimizer]
    found = arguments(options, step.updates, scale)
    return (options["max_norm"], loop, found) if found else None


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
    ``scale`` multiplies the learning rate; for FTRL, whose learning rate weighs all of the past, the gradients.
    """
    if made := prepared(spec, step, scale):
        max_norm, loop, arguments = made
        loop(rows, found, gradients, max_norm, np.array(arguments, np.float64))


@njit(inline="always")
def _sum_of_squares(gradient: Any) -> Any:
    """In four sums, which do not wait for each other."""
    a = b = c = d = 0.0
    whole = gradient.size // 4 * 4
    for column in range(0, whole, 4):
        a += np.float64(gradient[column]) * gradient[column]
        b += np.float64(gradient[column + 1]) * gradient[column + 1]
        c += np.float64(gradient[column + 2]) * gradient[column + 2]
        d += np.float64(gradient[column + 3]) * gradient[column + 3]
    for column in range(whole, gradient.size):
        a += np.float64(gradient[column]) * gradient[column]
    return (a + b) + (c + d)


@njit(inline="always")
def _clip(gradient: Any, max_norm: Any) -> Any:
    """What a row's gradient is multiplied by, so that its norm is at most ``max_norm``; 0: as it is."""
    if max_norm <= 0:
        return _ONE
    norm = np.sqrt(_sum_of_squares(gradient))
    return np.float32(max_norm / norm) if norm > max_norm else _ONE


@kernel(_LOOP)
def sgd(rows: Any, found: Any, gradients: Any, max_norm: Any, options: Any) -> None:
    """``options``: lr, weight_decay (of the rows in the update)."""
    dim = gradients.shape[1]
    lr, decay = np.float32(options[0]), np.float32(options[1])
    for i in range(found.size):
        row = next_row(rows, found, i)
        if row < 0:
            continue
        scale = _clip(gradients[i], max_norm)
        for column in range(dim):
            value = rows[row, column]
            rows[row, column] = value - lr * (scale * gradients[i, column] + decay * value)


@_runs("sgd", sgd)
def _sgd_arguments(options: RowOptions, updates: int, scale: float) -> list[float]:
    return [options["lr"] * scale, options["weight_decay"]]


@kernel(_LOOP)
def adagrad(rows: Any, found: Any, gradients: Any, max_norm: Any, options: Any) -> None:
    """Duchi et al. 2011, as torch.optim.Adagrad on sparse gradients. ``options``: lr, decayed; eps."""
    dim = gradients.shape[1]
    lr, eps = np.float32(options[0]), np.float32(options[1])
    for i in range(found.size):
        row = next_row(rows, found, i)
        if row < 0:
            continue
        scale = _clip(gradients[i], max_norm)
        for column in range(dim):
            gradient = scale * gradients[i, column]
            total = rows[row, dim + column] + gradient * gradient
            rows[row, dim + column] = total
            rows[row, column] -= lr * (gradient / (np.sqrt(total) + eps))


@_runs("adagrad", adagrad)
def _adagrad_arguments(options: RowOptions, updates: int, scale: float) -> list[float]:
    lr = options["lr"] / (1 + (updates - 1) * options["lr_decay"])
    return [lr * scale, options["eps"]]


@kernel(_LOOP)
def rowwise_adagrad(rows: Any, found: Any, gradients: Any, max_norm: Any, options: Any) -> None:
    """Adagrad with one sum per row, of its mean square (FBGEMM's EXACT_ROWWISE_ADAGRAD). ``options``: lr, eps."""
    dim = gradients.shape[1]
    lr, eps = np.float32(options[0]), np.float32(options[1])
    for i in range(found.size):
        row = next_row(rows, found, i)
        if row < 0:
            continue
        scale = _clip(gradients[i], max_norm)
        squares = _sum_of_squares(gradients[i]) * scale * scale
        total = rows[row, dim] + np.float32(squares / dim)
        rows[row, dim] = total
        step = scale * (lr / (np.sqrt(total) + eps))
        for column in range(dim):
            rows[row, column] -= step * gradients[i, column]


@_runs("rowwise_adagrad", rowwise_adagrad)
def _rowwise_adagrad_arguments(options: RowOptions, updates: int, scale: float) -> list[float]:
    return [options["lr"] * scale, options["eps"]]


@kernel(_LOOP)
def adam(rows: Any, found: Any, gradients: Any, max_norm: Any, options: Any) -> None:
    """Kingma and Ba 2015, lazily, as torch.optim.SparseAdam.

    ``options``: lr with the corrections of this step's bias; 1 - beta1, 1 - beta2, eps.
    """
    dim = gradients.shape[1]
    lr, eps = np.float32(options[0]), np.float32(options[3])
    new_mean, new_square = np.float32(options[1]), np.float32(options[2])
    for i in range(found.size):
        row = next_row(rows, found, i)
        if row < 0:
            continue
        scale = _clip(gradients[i], max_norm)
        for column in range(dim):
            gradient = scale * gradients[i, column]
            mean = rows[row, dim + column]
            mean += (gradient - mean) * new_mean
            square = rows[row, 2 * dim + column]
            square += (gradient * gradient - square) * new_square
            rows[row, dim + column] = mean
            rows[row, 2 * dim + column] = square
            rows[row, column] -= lr * (mean / (np.sqrt(square) + eps))


@_runs("adam", adam)
def _adam_arguments(options: RowOptions, updates: int, scale: float) -> list[float]:
    corrected = math.sqrt(1 - options["beta2"] ** updates) / (1 - options["beta1"] ** updates)
    return [options["lr"] * scale * corrected, 1 - options["beta1"], 1 - options["beta2"], options["eps"]]


@njit(inline="always")
def _root(total: Any, power: Any) -> Any:
    return np.sqrt(total) if power == -0.5 else total**-power


@kernel(_LOOP)
def ftrl(rows: Any, found: Any, gradients: Any, max_norm: Any, options: Any) -> None:
    """FTRL-proximal (McMahan et al. 2013, algorithm 1), as Keras' Ftrl. State: sums of squares, then of gradients.

    ``options``: lr, power, l1, l2, beta, and what gradients are multiplied by.
    """
    dim = gradients.shape[1]
    lr, power, l1, l2, beta, factor = options[0], options[1], options[2], options[3], options[4], options[5]
    for i in range(found.size):
        row = next_row(rows, found, i)
        if row < 0:
            continue
        scale = _clip(gradients[i], max_norm) * np.float32(factor)
        for column in range(dim):
            gradient = np.float64(scale * gradients[i, column])
            before = np.float64(rows[row, dim + column])
            # Rounded before it is used, so that the next step begins where this one ends.
            squares = np.float64(np.float32(before + gradient * gradient))
            root = _root(squares, power)
            linear = np.float64(rows[row, 2 * dim + column]) + gradient
            linear -= (root - _root(before, power)) / lr * rows[row, column]
            rows[row, dim + column] = np.float32(squares)
            rows[row, 2 * dim + column] = np.float32(linear)
            rest = max(abs(linear) - l1, 0.0) / ((root + beta) / lr + 2.0 * l2)
            rows[row, column] = np.float32(-rest if linear > 0 else rest)


@_runs("ftrl", ftrl)
def _ftrl_arguments(options: RowOptions, updates: int, scale: float) -> list[float]:
    if options["lr"] == 0:
        return []  # All of the past would be divided by it.
    return [*(options[name] for name in ("lr", "power", "l1", "l2", "beta")), scale]
