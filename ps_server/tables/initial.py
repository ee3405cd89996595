"""The initial values of rows: a function of seed, table, id and column, with integers and exact operations only.

So they are the same on every machine, and independent of the place of a row and of its history.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash
from numba import njit, types

from ps_protocol.model.ids import mix
from ps_protocol.model.kernels import kernel
from ps_protocol.model.row_optimizers import ROW_OPTIMIZERS
from ps_protocol.model.tables import Ids, TableSpec
from ps_server.tables.memory import IDS

_CONSTANT, _UNIFORM, _NORMAL = 0, 1, 2

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_LOW_16 = np.uint64(0xFFFF)


@njit(inline="always")
def _bits(start: Any, number: Any) -> Any:
    """The ``number``-th output of SplitMix64 from ``start``."""
    return mix(np.int64(start + np.uint64(number) * _GOLDEN))


@njit(inline="always")
def _quarters(bits: Any) -> Any:
    return np.int32(
        (bits & _LOW_16)
        + ((bits >> np.uint64(16)) & _LOW_16)
        + ((bits >> np.uint64(32)) & _LOW_16)
        + (bits >> np.uint64(48))
    )


@njit(inline="always")
def _normal(start: Any, column: Any) -> Any:
    """Mean 0, deviation 1: twelve uniform numbers, summed and corrected (Teichroew 1953; Knuth, TAOCP 2, 3.4.1).

    Within 2e-4 of the normal distribution where that is between -3 and 3.
    """
    total = _quarters(_bits(start, 3 * column))
    total += _quarters(_bits(start, 3 * column + 1)) + _quarters(_bits(start, 3 * column + 2))
    r = (np.float64(total) / 65536.0 - (6.0 - 6.0 / 65536.0)) / 4.0
    square = r * r
    value = 0.029899776 * square + 0.008355968
    value = value * square + 0.076542912
    value = value * square + 0.252408784
    return (value * square + 3.949846138) * r


@kernel(
    types.void(IDS, IDS, types.uint64, types.int64, types.float64, types.float64, types.int64, types.float32[:, ::1])
)
def _write(ids: Any, rows: Any, key: Any, kind: Any, low: Any, high: Any, dim: Any, out: Any) -> None:
    """Write initial values of ``ids`` to the first ``dim`` columns of these ``rows`` of ``out``."""
    for i in range(ids.size):
        row = rows[i]
        start = mix(np.int64(np.uint64(ids[i]) ^ key)) + key
        if kind == _UNIFORM:
            for column in range(dim):
                unit = np.float64(np.int32(_bits(start, column) >> np.uint64(40))) * (1.0 / (1 << 24))
                out[row, column] = np.float32(low + (high - low) * unit)
        elif kind == _NORMAL:
            for column in range(dim):
                out[row, column] = np.float32(low + high * _normal(start, column))
        else:
            for column in range(dim):
                out[row, column] = np.float32(low)


_KINDS = {"constant": _CONSTANT, "uniform": _UNIFORM, "normal": _NORMAL}


class InitialRows:
    """Initial values of the rows of one table, and of their optimizer state. Immutable."""

    def __init__(self, spec: TableSpec) -> None:
        key = np.uint64(xxhash.xxh3_64_intdigest(spec.name.encode(), spec.seed))
        self._values = key, _KINDS[spec.init.kind], spec.init.low, spec.init.high, spec.dim
        self._dim = spec.dim
        self._state = first_state(spec)

    def values(self, ids: Ids, rows: npt.NDArray[np.int64], out: npt.NDArray[np.float32]) -> None:
        """Write the values of ``ids`` to these ``rows`` of ``out``, float32 [any, dim or wider]."""
        _write(ids, rows, *self._values, out)

    def state(self, rows: npt.NDArray[np.int64], out: npt.NDArray[np.float32]) -> None:
        """Write the state to these ``rows`` of ``out``, float32 [any, width]."""
        if self._state.size:
            out[rows, self._dim :] = self._state


def first_state(spec: TableSpec) -> npt.NDArray[np.float32]:
    """A row's optimizer state before its first update, float32 [state width]."""
    first: list[float] = []
    for each in ROW_OPTIMIZERS[spec.optimizer].state:
        value = spec.options[each.first] if isinstance(each.first, str) else each.first
        first += [value] * each.width(spec.dim)
    return np.array(first, np.float32)
