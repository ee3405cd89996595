"""Decides which models shards can optimize, with which arguments, and makes their torch.optim instances."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ps_protocol.errors import InvalidRequest, UnsupportedOptimizer
from ps_protocol.model.late_compiler import load_compiler_late
from ps_protocol.model.optimizers import ELEMENTWISE, EXECUTION_HINTS, REFUSED, SHAPED
from ps_protocol.model.registered_optimizers import (
    RegisteredOptimizer,
    name_of,
    reads_shapes,
    registered_names,
    registered_optimizer,
)
from ps_protocol.model.spec import DType, Kind, ModelSpec, Options, Variable
from ps_server.optimizers.state import Expected
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


#: Arguments of one group as torch takes them, complete.
Arguments = dict[str, Any]

# Their fused CPU kernels honour every argument. Not for 16-bit parameters: torch 2.13's fused CPU SGD leaves most
# elements of a 16-bit tensor as they were.
_FUSED = frozenset(f"torch.optim.{name}" for name in ("SGD", "Adam", "AdamW", "Adagrad"))
_FUSED_DTYPES = frozenset({DType.FLOAT32, DType.FLOAT64})

# What torch itself writes into a group although the constructor does not take it.
_GROUP_ONLY = frozenset({("AdamW", "decoupled_weight_decay")})
_FLOATING = _FUSED_DTYPES | {DType.FLOAT16, DType.BFLOAT16}


def validate(spec: ModelSpec) -> None:
    """Raises UnsupportedOptimizer when shards cannot optimize this model, InvalidRequest when its groups are wrong."""
    cls = _class(spec.optimizer)
    if reads_shapes(spec.optimizer) and not spec.unsplit:
        raise InvalidRequest(
            f"{spec.optimizer} reads the shape of its variables", expected="unsplit = true", actual="unsplit = false"
        )
    if not spec.group_options:
        raise InvalidRequest(f"model '{spec.name}' has no parameter group", expected="at least one", actual="0")
    for variable in spec.variables:
        if variable.kind is Kind.PARAMETER:
            _check_variable(spec, variable)
    for options in spec.group_options:
        complete(cls, options)
    if (entry := registered_optimizer(spec.optimizer)) is not None:
        for arguments in arguments_of(spec):
            require_arguments(entry, arguments)
            for dtype in sorted({v.dtype for v in spec.variables if v.kind is Kind.PARAMETER}, key=str):
                require_state(entry, arguments, dtype)
    if spec.optimizer == "torch.optim.Adagrad":
        # torch takes this argument from the constructor and not from the groups.
        values = {options.get("initial_accumulator_value", 0) for options in spec.group_options}
        if len(values) > 1:
            raise UnsupportedOptimizer(
                "torch.optim.Adagrad has one initial_accumulator_value for all parameter groups",
                expected="the same value in every group",
                actual=", ".join(map(str, values)),
            )


def is_shaped(spec: ModelSpec) -> bool:
    """Whether variables are stepped one by one, in their shapes."""
    return spec.unsplit or reads_shapes(spec.optimizer)


def is_registered(spec: ModelSpec) -> bool:
    """Whether its optimizer is a user's: any step of it may raise."""
    return registered_optimizer(spec.optimizer) is not None


def arguments_of(spec: ModelSpec) -> list[Arguments]:
    """The declared arguments of each group, complete and checked."""
    cls = _class(spec.optimizer)
    return [complete(cls, options) for options in spec.group_options]


def overridden(spec: ModelSpec, declared: Sequence[Arguments], options: Sequence[Options]) -> list[Arguments]:
    """The declared arguments with those named in ``options`` replaced; one entry of ``options`` per group.

    Raises UnsupportedOptimizer as torch's constructor would, InvalidRequest for a wrong number of groups and for a
    change of what decides which state is kept: torch would fail in the middle of a step.
    """
    if len(options) != len(declared):
        raise InvalidRequest(
            "a push must name the options of every parameter group, or of none",
            expected=f"{len(declared)} groups",
            actual=f"{len(options)} groups",
        )
    cls = _class(spec.optimizer)
    result = [complete(cls, {**before, **named}) for before, named in zip(declared, options, strict=True)]
    for number, (before, after) in enumerate(zip(declared, result, strict=True)):
        fixed, asked = _fixed(before), _fixed(after)
        for name in fixed:
            if fixed[name] != asked[name]:
                raise InvalidRequest(
                    f"optimizer argument '{name}' of group {number} cannot change while a model is trained",
                    expected=str(before[name]),
                    actual=str(after[name]),
                    remedy="declare the model under another name",
                )
    return result


def check_options(spec: ModelSpec, options: Sequence[Options]) -> None:
    """Whether a step may come with ``options``, one entry per group. Raises as ``overridden``; takes 30 µs a group."""
    overridden(spec, arguments_of(spec), options)


def complete(cls: type[Optimizer], options: Options) -> Arguments:
    """All arguments of a group: torch's defaults under ``options``, without execution hints, lists as tuples.

    Raises UnsupportedOptimizer with torch's own words when torch refuses them.
    """
    given = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in options.items()
        if name not in EXECUTION_HINTS
    }
    if given.get("differentiable"):
        raise UnsupportedOptimizer(
            "differentiable=True needs the optimizer in the process that computes the gradients",
            remedy="leave differentiable out",
        )
    checked = _instance(cls, [{"params": [torch.zeros(1, 1)]}], given)
    known = {name: value for name, value in checked.defaults.items() if name not in EXECUTION_HINTS}
    return {**known, **given}


