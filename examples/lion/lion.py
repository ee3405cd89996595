"""Lion for shards: Chen et al., "Symbolic Discovery of Optimization Algorithms", NeurIPS 2023, algorithm 2."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ps_worker import optimizers


@optimizers.register(elementwise=True)
class Lion(torch.optim.Optimizer):
    """Steps by the sign of an average of gradients; an ordinary optimizer of torch, beside its decorator."""

    def __init__(
        self, params: Any, lr: float = 1e-4, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step. ``closure`` is torch's; shards give none."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state, (beta1, beta2) = self.state[parameter], group["betas"]
                average = state.setdefault("exp_avg", torch.zeros_like(parameter))
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.add_(average.lerp(parameter.grad, 1 - beta1).sign_(), alpha=-group["lr"])
                average.lerp_(parameter.grad, 1 - beta2)
        return loss
