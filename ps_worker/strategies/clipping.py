"""Clipping where the process holds the gradient that is applied: in the step of its optimizer, as the last thing."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.hooks import RemovableHandle


def clip_in_steps(optimizer: torch.optim.Optimizer, norm: float) -> RemovableHandle:
    """Clip all gradients of ``optimizer`` together to ``norm`` at the beginning of each of its steps.

    Gradients are unscaled and averaged by then. The handle, which is a context, ends it.
    """

    def clip(stepped: torch.optim.Optimizer, *_: Any) -> None:
        parameters = [p for group in stepped.param_groups for p in group["params"]]
        # A fused step divides by GradScaler's scale itself, so here gradients still have it.
        scale = getattr(stepped, "grad_scale", None)
        torch.nn.utils.clip_grad_norm_(parameters, norm if scale is None else norm * float(scale))

    return optimizer.register_step_pre_hook(clip)
