"""What an update does to the rows of one table."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ps_protocol.tables import Ids, RowOptions


@dataclass(frozen=True, slots=True)
class RowStep:
    """One table's part in an update; in ``sync`` gradients are the mean of the round's."""

    #: Number of the table in the model.
    table: int
    #: int64 [n], no id twice.
    ids: Ids
    #: float32 [n, dim]
    gradients: npt.NDArray[np.float32]
    #: Number of this update of the table, from 1.
    updates: int
    #: Arguments of the row optimizer; those left out are as declared.
    options: RowOptions
