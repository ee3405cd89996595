"""Combines the rows of several pushes into one update, and finds invalid rows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ps_protocol.errors import InvalidRequest
from ps_protocol.model.ids import unique
from ps_protocol.model.tables import Ids
from ps_server.tables.kernels import merging

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
        known = merging.add(places[begin : begin + part.size], gradients, known, merged)
        begin += part.size
    if divisor != 1:
        merged /= np.float32(divisor)
    return ids, merged


def has_duplicates(ids: Ids) -> bool:
    """Whether an id occurs more than once."""
    return bool(unique(ids)[0].size != ids.size)


def first_nonfinite_row(rows: Floats) -> int | None:
    """Index of the first of ``rows``, float32 [n, width], with a NaN or an infinity; None when all are finite."""
    found = int(merging.first_nonfinite(rows.view(np.int32)))
    return found if found >= 0 else None
