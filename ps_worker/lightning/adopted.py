"""The optimizers that trainers of this process have adopted, and which of them the next run of a trainer ends."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch

from ps_worker.optimizer import PsOptimizer

_adopted: list[PsOptimizer] = []
"""In the order of their adoption, without those that were closed."""


def note_adopted(optimizers: Iterable[PsOptimizer]) -> None:
    """A trainer has adopted these."""
    _adopted.extend(optimizers)


def optimizers_of(module: torch.nn.Module) -> list[PsOptimizer]:
    """Those in use that train a parameter of ``module``."""
    trained = {id(parameter) for parameter in module.parameters()}
    return [each for each in _adopted if any(id(p) in trained for group in each.param_groups for p in group["params"])]


def close_earlier(module: torch.nn.Module, own: Collection[PsOptimizer]) -> None:
    """Close those of ``module``, whose parameters get new ones, and ``own``, which a trainer gives up.

    Each waits as ``cluster.barrier()`` does: all workers run the same trainers. Raises PsError.
    """
    ending = optimizers_of(module)
    for optimizer in list(_adopted):
        if any(optimizer is each for each in (*ending, *own)):
            optimizer.close()
            _adopted.remove(optimizer)
