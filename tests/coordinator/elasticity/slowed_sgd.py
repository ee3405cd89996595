"""SGD that takes time on shard 1 alone, in proportion to what the shard holds, as on a slower machine."""

from __future__ import annotations

import sys
import time
from typing import Any

import torch

from ps_protocol.model.registered_optimizers import register

SECONDS_PER_ELEMENT = 150e-9

_SLOWED = "--shard" in sys.argv and sys.argv[sys.argv.index("--shard") + 1] == "1"


@register(elementwise=True)
class SlowedSgd(torch.optim.Optimizer):
    """Without a loss."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.add_(parameter.grad, alpha=-group["lr"])
                    if _SLOWED:
                        time.sleep(parameter.numel() * SECONDS_PER_ELEMENT)
