"""The row optimizers: their arguments, the ranges of these, and the state of a row.

The class of an optimizer is what users write and what the servers know of it. The loop over rows is in
``ps_server/tables/row_optimizers.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, ClassVar

__all__ = ["FTRL", "SGD", "Adagrad", "Adam", "RowOptimizer", "RowWiseAdagrad"]

LARGEST_OPTION = 1e9
"""Upper limit of arguments of row optimizers; with more, rows would overflow."""

ROW_OPTIMIZERS: dict[str, type[RowOptimizer]] = {}
"""By their names in messages and files."""


@dataclass(frozen=True, slots=True)
class State:
    """Numbers that a row optimizer keeps with each row."""

    #: What they are before the first update: a number, or the argument that gives it.
    first: float | str
    #: One number for the row, not one for each number of the row.
    once: bool = False

    def width(self, dim: int) -> int:
        """How many there are in a row of ``dim`` numbers."""
        return 1 if self.once else dim


def _within(default: float, low: float, high: float) -> Any:
    """An argument with a range of its own; that of all others is 0 to LARGEST_OPTION."""
    return field(default=default, metadata={"range": (low, high)})


@dataclass(frozen=True)
class RowOptimizer:
    """Updates the rows of a table that have a gradient. Its fields are its arguments."""

    kind: ClassVar[str]
    state: ClassVar[tuple[State, ...]]

    def __init_subclass__(cls, *, kind: str, state: tuple[State, ...]) -> None:
        """``kind``: its name in messages and files. ``state``: behind the numbers of each row, in this order."""
        cls.kind, cls.state = kind, state
        ROW_OPTIMIZERS[kind] = cls

    @classmethod
    def defaults(cls) -> Mapping[str, float]:
        """Every argument by name, where none is given."""
        return cls().options()

    def options(self) -> Mapping[str, float]:
        """Every argument by name."""
        return {name: float(value) for name, value in asdict(self).items()}

    @classmethod
    def ranges(cls) -> Mapping[str, tuple[float, float]]:
        """The lowest and the highest value of each argument."""
        return {each.name: each.metadata.get("range", (0.0, LARGEST_OPTION)) for each in fields(cls)}


@dataclass(frozen=True)
class SGD(RowOptimizer, kind="sgd", state=()):
    """``row -= lr * (gradient + weight_decay * row)``.

    Attributes:
        lr: Learning rate.
        weight_decay: L2 penalty; applied to rows with a gradient.
        max_norm: Norm to which the gradient of each row is scaled down. 0: any norm.
    """

    lr: float = 0.01
    weight_decay: float = 0.0
    max_norm: float = 0.0


@dataclass(frozen=True)
class Adagrad(RowOptimizer, kind="adagrad", state=(State("initial"),)):
    """A sum of squares for each number of a row, as ``torch.optim.Adagrad`` (Duchi et al. 2011).

    Attributes:
        lr: Learning rate.
        lr_decay: Decay of the learning rate with the updates of the table.
        initial: First value of the sums.
        eps: Added to the root of the sums.
        max_norm: Norm to which the gradient of each row is scaled down. 0: any norm.
    """

    lr: float = 0.01
    lr_decay: float = 0.0
    initial: float = 0.0
    eps: float = 1e-10
    max_norm: float = 0.0


@dataclass(frozen=True)
class RowWiseAdagrad(RowOptimizer, kind="rowwise_adagrad", state=(State("initial", once=True),)):
    """One sum for each row, of the mean squares of its gradients (Gupta et al. 2014; FBGEMM): a fraction of the memory.

    Attributes:
        lr: Learning rate.
        initial: First value of the sum.
        eps: Added to the root of the sum.
        max_norm: Norm to which the gradient of each row is scaled down. 0: any norm.
    """

    lr: float = 0.01
    initial: float = 0.0
    eps: float = 1e-10
    max_norm: float = 0.0


@dataclass(frozen=True)
class Adam(RowOptimizer, kind="adam", state=(State(0.0), State(0.0))):
    """As ``torch.optim.SparseAdam``: moments move where a row has a gradient, the step counts updates of the table.

    Attributes:
        lr: Learning rate.
        beta1: Decay of the first moment.
        beta2: Decay of the second moment.
        eps: Added to the root of the second moment.
        max_norm: Norm to which the gradient of each row is scaled down. 0: any norm.
    """

    lr: float = 0.001
    beta1: float = _within(0.9, 0.0, 1 - 1e-7)
    beta2: float = _within(0.999, 0.0, 1 - 1e-7)
    eps: float = 1e-8
    max_norm: float = 0.0


@dataclass(frozen=True)
class FTRL(RowOptimizer, kind="ftrl", state=(State("initial"), State(0.0))):
    """Follow the regularised leader, per coordinate (McMahan et al. 2013): with ``l1``, numbers of a row become 0.

    ``lr`` weighs all past gradients, not the newest ones alone. With 0, where a schedule may end, rows and their state
    stay as they are.

    Attributes:
        lr: Learning rate, alpha of the paper.
        power: Exponent of the sum of squares in the learning rate, 0 or less.
        l1: L1 penalty.
        l2: L2 penalty.
        beta: Added to the root of the sums, beta of the paper.
        initial: First value of the sums of squares.
        max_norm: Norm to which the gradient of each row is scaled down. 0: any norm.
    """

    lr: float = 0.05
    power: float = _within(-0.5, -10.0, 0.0)
    l1: float = 0.0
    l2: float = 0.0
    beta: float = 0.0
    initial: float = 0.1
    max_norm: float = 0.0
