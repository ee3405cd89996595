"""Compiled random choice of the uses that give an id a row."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types

from ps_protocol.model.ids import mix
from ps_protocol.model.kernels import kernel
from ps_server.tables.kernels.memory import IDS


@kernel(types.boolean[::1](IDS, types.uint64, types.int64, types.float64), allocates=True)
def chosen(ids: Any, seed: Any, update: Any, probability: Any) -> Any:
    """Whether each id is, in this update, with this probability; bool [n]."""
    found = np.empty(ids.size, np.bool_)
    start = mix(np.int64(mix(np.int64(seed)) + np.uint64(update)))
    for i in range(ids.size):
        bits = mix(np.int64(mix(ids[i]) ^ start))
        found[i] = np.float64(bits >> np.uint64(11)) * (1.0 / (1 << 53)) < probability
    return found
