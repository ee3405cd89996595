"""Compiled row optimizers: one pass over the rows of an update each. A row is its values, then its optimizer's state.

``found`` holds the row of each gradient, -1 for one that has none. Everything is float32 and taken in order, so a row
after an update depends on the row before and on its gradient, and on nothing else. Division is numpy's: by zero it
gives an infinity or a NaN, and never raises with half of the rows done.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, types

from ps_protocol.model.kernels import kernel
from ps_server.tables.kernels.memory import IDS, ROWS, prefetch

_F32_2 = types.float32[:, ::1]
_F64 = types.float64
_OPTIMIZER = types.void(_F32_2, IDS, ROWS, _F64, types.float64[::1])
_ONE = np.float32(1)
#: Rows whose memory is asked for before it is their turn; and where next to nothing is done with each.
_AHEAD = 24
_FAR_AHEAD = 64


@njit(inline="always")
def _next_row(rows: Any, found: Any, i: Any) -> Any:
    """The row of the ``i``-th gradient; one that comes soon is asked for."""
    if i + _AHEAD < found.size and found[i + _AHEAD] >= 0:
        begin = found[i + _AHEAD] * rows.shape[1]
        prefetch(rows, begin)
        prefetch(rows, begin + rows.shape[1] - 1)
    return found[i]


@kernel(types.void(_F32_2, IDS, _F32_2))
def read(rows: Any, found: Any, out: Any) -> None:
    """As many columns of the rows as ``out`` has; what has no row stays as it is."""
    for i in range(found.size):
        row = _next_row(rows, found, i)
        if row >= 0:
            for column in range(out.shape[1]):
                out[i, column] = rows[row, column]


@kernel(types.void(types.int64[::1], types.uint32[::1], IDS, types.int64))
def touch(touched: Any, uses: Any, rows: Any, update: Any) -> None:
    """Set ``touched`` of these rows, and count a use of each where ``uses`` is not empty."""
    for i in range(rows.size):
        if i + _FAR_AHEAD < rows.size:
            prefetch(touched, rows[i + _FAR_AHEAD])
        touched[rows[i]] = update
    if uses.size > 0:
        for i in range(rows.size):
            uses[rows[i]] += np.uint32(1)


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


@kernel(_OPTIMIZER)
def sgd(rows: Any, found: Any, gradients: Any, max_norm: Any, options: Any) -> None:
    """``options``: lr, weight_decay (of the rows in the update)."""
    dim = gradients.shape[1]
    lr, decay = np.float32(options[0]), np.float32(options[1])
    for i in range(found.size):
        row = _next_row(rows, found, i)
        if row < 0:
            continue
        scale = _clip(gradients[i], max_norm)
        for column in range(dim):
            value = rows[row, column]
            rows[row, column] = value - lr * (scale * gradients[i, column] + decay * value)


@kernel(_OPTIMIZER)
def adagrad(rows: Any, found: Any, gradients: Any, max_norm: Any, options: Any) -> None:
    """Duchi et al. 2011, as torch.optim.Adagrad on sparse gradients. ``options``: lr, decayed; eps."""
    dim = gradients.shape[1]
    lr, eps = np.float32(options[0]), np.float32(options[1])
    for i in range(found.size):
        row = _next_row(rows, found, i)
        if row < 0:
            continue
        scale = _clip(gradients[i], max_norm)
        for column in range(dim):
            gradient = scale * gradients[i, column]
            total = rows[row, dim + column] + gradient * gradient
            rows[row, dim + column] = total
            rows[row, column] -= lr * (gradient / (np.sqrt(total) + eps))


@kernel(_OPTIMIZER)
def rowwise_adagrad(rows: Any, found: Any, gradients: Any, max_norm: Any, options: Any) -> None:
    """Adagrad with one sum per row, of its mean square (FBGEMM's EXACT_ROWWISE_ADAGRAD). ``options``: lr, eps."""
    dim = gradients.shape[1]
    lr, eps = np.float32(options[0]), np.float32(options[1])
    for i in range(found.size):
        row = _next_row(rows, found, i)
        if row < 0:
            continue
        scale = _clip(gradients[i], max_norm)
        squares = _sum_of_squares(gradients[i]) * scale * scale
        total = rows[row, dim] + np.float32(squares / dim)
        rows[row, dim] = total
        step = scale * (lr / (np.sqrt(total) + eps))
        for column in range(dim):
            rows[row, column] -= step * gradients[i, column]


@kernel(_OPTIMIZER)
def adam(rows: Any, found: Any, gradients: Any, max_norm: Any, options: Any) -> None:
    """Kingma and Ba 2015, lazily, as torch.optim.SparseAdam.

    ``options``: lr with the corrections of this step's bias; 1 - beta1, 1 - beta2, eps.
    """
    dim = gradients.shape[1]
    lr, eps = np.float32(options[0]), np.float32(options[3])
    new_mean, new_square = np.float32(options[1]), np.float32(options[2])
    for i in range(found.size):
        row = _next_row(rows, found, i)
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


@njit(inline="always")
def _root(total: Any, power: Any) -> Any:
    return np.sqrt(total) if power == -0.5 else total**-power


@kernel(_OPTIMIZER)
def ftrl(rows: Any, found: Any, gradients: Any, max_norm: Any, options: Any) -> None:
    """FTRL-proximal (McMahan et al. 2013, algorithm 1), as Keras' Ftrl. State: sums of squares, then of gradients.

    ``options``: lr, power, l1, l2, beta, and what gradients are multiplied by.
    """
    dim = gradients.shape[1]
    lr, power, l1, l2, beta, factor = options[0], options[1], options[2], options[3], options[4], options[5]
    for i in range(found.size):
        row = _next_row(rows, found, i)
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
