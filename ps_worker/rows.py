"""Settings for the rows of a table: the optimizer that updates them, and their first values.

    cluster.embedding(16, name="user", optimizer=rows.Adagrad(lr=0.05), init=rows.Normal(std=0.01))

``max_norm`` of an optimizer is the largest norm of one row's gradient; a longer one is scaled down first. 0: any norm.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import ClassVar

from ps_protocol.model.tables import RowInit, RowOptions

__all__ = [
    "FTRL",
    "SGD",
    "Adagrad",
    "Adam",
    "Constant",
    "Init",
    "Normal",
    "RowOptimizer",
    "RowWiseAdagrad",
    "Uniform",
]


@dataclass(frozen=True, slots=True)
class _RowOptimizer:
    #: The name on the wire, a key of ``ps_protocol.model.tables.ROW_OPTIMIZERS``.
    kind: ClassVar[str]

    def options(self) -> RowOptions:
        """Every argument by name."""
        return {name: float(value) for name, value in asdict(self).items()}


@dataclass(frozen=True, slots=True)
class SGD(_RowOptimizer):
    """``row -= lr * (gradient + weight_decay * row)``."""

    kind: ClassVar[str] = "sgd"
    lr: float = 0.01
    weight_decay: float = 0.0
    max_norm: float = 0.0


@dataclass(frozen=True, slots=True)
class Adagrad(_RowOptimizer):
    """As ``torch.optim.Adagrad`` (Duchi et al. 2011): a sum of squares for each number of a row."""

    kind: ClassVar[str] = "adagrad"
    lr: float = 0.01
    lr_decay: float = 0.0
    initial: float = 0.0
    eps: float = 1e-10
    max_norm: float = 0.0


@dataclass(frozen=True, slots=True)
class RowWiseAdagrad(_RowOptimizer):
    """One sum for each row, of its gradients' mean squares (Gupta et al. 2014; FBGEMM): a fraction of the memory."""

    kind: ClassVar[str] = "rowwise_adagrad"
    lr: float = 0.01
    initial: float = 0.0
    eps: float = 1e-10
    max_norm: float = 0.0


@dataclass(frozen=True, slots=True)
class Adam(_RowOptimizer):
    """As ``torch.optim.SparseAdam``: moments move where a row has a gradient, the step counts updates of the table."""

    kind: ClassVar[str] = "adam"
    lr: float = 0.001
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    max_norm: float = 0.0


@dataclass(frozen=True, slots=True)
class FTRL(_RowOptimizer):
    """Follow the regularised leader, per coordinate (McMahan et al. 2013): with ``l1``, numbers of a row become 0.

    ``lr`` weighs all past gradients, not the newest ones alone. With 0, where a schedule may end, rows and their state
    stay as they are.
    """

    kind: ClassVar[str] = "ftrl"
    lr: float = 0.05
    power: float = -0.5
    l1: float = 0.0
    l2: float = 0.0
    beta: float = 0.0
    initial: float = 0.1
    max_norm: float = 0.0


RowOptimizer = SGD | Adagrad | RowWiseAdagrad | Adam | FTRL


@dataclass(frozen=True, slots=True)
class Uniform:
    """Rows begin with numbers drawn evenly from [low, high)."""

    low: float
    high: float

    def init(self) -> RowInit:
        """The form in the table's declaration."""
        return RowInit("uniform", float(self.low), float(self.high))


@dataclass(frozen=True, slots=True)
class Normal:
    """Rows begin with numbers drawn from a normal distribution."""

    mean: float = 0.0
    std: float = 1.0

    def init(self) -> RowInit:
        """The form in the table's declaration."""
        return RowInit("normal", float(self.mean), float(self.std))


@dataclass(frozen=True, slots=True)
class Constant:
    """Rows begin with ``value`` everywhere."""

    value: float = 0.0

    def init(self) -> RowInit:
        """The form in the table's declaration."""
        return RowInit("constant", float(self.value))


Init = Uniform | Normal | Constant
