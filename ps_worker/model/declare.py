"""Turns a torch.optim class, its arguments and a model into the declaration the cluster agrees on."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch

from ps_protocol.errors import ConfigError, UnsupportedOptimizer
from ps_protocol.model.optimizers import ELEMENTWISE, EXECUTION_HINTS, REFUSED, SHAPED
from ps_protocol.model.option_ranges import require_fitting_rule
from ps_protocol.model.registered_optimizers import (
    ENVIRONMENT,
    load_entry_points,
    load_modules,
    name_of,
    named_modules,
    reads_shapes,
    registered_optimizer,
)
from ps_protocol.model.spec import Buffers, ModelSpec, NonFinite, Option, Options, StaleRule, choice
from ps_worker.model.bindings import (
    Bindings,
    ParameterGroup,
    Source,
    bind,
    check_free,
    named_as_in,
    persistent_buffers,
    read_groups,
)
from ps_worker.model.optimizer_state import StateByNumber
from ps_worker.model.plain import plain_module
from ps_worker.tables.table import NO_TABLES, DeclaredTables, declared, modules_in, plain_name

BufferPolicy = str | Mapping[str, str]
"""Which buffers are kept: a policy for all, or by the name of a buffer or a module."""

_KNOWN = ELEMENTWISE | SHAPED
_KNOWN_TEXT = ", ".join(sorted(_KNOWN))


@dataclass(frozen=True, slots=True)
class Declaration:
    """A model as declared to the cluster, with the user's tensors and groups."""

    spec: ModelSpec
    bindings: Bindings
    #: As torch's optimizer would hold them: 'params' and every option, defaults filled in.
    groups: list[dict[str, Any]]
    defaults: dict[str, Any]
    tables: DeclaredTables = NO_TABLES
    #: Names of buffers whose policy the user has chosen.
    chosen_buffers: frozenset[str] = frozenset()
    #: The initial state of a new job.
    state: StateByNumber = field(default_factory=dict)


def build_spec(
    torch_class: type[torch.optim.Optimizer],
    source: Source,
    arguments: Mapping[str, Any],
    *,
    name: str,
    nonfinite: str = "refuse",
    buffers: BufferPolicy = "rank0",
    tables: Iterable[object] = (),
    seed: Callable[[], int] = lambda: 0,
    module: torch.nn.Module | None = None,
    held: Mapping[int, str] = MappingProxyType({}),
    clip_grad_norm: float | None = None,
    stale: str | StaleRule | None = None,
) -> Declaration:
    """Declare ``source`` under ``name``, with the tables of its modules and of the modules ``tables``.

    Nothing is sent and no tensor is copied. ``seed()`` is the job's. Where ``source`` is parameters or groups, buffers,
    tables and names are those of ``module``. ``held``: models of other optimizers, by ``id(parameter)``. Raises
    UnsupportedOptimizer for a class or argument that shards cannot run, InvalidRequest for parameters they cannot hold
    and for a table that is declared twice, ConfigError for an unknown policy.
    """
    qualified = qualified_name(torch_class)
    rule = stale if stale is None or isinstance(stale, StaleRule) else StaleRule.parse(stale)
    require_fitting_rule(qualified, rule)
    source = plain_module(source) if isinstance(source, torch.nn.Module) else source
    whole = _module_of(source, plain_module(module) if isinstance(module, torch.nn.Module) else module)
    found = declared([*(whole.modules() if whole is not None else ()), *modules_in(tables)], seed)
    groups = read_groups(source, may_be_empty=bool(found.specs))
    if whole is not None:
        groups = named_as_in(whole, groups)
    kept, policies = _buffer_policies(buffers, whole)
    own = frozenset(name for name, policy in policies.items() if policy is Buffers.LOCAL)
    bindings = bind(groups, None if kept is Buffers.LOCAL else whole, own)
    check_free(bindings, held)
    template = _instantiate(torch_class, groups, arguments)
    accepted = set(inspect.signature(torch_class).parameters) - EXECUTION_HINTS - {"params"}
    spec = ModelSpec(
        name=name,
        optimizer=qualified,
        variables=bindings.variables,
        group_options=tuple(group_options(group, accepted) for group in template.param_groups),
        nonfinite=choice(NonFinite, nonfinite, "nonfinite"),
        buffers=kept,
        unsplit=reads_shapes(qualified),
        tables=found.specs,
        clip_grad_norm=checked_clip(clip_grad_norm),
        stale=rule,
    )
    own_groups = [{**t, "params": list(g.parameters)} for t, g in zip(template.param_groups, groups, strict=True)]
    chosen = frozenset(policies) if isinstance(buffers, Mapping) or kept is not Buffers.RANK0 else frozenset()
    return Declaration(spec, bindings, own_groups, template.defaults, found, chosen)


