"""Finds invalid rows of a push."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from numba import types

from ps_protocol.model.ids import unique
from ps_protocol.model.kernels import kernel
from ps_protocol.model.tables import Ids

_EXPONENT = np.int32(0x7F800000)


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


def has_duplicates(ids: Ids) -> bool:
    """Whether an id occurs more than once."""
    return bool(unique(ids)[0].size != ids.size)


def first_nonfinite_row(rows: Floats) -> int | None:
    """Index of the first of ``rows``, float32 [n, width], with a NaN or an infinity; None when all are finite."""
    found = int(_first_nonfinite(rows.view(np.int32)))
    return found if found >= 0 else None
