"""Optimizer classes as users register them: one that fits, and one for each way not to. Imported by shards in tests."""

from __future__ import annotations

from typing import Any

import torch

from ps_protocol.model.registered_optimizers import register


class Plain(torch.optim.Optimizer):
    """Gradient descent; the others differ from it in ``update``."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.update(parameter, parameter.grad, self.state[parameter], group)

    def update(self, p: torch.Tensor, grad: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        p.add_(grad, alpha=-group["lr"])


@register(elementwise=True)
class Descent(Plain):
    """Fits."""


@register(elementwise=True)
class Damped(torch.optim.SGD):
    """A subclass of torch's SGD with an argument of its own."""

    def __init__(self, params: Any, lr: float = 0.1, momentum: float = 0.9, damp: float = 0.5) -> None:
        super().__init__(params, lr=lr, momentum=momentum)
        self.defaults["damp"] = damp
        for group in self.param_groups:
            group.setdefault("damp", damp)

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    buffer = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
                    p.add_(buffer.mul_(group["momentum"]).add_(p.grad, alpha=group["damp"]), alpha=-group["lr"])


@register(elementwise=True)
class Counting(Plain):
    """Schedule-free in its simplest form: an average of iterates, weighed by a count, all in the parameter's state."""

    def update(self, p: torch.Tensor, grad: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if not state:
            state["step"], state["z"] = torch.tensor(0.0), p.clone()
        state["step"] += 1
        state["z"].add_(grad, alpha=-group["lr"])
        p.lerp_(state["z"], 1 / float(state["step"]))


@register(elementwise=False)
class NormedRows(Plain):
    """Divides by the norm of each row: it reads shapes, and is told to have whole variables."""

    def update(self, p: torch.Tensor, grad: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        norms = torch.linalg.vector_norm(grad, dim=-1, keepdim=True) if grad.dim() else grad.abs()
        p.addcdiv_(grad, norms + 1e-6, value=-group["lr"])


@register(elementwise=True)
class Normed(NormedRows):
    """Says that it is element-wise, and is not."""


@register(elementwise=True)
class Noisy(Plain):
    """Never the same twice."""

    def update(self, p: torch.Tensor, grad: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        p.add_(grad + 1e-9 * torch.randn_like(grad), alpha=-group["lr"])


@register(elementwise=True)
class CountsInGroups(Plain):
    """Keeps a number where no snapshot finds it."""

    def update(self, p: torch.Tensor, grad: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        group["k"] = group.get("k", 0) + 1


@register(elementwise=True)
class CountsInNumbers(Plain):
    """Keeps a number that is no tensor."""

    def update(self, p: torch.Tensor, grad: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        state["step"] = state.get("step", 0) + 1


@register(elementwise=True)
class KeepsRows(Plain):
    """Keeps a number for each row, in an element-wise class."""

    def update(self, p: torch.Tensor, grad: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        state["rows"] = grad.sum(-1)


@register(elementwise=True)
class HidesAnArgument(Plain):
    """Has an argument that is no option of its groups."""

    def __init__(self, params: Any, lr: float = 0.1, hidden: float = 1.0) -> None:
        super().__init__(params, lr)


@register(elementwise=True)
class TakesAnything(Plain):
    """Does not name its arguments."""

    def __init__(self, params: Any, **others: float) -> None:
        super().__init__(params, **others)


@register(elementwise=True)
class HasNoRate(torch.optim.Optimizer):
    """Has no learning rate."""

    def __init__(self, params: Any, speed: float = 0.1) -> None:
        super().__init__(params, {"speed": speed})


@register(elementwise=True)
class KeepsItsOwn(Plain):
    """Remembers in an attribute what it did: right in one process, gone after a restart."""

    def update(self, p: torch.Tensor, grad: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        self.count = getattr(self, "count", 0) + 1
        p.add_(grad, alpha=-group["lr"] / self.count)


@register(elementwise=True)
class Raises(Plain):
    """Raises in the middle of a step where a gradient is large."""

    def update(self, p: torch.Tensor, grad: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        p.add_(grad, alpha=-group["lr"])
        if float(grad.abs().max()) > 100:
            raise ValueError("too steep")
