"""The initial values of rows: a function of seed, table, id and column alone."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import xxhash

from ps_protocol.model.row_optimizers import ROW_OPTIMIZERS
from ps_protocol.model.tables import Ids, TableSpec
from ps_server.tables.kernels import initial_rows

_KINDS = {"constant": initial_rows.CONSTANT, "uniform": initial_rows.UNIFORM, "normal": initial_rows.NORMAL}


class InitialRows:
    """Initial values of the rows of one table, and of their optimizer state. Immutable."""

    def __init__(self, spec: TableSpec) -> None:
        key = np.uint64(xxhash.xxh3_64_intdigest(spec.name.encode(), spec.seed))
        self._values = key, _KINDS[spec.init.kind], spec.init.low, spec.init.high, spec.dim
        self._dim = spec.dim
        self._state = first_state(spec)

    def values(self, ids: Ids, rows: npt.NDArray[np.int64], out: npt.NDArray[np.float32]) -> None:
        """Write the values of ``ids`` to these ``rows`` of ``out``, float32 [any, dim or wider]."""
        initial_rows.write(ids, rows, *self._values, out)

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