def qualified_name(torch_class: type[torch.optim.Optimizer]) -> str:
    """The name on the wire, as "torch.optim.SGD". Raises UnsupportedOptimizer for a class that shards cannot run."""
    short = getattr(torch_class, "__name__", repr(torch_class))
    qualified = f"torch.optim.{short}"
    own = getattr(torch.optim, short, None) is torch_class
    if not own and (registered := _registered_name(torch_class)):
        return registered
    if qualified in REFUSED:
        raise UnsupportedOptimizer(
            f"{qualified} cannot run on shards: {REFUSED[qualified]}", remedy=f"choose another one: {_KNOWN_TEXT}"
        )
    if qualified not in _KNOWN or not own:
        raise UnsupportedOptimizer(
            f"{short} is not an optimizer that shards run",
            expected=_KNOWN_TEXT,
            remedy="pass one of torch.optim's own classes, not an instance; register one of your own for shards "
            "(docs/optimizers.md)",
        )
    return qualified


def _registered_name(torch_class: object) -> str:
    """The name under which a class is registered, or would be by a module that can be found; empty if none."""
    if not isinstance(torch_class, type):
        return ""
    name = name_of(torch_class)
    if registered_optimizer(name) is None:
        load_modules(named_modules(os.environ.get(ENVIRONMENT, "")))
        load_entry_points()
    known = registered_optimizer(name)
    return name if known is not None and known.torch_class is torch_class else ""


