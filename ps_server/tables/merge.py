"""Combines the rows of several pushes into one update, and finds invalid rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import types

from ps_protocol.errors import InvalidRequest
from ps_protocol.model.ids import unique
from ps_protocol.model.kernels import kernel
from ps_protocol.model.tables import Ids
from ps_server.tables.memory import IDS, ROWS

_EXPONENT = np.int32(0x7F800000)


@kernel(types.int64(IDS, ROWS, types.int64, types.float32[:, ::1]))
def _add(places: Any, rows: Any, known: Any, into: Any) -> Any:
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
def _first_nonfinite(bits: Any) -> Any:
    """The first row of float32 bits with a NaN or an infinity; -1: none."""
    for row in range(bits.shape[0]):
        bad = 0
        for column in range(bits.shape[1]):
            bad += (bits[row, column] & _EXPONENT) == _EXPONENT
        if bad:
            return row
    return -1


Floats = npt.NDArray[np.float32]


def merge_rows(parts: Sequence[tuple[Ids, Floats]], divisor: int) -> tuple[Ids, Floats]:
    """Every id of ``parts`` once, in order of appearance, and the sum of its gradients divided by ``divisor``.

    A part is ids int64 [n], no id twice, and gradients float32 [n, dim]; a part that lacks an id counts as zeros. Sums
    are taken in the order given, row by row, so they are bitwise the same however ids are spread over shards.
    Raises InvalidRequest without any part.
    """
    if not parts or divisor < 1:
        raise InvalidRequest("a mean needs at least one part", actual=f"{len(parts)} parts, divided by {divisor}")
    ids, places = unique(np.concatenate([part for part, _ in parts]))
    merged = np.empty((ids.size, parts[0][1].shape[1]), np.float32)
    begin = known = 0
    for part, gradients in parts:
        known = _add(places[begin : begin + part.size], gradients, known, merged)
        begin += part.size
    if divisor != 1:
        merged /= np.float32(divisor)
    return ids, merged


def has_duplicates(ids: Ids) -> bool:
    """Whether an id occurs more than once."""
    return bool(unique(ids)[0].size != ids.size)


def first_nonfinite_row(rows: Floats) -> int | None:
    """Index of the first of ``rows``, float32 [n, width], with a NaN or an infinity; None when all are finite."""
    found = int(_first_nonfinite(rows.view(np.int32)))
    return found if found >= 0 else None
