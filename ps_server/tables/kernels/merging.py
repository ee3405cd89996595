"""Compiled passes over the rows of pushes."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types

from ps_protocol.model.kernels import kernel
from ps_server.tables.kernels.memory import IDS, ROWS

_EXPONENT = np.int32(0x7F800000)


@kernel(types.int64(IDS, ROWS, types.int64, types.float32[:, ::1]))
def add(places: Any, rows: Any, known: Any, into: Any) -> Any:
    """Add ``rows`` to those places of ``into``; of which [0, ``known``) hold something. Returns how many do then.

    Places beyond come rising, each first in its turn: they are set.
    """
    for i in range(places.size):
        place = places[i]
        if place >= known:
            known = place + 1
            for column in range(rows.shape[1]):
                into[place, column] = rows[i, column]
        else:
            for column in range(rows.shape[1]):
                into[place, column] += rows[i, column]
    return known


@kernel(types.int64(types.Array(types.int32, 2, "C", readonly=True)))
def first_nonfinite(bits: Any) -> Any:
    """The first row of float32 bits with a NaN or an infinity; -1: none."""
    for row in range(bits.shape[0]):
        bad = 0
        for column in range(bits.shape[1]):
            bad += (bits[row, column] & _EXPONENT) == _EXPONENT
        if bad:
            return row
    return -1
