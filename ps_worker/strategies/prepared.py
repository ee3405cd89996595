"""What may be given to ``prepare``: checked before anything is declared or wrapped."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from ps_protocol.errors import ConfigError, UnsupportedOptimizer

#: Of torch; named, for importing FSDP takes its time.
_WRAPPERS = frozenset({"DataParallel", "DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule"})


def check_model(model: object) -> None:
    """Raises ConfigError for what is no module, and for a model that another tool distributes already."""
    if not isinstance(model, nn.Module):
        raise ConfigError(
            "prepare() cannot train this",
            expected="a torch.nn.Module",
            actual=type(model).__name__,
            remedy="give the module first, then the optimizer",
        )
    for name, module in model.named_modules():
        wrapper = next((kind.__name__ for kind in type(module).__mro__ if _wraps(kind)), None)
        if wrapper is not None:
            raise ConfigError(
                f"{name or 'the model'} is wrapped in {wrapper} already",
                expected="the module itself",
                actual=wrapper,
                remedy="give prepare() the plain module: the strategy wraps it where that is needed",
            )


def _wraps(kind: type) -> bool:
    return kind.__name__ in _WRAPPERS and kind.__module__.startswith("torch.")


def check_optimizer(optimizer: object, arguments: Mapping[str, Any]) -> None:
    """Raises UnsupportedOptimizer for what is none, ConfigError for arguments beside one that is built."""
    if isinstance(optimizer, torch.optim.Optimizer):
        if arguments:
            raise ConfigError(
                "prepare() has an optimizer that is built, and arguments for a new one",
                actual=", ".join(arguments),
                remedy="set them where the optimizer is built, or give prepare() its class",
            )
    elif not (isinstance(optimizer, type) and issubclass(optimizer, torch.optim.Optimizer)):
        raise UnsupportedOptimizer(
            "prepare() has no optimizer",
            expected="a class of torch.optim, or an optimizer",
            actual=repr(optimizer)[:80],
            remedy="call prepare(model, torch.optim.AdamW, lr=1e-3)",
        )


def check_new(optimizer: object, prepared: Iterable[torch.optim.Optimizer]) -> None:
    """Raises UnsupportedOptimizer for one of ``prepared``."""
    if any(optimizer is each for each in prepared):
        raise UnsupportedOptimizer(
            "this optimizer was prepared before",
            expected="an optimizer that prepare() was not given yet",
            actual=type(optimizer).__name__,
            remedy="use the model and optimizer that prepare() returned then",
        )


def check_without_closure(optimizer: torch.optim.Optimizer) -> None:
    """Raises UnsupportedOptimizer for one whose step needs a closure, such as LBFGS."""
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise UnsupportedOptimizer(
            "fit() makes steps without a closure",
            expected="an optimizer whose step() needs none",
            actual=type(optimizer).__name__,
            remedy="write the loop with s.run() and optimizer.step(closure), or choose another optimizer",
        )
