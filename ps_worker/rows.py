"""Settings for the rows of a table: the optimizer that updates them, and their first values.

    cluster.embedding(16, name="user", optimizer=rows.Adagrad(lr=0.05), init=rows.Normal(std=0.01))

``max_norm`` of an optimizer is the largest norm of one row's gradient; a longer one is scaled down first. 0: any norm.
"""

from __future__ import annotations

from dataclasses import dataclass

from ps_protocol.model import row_optimizers
from ps_protocol.model.row_optimizers import *  # noqa: F403
from ps_protocol.model.tables import RowInit

__all__ = [*row_optimizers.__all__, "Constant", "Init", "Normal", "Uniform"]


@dataclass(frozen=True, slots=True)
class Uniform:
    """Rows begin with numbers drawn evenly from [low, high).

    Attributes:
        low: Least number.
        high: Bound of the numbers.
    """

    low: float
    high: float

    def init(self) -> RowInit:
        """Return the form in the declaration of a table."""
        return RowInit("uniform", float(self.low), float(self.high))


@dataclass(frozen=True, slots=True)
class Normal:
    """Rows begin with numbers drawn from a normal distribution.

    Attributes:
        mean: Its mean.
        std: Its standard deviation.
    """

    mean: float = 0.0
    std: float = 1.0

    def init(self) -> RowInit:
        """Return the form in the declaration of a table."""
        return RowInit("normal", float(self.mean), float(self.std))


@dataclass(frozen=True, slots=True)
class Constant:
    """Rows begin with one number everywhere.

    Attributes:
        value: The number.
    """

    value: float = 0.0

    def init(self) -> RowInit:
        """Return the form in the declaration of a table."""
        return RowInit("constant", float(self.value))


Init = Uniform | Normal | Constant