def named_arguments(
    torch_class: type[torch.optim.Optimizer], positional: Sequence[object], arguments: Mapping[str, Any]
) -> dict[str, Any]:
    """All arguments by name, as torch takes them behind ``params``. Raises UnsupportedOptimizer for too many."""
    if not positional:
        return dict(arguments)
    qualified = qualified_name(torch_class)
    parameters = list(inspect.signature(torch_class).parameters.values())[1:]
    names = [each.name for each in parameters if each.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    twice = [name for name in names[: len(positional)] if name in arguments]
    if len(positional) > len(names) or twice:
        raise UnsupportedOptimizer(
            f"{qualified} is given '{twice[0]}' twice" if twice else f"{qualified} is given too many arguments",
            expected=f"at most {len(names)} without a name: {', '.join(names)}",
            actual=f"{len(positional)} without a name, and {', '.join(arguments) or 'none by name'}",
            remedy="give the optimizer's arguments by name, as lr=0.1",
        )
    return {**dict(zip(names, positional, strict=False)), **arguments}


def _module_of(source: Source, module: torch.nn.Module | None) -> torch.nn.Module | None:
    """The module whose buffers, tables and names belong to the model. Raises ConfigError."""
    own = source if isinstance(source, torch.nn.Module) else None
    if module is None or module is own:
        return own
    if own is not None or not isinstance(module, torch.nn.Module):
        raise ConfigError(
            "module= names the module that parameters or groups belong to",
            expected="module= for parameters or groups only" if own is not None else "an nn.Module",
            actual=type(module).__name__,
            remedy="leave module= out: the model itself was given" if own is not None else "give module=model",
        )
    return module


def _buffer_policies(given: BufferPolicy, module: torch.nn.Module | None) -> tuple[Buffers, dict[str, Buffers]]:
    """The policy of the buffers that the cluster keeps, and of each buffer with an explicit policy, by name.

    A name in a mapping selects a buffer, or all buffers of a module; the longest match wins, and "" selects all. Raises
    ConfigError.
    """
    names = [name for name, _ in persistent_buffers(module)] if module is not None else []
    if not isinstance(given, Mapping):
        policy = choice(Buffers, given, "buffers")
        return policy, dict.fromkeys(names, policy)
    chosen = {plain_name(str(key)): choice(Buffers, value, f"buffers['{key}']") for key, value in given.items()}
    policies: dict[str, Buffers] = {}
    for key in sorted(chosen, key=len):
        own = [name for name in names if not key or name == key or name.startswith(f"{key}.")]
        if not own:
            raise ConfigError(
                f"buffers= names '{key}', and the model has no buffer of that name, or in a module of it",
                expected=", ".join(names) or "nothing: the model has no persistent buffers",
                actual=key,
                remedy="give names as model.named_buffers() has them, and module=model with parameters",
            )
        policies.update(dict.fromkeys(own, chosen[key]))
    kept = {policies.get(name, Buffers.RANK0) for name in names} - {Buffers.LOCAL}
    if len(kept) > 1:
        raise ConfigError(
            "buffers= gives two policies for buffers that the cluster keeps",
            expected='"rank0" or "average" for all of them, and "local" for others; "" names all buffers',
            actual=", ".join(f"{key}: {value.value}" for key, value in chosen.items()),
        )
    return next(iter(kept), Buffers.LOCAL if names else Buffers.RANK0), policies


def checked_clip(norm: object) -> float:
    """The norm that gradients are clipped to, 0 for None. Raises ConfigError unless it is positive and finite."""
    if norm is None:
        return 0.0
    if isinstance(norm, bool) or not isinstance(norm, int | float) or not 0.0 < norm <= sys.float_info.max:
        raise ConfigError(
            "clip_grad_norm is not a norm that gradients can be clipped to",
            expected="a positive finite number, or None",
            actual=repr(norm)[:80],
        )
    return float(norm)


def group_options(group: Mapping[str, Any], accepted: set[str]) -> Options:
    """The options of one group that the optimizer's constructor takes, as JSON has them."""
    return {key: _as_option(key, value) for key, value in group.items() if key in accepted}


def _instantiate(
    torch_class: type[torch.optim.Optimizer], groups: list[ParameterGroup], arguments: Mapping[str, Any]
) -> torch.optim.Optimizer:
    """The torch optimizer itself over tensors without memory: it checks the arguments and fills in its defaults."""
    meta = [
        {
            **_usable(group.options),
            "params": [
                (name, copy) if group.named else copy
                for name, copy in zip(group.names, map(_without_memory, group.parameters), strict=True)
            ],
        }
        for group in groups
    ]
    try:
        return torch_class(meta, **_usable(arguments))
    except (ValueError, TypeError, RuntimeError) as error:
        raise UnsupportedOptimizer(
            f"{qualified_name(torch_class)} refuses these arguments: {error}",
            actual=", ".join(f"{key}={value!r}" for key, value in arguments.items()),
        ) from error


def _without_memory(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(tensor, device="meta", requires_grad=tensor.requires_grad)


def _usable(options: Mapping[str, Any]) -> dict[str, Any]:
    if options.get("differentiable"):
        raise UnsupportedOptimizer(
            "differentiable=True cannot run on shards: autograd does not reach through the network",
            remedy="leave it out",
        )
    return {key: _plain(value) for key, value in options.items() if key not in EXECUTION_HINTS}


def _plain(value: Any) -> Any:
    """Numbers for tensors that hold one, also inside tuples."""
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.item()
    return type(value)(map(_plain, value)) if type(value) in (tuple, list) else value


def _as_option(key: str, value: Any) -> Option:
    value = _plain(value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, tuple | list):
        return [_as_option(key, item) for item in value]
    raise UnsupportedOptimizer(
        f"the optimizer option '{key}' cannot be sent to shards",
        expected="a number, a string, a truth value, None, or a tuple of them",
        actual=type(value).__name__,
    )


def is_immutable(value: object) -> bool:
    """Whether this option value cannot change in place."""
    return (
        value is None
        or isinstance(value, int | float | str)
        or (type(value) is tuple and all(map(is_immutable, value)))
    )
