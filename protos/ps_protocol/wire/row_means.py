"""The mean of the gradients of rows of several workers.

A shard takes it over the pushes of a round, a worker over those of its host: both in rank order, by the same sums.
Imports numba: only what handles rows imports this module.
"""

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

_IDS = types.Array(types.int64, 1, "C", readonly=True)
_ROWS = types.Array(types.float32, 2, "C", readonly=True)

Floats = npt.NDArray[np.float32]


@kernel(types.int64(_IDS, _ROWS, types.int64, types.float32[:, ::1]))
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


def merge_rows(
    parts: Sequence[tuple[Ids, Floats]], divisor: int, weights: Sequence[float] | None = None
) -> tuple[Ids, Floats]:
    """Every id of ``parts`` once, in order of appearance, and the sum of its gradients divided by ``divisor``.

    A part is ids int64 [n], no id twice, and gradients float32 [n, dim]; a part that lacks an id counts as zeros. Sums
    are taken in the order given, row by row, so they are bitwise the same however ids are spread over shards.
    ``weights``: shares of the mean, one for each part, in place of the division. Raises InvalidRequest without any
    part.
    """
    if not parts or divisor < 1:
        raise InvalidRequest("a mean needs at least one part", actual=f"{len(parts)} parts, divided by {divisor}")
    ids, places = unique(np.concatenate([part for part, _ in parts]))
    merged = np.empty((ids.size, parts[0][1].shape[1]), np.float32)
    begin = known = 0
    for number, (part, gradients) in enumerate(parts):
        values = gradients if weights is None else gradients * np.float32(weights[number])
        known = _add(places[begin : begin + part.size], values, known, merged)
        begin += part.size
    if weights is None and divisor != 1:
        merged /= np.float32(divisor)
    return ids, merged
