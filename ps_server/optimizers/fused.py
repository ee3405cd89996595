"""Calls torch's fused CPU kernels as torch.optim calls them, with lists of tensors that are made once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

#: One call for the parameters of a group: their gradients, and the factor on the learning rate.
_Kernel = Callable[[list[Tensor], float], None]


class FusedStep:
    """The step of one optimizer whose parameters all have their state; bit for bit that of its ``step``.

    Around its kernel torch sorts tensors by device and collects their state, which takes several times as long as a
    small update (`torch/optim/sgd.py`, `adam.py`, torch 2.13). Valid until parameters or state are replaced by others;
    options are read in each step.
    """

    def __init__(self, groups: Sequence[tuple[list[Tensor], _Kernel]]) -> None:
        self._groups = groups

    @classmethod
    def of(cls, optimizer: Optimizer) -> FusedStep | None:
        """The step of ``optimizer``; None where torch has to make it.

        It has to for other classes, groups of several dtypes or without a fused kernel, and without state.
        """
        make = _KERNELS.get(type(optimizer))
        found = []
        for group in optimizer.param_groups if make is not None else ():
            parameters = group["params"]
            states = [optimizer.state.get(parameter, {}) for parameter in parameters]
            alike = len({parameter.dtype for parameter in parameters}) <= 1
            kernel = make(group, parameters, states) if make and alike and group.get("fused") is True else None
            if kernel is None:
                return None
            found.append((parameters, kernel))
        return cls(found) if found else None

    def step(self, gradients: Sequence[list[Tensor]], scale: float) -> None:
        """Update all parameters by ``gradients``: of each group, one for each of its parameters."""
        for (parameters, kernel), each in zip(self._groups, gradients, strict=True):
            if parameters:
                kernel(each, scale)


def _sgd(group: Mapping[str, Any], params: list[Tensor], states: Sequence[Mapping[str, Tensor]]) -> _Kernel | None:
    buffers = [state["momentum_buffer"] for state in states if state.get("momentum_buffer") is not None]
    if len(buffers) != (len(params) if group["momentum"] != 0 else 0):
        return None

    def kernel(gradients: list[Tensor], scale: float) -> None:
        torch._fused_sgd_(
            params,
            gradients,
            buffers,
            weight_decay=group["weight_decay"],
            momentum=group["momentum"],
            lr=group["lr"] * scale,
            dampening=group["dampening"],
            nesterov=group["nesterov"],
            maximize=group["maximize"],
            is_first_step=False,
        )

    return kernel


def _adam(group: Mapping[str, Any], params: list[Tensor], states: Sequence[Mapping[str, Tensor]]) -> _Kernel | None:
    names = ("exp_avg", "exp_avg_sq", "step", *(["max_exp_avg_sq"] if group["amsgrad"] else []))
    if not all(name in state for state in states for name in names):
        return None
    means, squares, steps = ([state[name] for state in states] for name in names[:3])
    largest = [state["max_exp_avg_sq"] for state in states] if group["amsgrad"] else []

    def kernel(gradients: list[Tensor], scale: float) -> None:
        torch._foreach_add_(steps, 1)
        update = torch._fused_adamw_ if group["decoupled_weight_decay"] else torch._fused_adam_
        update(
            params,
            gradients,
            means,
            squares,
            largest,
            steps,
            amsgrad=group["amsgrad"],
            lr=group["lr"] * scale,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=group["maximize"],
        )

    return kernel


_KERNELS: Mapping[type[Optimizer], Callable[..., _Kernel | None]] = {
    torch.optim.SGD: _sgd,
    torch.optim.Adam: _adam,
    torch.optim.AdamW: _adam,
}
