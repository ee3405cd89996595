"""What ``fit`` is given, checked."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ps_protocol.errors import ConfigError
from ps_worker.strategies.fit.callbacks import Callback

Loss = Callable[[Any, Any], Tensor]

PRECISIONS = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class FitSettings:
    """Raises ConfigError for numbers out of range and for a precision that is not known."""

    loss: Loss
    epochs: int = 1
    steps_per_epoch: int | None = None
    accumulate: int = 1
    precision: str = "fp32"
    scheduler: Any = None
    metrics: Mapping[str, Loss] = field(default_factory=dict)
    callbacks: Sequence[Callback] = ()
    checkpoint: Path | None = None
    progress: bool | None = None

    def __post_init__(self) -> None:
        for name in ("epochs", "accumulate", "steps_per_epoch"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise ConfigError(f"fit() has no such {name}", expected="a whole number from 1", actual=repr(value))
        if self.precision not in PRECISIONS:
            raise ConfigError(
                "fit() has no such precision", expected=", ".join(PRECISIONS), actual=repr(self.precision)
            )
        if not callable(self.loss):
            raise ConfigError(
                "fit() has no loss",
                expected="a function of the model's output and the target",
                actual=repr(self.loss)[:80],
                remedy="call fit(model, loader, loss=torch.nn.functional.cross_entropy)",
            )
