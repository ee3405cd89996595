"""What shards ask of an optimizer class that a user has registered, found by steps on small tensors."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ps_protocol.errors import UnsupportedOptimizer
from ps_protocol.model.optimizers import EXECUTION_HINTS
from ps_protocol.model.registered_optimizers import RegisteredOptimizer
from ps_protocol.model.spec import DType
from ps_server.state.region import torch_dtype

_SHAPE = (2, 3)
_DTYPES = {torch_dtype(dtype) for dtype in DType}


def require_arguments(entry: RegisteredOptimizer, options: Mapping[str, Any]) -> None:
    """Every argument of the constructor is an option of the groups, and "lr" is one.

    Raises UnsupportedOptimizer: what is no option is neither sent, nor logged, nor changed by a schedule.
    """
    parameters = list(inspect.signature(entry.torch_class).parameters.values())[1:]
    open_ended = [each for each in parameters if each.kind in (each.VAR_KEYWORD, each.VAR_POSITIONAL)]
    if open_ended:
        raise _refused(entry, "its constructor names each of its arguments", f"*{open_ended[0].name}")
    made = _made(entry, [torch.zeros(_SHAPE)], options)
    if not isinstance(made, Optimizer):
        raise _refused(entry, "a subclass of torch.optim.Optimizer", str(entry.torch_class))
    group = made.param_groups[0]
    lacking = [each.name for each in parameters if each.name not in group and each.name not in EXECUTION_HINTS]
    if lacking:
        raise _refused(entry, "each argument of its constructor is an option of its groups", f"no '{lacking[0]}'")
    if not isinstance(group.get("lr"), int | float):
        raise _refused(entry, "a learning rate under 'lr' in its groups", repr(group.get("lr")))


def require_state(entry: RegisteredOptimizer, options: Mapping[str, Any], dtype: DType) -> None:
    """Everything that it remembers is in ``state[parameter]``, as tensors. Raises UnsupportedOptimizer.

    Of an element-wise class these have the parameter's shape, or none at all and then count. Options are as they were:
    what a step changed in its groups, a log and a snapshot would not have.
    """
    parameter = torch.ones(_SHAPE, dtype=torch_dtype(dtype))
    made = _made(entry, [parameter], options)
    before = _options(made)
    for _ in range(2):
        parameter.grad = torch.full_like(parameter, 0.5)
        with torch.no_grad():
            made.step()
    changed = [name for name, value in _options(made).items() if name not in before or before[name] != value]
    if changed:
        raise _refused(
            entry,
            "a step that changes nothing in its groups",
            f"'{changed[0]}' changed",
            "keep it in self.state[parameter], as a tensor without axes",
        )
    if set(made.state) - {parameter}:
        raise _refused(entry, "state of parameters only", "state under another key")
    for name, value in made.state[parameter].items():
        if not isinstance(value, Tensor):
            raise _refused(
                entry, "tensors in its state", f"{name!r} is {type(value).__name__}", "keep it as torch.tensor(value)"
            )
        if value.dtype not in _DTYPES:
            raise _refused(entry, "state of a dtype that is sent", f"'{name}' is {value.dtype}")
        if entry.elementwise and value.dim() and value.shape != parameter.shape:
            raise _refused(
                entry,
                "state of the parameter's shape, or without axes",
                f"'{name}' has shape {tuple(value.shape)}",
                "register it with elementwise=False",
            )


def accepted_arguments(torch_class: type[Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Those of ``options`` that its constructor takes; others are in its groups alone."""
    accepted = inspect.signature(torch_class).parameters
    return {name: value for name, value in options.items() if name in accepted}


def _made(entry: RegisteredOptimizer, parameters: Sequence[Tensor], options: Mapping[str, Any]) -> Any:
    try:
        return entry.torch_class(
            [{**options, "params": list(parameters)}], **accepted_arguments(entry.torch_class, options)
        )
    except (TypeError, ValueError, RuntimeError, LookupError, AttributeError) as error:
        raise UnsupportedOptimizer(f"{entry.name}: {error}", actual=str(dict(options))) from error


def _options(made: Optimizer) -> dict[str, Any]:
    return {name: value for name, value in made.param_groups[0].items() if name != "params"}


def _refused(entry: RegisteredOptimizer, expected: str, actual: str, remedy: str = "") -> UnsupportedOptimizer:
    return UnsupportedOptimizer(
        f"optimizer {entry.name} cannot run on shards",
        expected=expected,
        actual=actual,
        remedy=remedy or "see docs/optimizers.md",
    )
