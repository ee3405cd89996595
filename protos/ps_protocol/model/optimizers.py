"""The optimizers that run on shards, for the worker that declares them and the shard that runs them.

Element-wise optimizers treat a flat arena exactly as they treat its variables one by one. The others read a variable's
shape, so their variables are placed whole and stepped one by one.
"""

from __future__ import annotations

from types import MappingProxyType

ELEMENTWISE = frozenset(
    f"torch.optim.{name}"
    for name in (
        "ASGD",
        "Adadelta",
        "Adagrad",
        "Adam",
        "AdamW",
        "Adamax",
        "NAdam",
        "RAdam",
        "RMSprop",
        "Rprop",
        "SGD",
    )
)

SHAPED = frozenset({"torch.optim.Adafactor", "torch.optim.Muon"})

REFUSED = MappingProxyType(
    {
        "torch.optim.LBFGS": "it evaluates the loss several times per step and needs the whole gradient in one place",
        "torch.optim.SparseAdam": "it takes sparse gradients only, and variables are dense",
    }
)

LATE_RATES = frozenset({"torch.optim.ASGD", "torch.optim.Rprop"})
"""Their step does not depend on the learning rate that it is given: no rule can make it smaller."""

#: Arguments that select an implementation without effect on the result; shards use their own.
EXECUTION_HINTS = frozenset({"foreach", "fused", "capturable"})