def build(spec: ModelSpec, groups: Sequence[Sequence[Tensor]], arguments: Sequence[Arguments]) -> Optimizer:
    """The torch optimizer of a model. ``groups`` holds the parameters of each group, possibly none."""
    cls = _class(spec.optimizer)
    fused = [_runs_fused(spec, number) for number in range(len(groups))]
    members = [
        {**values, **({"fused": True} if fuse else {}), "params": list(parameters)}
        for values, fuse, parameters in zip(arguments, fused, groups, strict=True)
    ]
    return _instance(cls, members, arguments[0])


def update_of(cls: type[Optimizer]) -> Callable[[Optimizer], object]:
    """``cls.step`` itself, to be called without gradients: torch's wrappers take longer than a small update.

    One of them loads torch's compiler, which takes over a second.
    """
    update: Callable[[Optimizer], object] = inspect.unwrap(cls.step)
    return update


def expected_state(
    spec: ModelSpec, arguments: Sequence[Arguments], group: int, dtype: DType, shape: tuple[int, ...]
) -> Expected:
    """What torch keeps for a parameter of this group, dtype and shape, found by one step on a very small tensor."""
    # Axis i of it has 2 + i elements, so that the axes of its state tell where they come from.
    small = torch.zeros(tuple(range(2, 2 + len(shape))), dtype=torch_dtype(dtype))
    groups: list[list[Tensor]] = [[] for _ in arguments]
    groups[group].append(small)
    optimizer = build(spec, groups, arguments)
    small.grad = torch.zeros_like(small)
    with torch.no_grad():
        update_of(type(optimizer))(optimizer)
    return {
        name: (tuple(shape[size - 2] if size > 1 else size for size in tensor.shape), tensor.dtype)
        for name, tensor in optimizer.state[small].items()
    }


def _class(name: str) -> type[Optimizer]:
    if (entry := registered_optimizer(name)) is not None:
        torch_class: type[Optimizer] = entry.torch_class
        return torch_class
    if name in REFUSED:
        raise UnsupportedOptimizer(f"{name} cannot run on shards: {REFUSED[name]}", remedy="choose another optimizer")
    supported = ELEMENTWISE | SHAPED
    found: type[Optimizer] | None = getattr(torch.optim, name.rpartition(".")[2], None) if name in supported else None
    known = sorted(n for n in supported if hasattr(torch.optim, n.rpartition(".")[2]))
    if found is None and not name.startswith("torch.optim."):
        raise UnsupportedOptimizer(
            f"optimizer '{name}' is not registered on this shard",
            expected=", ".join([*registered_names(), *known]),
            actual=name,
            remedy="install its package where ps-server runs, or name the module that registers it with --optimizers",
        )
    if found is None:
        raise UnsupportedOptimizer(
            f"optimizer '{name}' is not supported",
            expected=", ".join(known),
            actual=f"{name} with torch {torch.__version__} on the shard",
            remedy="use one of these classes itself; a subclass has to be registered (docs/optimizers.md)",
        )
    return found


def _instance(cls: type[Optimizer], groups: list[dict[str, Any]], arguments: Arguments) -> Optimizer:
    """``cls`` made with ``arguments`` as its defaults; torch's refusal becomes UnsupportedOptimizer."""
    keywords = {name: value for name, value in arguments.items() if (cls.__name__, name) not in _GROUP_ONLY}
    if registered_optimizer(name_of(cls)) is not None:
        keywords = accepted_arguments(cls, keywords)
    load_compiler_late(Optimizer)
    try:
        return cls(groups, **keywords)
    except (TypeError, ValueError, RuntimeError, IndexError) as error:
        name = cls.__name__ if registered_optimizer(name_of(cls)) is not None else f"torch.optim.{cls.__name__}"
        raise UnsupportedOptimizer(f"{name}: {error}", actual=str(arguments)) from error


def _fixed(arguments: Arguments) -> dict[str, bool]:
    """The arguments that decide which state is kept, and how."""
    return {name: bool(value) for name, value in arguments.items() if isinstance(value, bool) or name == "momentum"}


def _runs_fused(spec: ModelSpec, group: int) -> bool:
    return spec.optimizer in _FUSED and all(v.dtype in _FUSED_DTYPES for v in _parameters(spec, group))


def _parameters(spec: ModelSpec, group: int) -> Iterator[Variable]:
    return (v for v in spec.variables if v.kind is Kind.PARAMETER and v.group == group)


def _check_variable(spec: ModelSpec, variable: Variable) -> None:
    if variable.group not in range(len(spec.group_options)):
        raise InvalidRequest(
            "a parameter is in a group that does not exist",
            variable=variable.name,
            expected=f"a group below {len(spec.group_options)}",
            actual=str(variable.group),
        )
    if variable.dtype not in _FLOATING:
        raise UnsupportedOptimizer(
            "only floating-point parameters can be optimized",
            variable=variable.name,
            expected=", ".join(sorted(d.value for d in _FLOATING)),
            actual=variable.dtype.value,
            remedy="register it as a buffer",
        )
    if spec.optimizer == "torch.optim.Muon" and len(variable.shape) != 2:
        raise UnsupportedOptimizer(
            "torch.optim.Muon takes matrices only",
            variable=variable.name,
            expected="2 axes",
            actual=f"shape {variable.shape}",
            remedy="declare the other parameters as a second model with its own optimizer, such as torch.optim.AdamW",
        )
