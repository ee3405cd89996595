"""Compiled passes over rows: reading them, and counting their uses."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, types

from ps_protocol.model.kernels import kernel
from ps_server.tables.kernels.memory import IDS, prefetch

FLOATS = types.float32[:, ::1]
#: Rows whose memory is asked for before it is their turn; and where next to nothing is done with each.
_AHEAD = 24
_FAR_AHEAD = 64


@njit(inline="always")
def next_row(rows: Any, found: Any, i: Any) -> Any:
    """The row of the ``i``-th gradient; one that comes soon is asked for."""
    if i + _AHEAD < found.size and found[i + _AHEAD] >= 0:
        begin = found[i + _AHEAD] * rows.shape[1]
        prefetch(rows, begin)
        prefetch(rows, begin + rows.shape[1] - 1)
    return found[i]


@kernel(types.void(FLOATS, IDS, FLOATS))
def read(rows: Any, found: Any, out: Any) -> None:
    """As many columns of the rows as ``out`` has; what has no row stays as it is."""
    for i in range(found.size):
        row = next_row(rows, found, i)
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
