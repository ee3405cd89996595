"""The part of an update that concerns the rows of one table."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ps_protocol.model.tables import Ids, RowOptions


@dataclass(frozen=True, slots=True)
class RowStep:
    """The part of one table in an update; in ``sync`` with the mean of the gradients of the round."""

    #: Number of the table in the model.
    table: int
    #: int64 [n], without duplicates.
    ids: Ids
    #: float32 [n, dim]
    gradients: npt.NDArray[np.float32]
    #: Number of this update of the table, from 1.
    updates: int
    #: Arguments of the row optimizer; others have their declared values.
    options: RowOptions
