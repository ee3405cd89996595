"""Which ids tables are measured with."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int64]

DIM = 16
"""Numbers of a row."""

EXPONENT = 1.05
"""Of the power law: the r-th most frequent id comes with a frequency of about r to the power of minus this."""

#: Odd, so that multiples of it, modulo 2**64, are all different: ids are any numbers, not small ones in order.
_SCATTER = 0x9E3779B97F4A7C15


def scattered(begin: int, end: int) -> Ids:
    """As many different ids of any value, by number; int64 [end - begin]."""
    return (np.arange(begin, end, dtype=np.uint64) * np.uint64(_SCATTER)).view(np.int64)


def power_law(rng: np.random.Generator, count: int, distinct: int) -> Ids:
    """Numbers from 0 to below ``distinct``, the lower the more often: int64 [count]. By inversion of the density."""
    power = 1.0 - EXPONENT
    span = (distinct + 1.0) ** power - 1.0
    ranks = (1.0 + rng.random(count) * span) ** (1.0 / power)
    numbers: Ids = np.minimum(ranks.astype(np.int64) - 1, distinct - 1)
    return numbers
