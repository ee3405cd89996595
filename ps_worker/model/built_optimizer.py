"""Reads a torch optimizer that the user has built: whether shards can take it over, its groups, options and state."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.optim import lr_scheduler

from ps_protocol.errors import ConfigError, InvalidRequest, UnsupportedOptimizer
from ps_protocol.model.registered_optimizers import reads_shapes
from ps_worker.model.declare import qualified_name
from ps_worker.model.optimizer_state import StateByNumber

_SCHEDULED = ("lr", "momentum", "betas")
"""Options that torch's schedulers change."""


def check_built(given: object, module: torch.nn.Module, schedulers: Iterable[object]) -> torch.optim.Optimizer:
    """``given``, if shards can take it over as it is.

    Raises UnsupportedOptimizer if shards cannot run it or one of its methods was replaced; InvalidRequest if it trains
    parameters that ``module`` does not have; ConfigError for a scheduler of another optimizer.
    """
    if not isinstance(given, torch.optim.Optimizer):
        raise UnsupportedOptimizer(
            "adopt() takes an optimizer that has been built",
            expected="an instance of one of torch.optim's classes",
            actual=given.__name__ if isinstance(given, type) else type(given).__name__,
            remedy="call cluster.optimizer(torch_class, model, lr=…) with a class",
        )
    inside = getattr(given, "optimizer", None)
    if isinstance(inside, torch.optim.Optimizer):
        raise UnsupportedOptimizer(
            f"{type(given).__name__} wraps another optimizer",
            expected="one of torch.optim's own classes",
            actual=f"{type(given).__name__} around {type(inside).__name__}",
            remedy="adopt the optimizer inside before it is wrapped",
        )
    qualified_name(type(given))
    _check_calls(given)
    _check_parameters(given, module)
    for scheduler in _flat(schedulers):
        _check_scheduler(scheduler, given)
    return given


def has_scheduler(given: torch.optim.Optimizer) -> bool:
    """Whether a scheduler of torch has been built on it."""
    return _is_scheduler_s(vars(given).get("step"))


def groups_to_declare(given: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Its parameter groups to declare: equal on all workers and after a restart, whatever schedulers have done.

    Options that schedulers change have their initial values; every step sends the current ones.
    """
    return [group_to_declare(group, given.defaults) for group in given.param_groups]


def constructor_arguments(torch_class: type[torch.optim.Optimizer], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of ``torch_class`` other than the parameters."""
    accepted = inspect.signature(torch_class).parameters
    return {name: value for name, value in defaults.items() if name in accepted}


def state_of(given: torch.optim.Optimizer) -> StateByNumber:
    """Its state by parameter number, without entries that a new optimizer has. Raises InvalidRequest."""
    found = {}
    qualified = qualified_name(type(given))
    parameters = [p for group in given.param_groups for p in group["params"]]
    for number, parameter in enumerate(parameters):
        # Use ``get``: indexing adds an entry.
        state = {name: value for name, value in given.state.get(parameter, {}).items() if value is not None}
        if not state or _is_fresh(state, given.defaults):
            continue
        if not reads_shapes(qualified):
            _check_shapes(number, parameter, state)
        found[number] = state
    return found


def _check_calls(given: torch.optim.Optimizer) -> None:
    replaced = [name for name in vars(given) if callable(getattr(type(given), name, None))]
    replaced = [name for name in replaced if not (name == "step" and has_scheduler(given))]
    if replaced:
        raise UnsupportedOptimizer(
            f"'{replaced[0]}' of this optimizer has been replaced, and the replacement would not be called",
            expected=f"{type(given).__name__} as torch has it",
            actual=", ".join(replaced),
            remedy="adopt the optimizer first, and replace or compile its calls afterwards, or use its hooks",
        )


def _is_scheduler_s(step: object) -> bool:
    """Whether ``step`` is the wrapper that lr_scheduler.py installs, not another one around it."""
    own = getattr(step, "__globals__", {}).get("__name__")
    return own == lr_scheduler.__name__ and hasattr(step, "_wrapped_by_lr_sched")


def _check_parameters(given: torch.optim.Optimizer, module: torch.nn.Module) -> None:
    known = {id(parameter) for parameter in module.parameters()}
    foreign = [
        (place, number, parameter)
        for place, group in enumerate(given.param_groups)
        for number, parameter in enumerate(group["params"])
        if id(parameter) not in known
    ]
    if foreign:
        place, number, parameter = foreign[0]
        raise InvalidRequest(
            f"{len(foreign)} of the optimizer's parameters are not of this model",
            variable=f"parameter {number} of group {place}",
            expected=f"parameters of {type(module).__name__}",
            actual=f"another tensor of shape {tuple(parameter.shape)}",
            remedy="build the optimizer on model.parameters() of this model, after it was moved or converted",
        )


def _flat(schedulers: Iterable[object]) -> Iterator[object]:
    """All schedulers, including nested ones (SequentialLR, ChainedScheduler)."""
    for scheduler in schedulers:
        yield scheduler
        yield from _flat(getattr(scheduler, "_schedulers", ()))


def _check_scheduler(scheduler: object, given: torch.optim.Optimizer) -> None:
    own = getattr(scheduler, "optimizer", None)
    if own is not given:
        raise ConfigError(
            f"a scheduler that is given to adopt() is not this optimizer's: {type(scheduler).__name__}",
            expected=f"a scheduler built on this {type(given).__name__}",
            actual="no scheduler of torch" if own is None else f"one built on another {type(own).__name__}",
            remedy="build it on the optimizer that is adopted, or leave it out",
        )


def group_to_declare(group: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """One group, as in ``groups_to_declare``."""
    declared = {name: value for name, value in group.items() if name not in ("params", "param_names")}
    for name in _SCHEDULED:
        # With momentum 0 there is no state.
        if (
            name in declared
            and name in defaults
            and (name != "momentum" or bool(declared[name]) == bool(defaults[name]))
        ):
            declared[name] = defaults[name]
    names = group.get("param_names")
    declared["params"] = list(zip(names, group["params"], strict=True)) if names else list(group["params"])
    return declared


def _is_fresh(state: Mapping[str, Any], defaults: Mapping[str, Any]) -> bool:
    """Whether it is Adagrad's initial state; other optimizers begin without state."""
    if set(state) != {"step", "sum"} or float(state["step"]):
        return False
    return bool((state["sum"] == defaults.get("initial_accumulator_value", 0.0)).all())


def _check_shapes(number: int, parameter: torch.Tensor, state: Mapping[str, Any]) -> None:
    for name, value in state.items():
        if isinstance(value, torch.Tensor) and value.dim() and value.shape != parameter.shape:
            raise InvalidRequest(
                f"the optimizer's state '{name}' does not have its parameter's shape",
                variable=f"parameter {number}",
                expected=str(tuple(parameter.shape)),
                actual=str(tuple(value.shape)),
                remedy="load the state of an optimizer of this model, or build the optimizer again",
            )
