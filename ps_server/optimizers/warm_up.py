"""Has torch load what its optimizers need, before the first model does."""

from __future__ import annotations

import torch


def warm_up() -> None:
    """Make one step of one number. The first optimizer of a process loads about 800 modules of torch: over a second."""
    parameter = torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    parameter.grad = torch.zeros(1)
    optimizer.step()
