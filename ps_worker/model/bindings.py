"""Maps the user's tensors to the variables of the cluster."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch

from ps_protocol.errors import InvalidRequest
from ps_protocol.model.spec import DType, Kind, Variable
from ps_worker.model.plain import check_plain
from ps_worker.tables.table import plain_name

#: What ``cluster.optimizer`` takes: a module, or parameters in any form torch.optim takes.
Source = torch.nn.Module | Iterable[Any]

_LOCAL = 'pass buffers="local" to cluster.optimizer: each worker then keeps its own buffers'

_GRADIENT_DTYPES = (DType.FLOAT32, DType.FLOAT64, DType.FLOAT16, DType.BFLOAT16)


@dataclass(frozen=True, slots=True)
class BufferRef:
    """A buffer by its module and key, since modules may replace the tensor."""

    owner: torch.nn.Module
    key: str

    @property
    def value(self) -> torch.Tensor:
        """The tensor the module holds now."""
        tensor = getattr(self.owner, self.key)
        if not isinstance(tensor, torch.Tensor):
            raise InvalidRequest("a buffer is not a tensor any more", variable=self.key, actual=type(tensor).__name__)
        return tensor


@dataclass(frozen=True, slots=True)
class Bindings:
    """Variables and the user's tensors behind them: first the parameters, then the buffers."""

    variables: tuple[Variable, ...]
    parameters: tuple[torch.Tensor, ...]
    buffers: tuple[BufferRef, ...]

    @property
    def devices(self) -> list[torch.device]:
        """The device of each variable, in the order of ``variables``."""
        return [p.device for p in self.parameters] + [reference.value.device for reference in self.buffers]

    def buffer_values(self) -> list[torch.Tensor]:
        """The buffers as their modules have them now. Raises InvalidRequest for one whose shape has changed."""
        declared = self.variables[len(self.parameters) :]
        values = [reference.value for reference in self.buffers]
        for variable, value in zip(declared, values, strict=True):
            if value.shape != variable.shape:
                raise InvalidRequest(
                    f"the buffer '{variable.name}' has another shape than when the model was declared",
                    variable=variable.name,
                    expected=str(variable.shape),
                    actual=str(tuple(value.shape)),
                    remedy=f"give it its last shape before cluster.optimizer(...), or {_LOCAL}",
                )
        return values


@dataclass(frozen=True, slots=True)
class ParameterGroup:
    """One parameter group as the user gave it: named parameters and own options."""

    names: tuple[str, ...]
    parameters: tuple[torch.Tensor, ...]
    options: Mapping[str, Any]
    #: The user named the parameters (torch then keeps the names in the group).
    named: bool


def read_groups(source: Source, *, may_be_empty: bool = False) -> list[ParameterGroup]:
    """The parameter groups in ``source``, one at least. Raises InvalidRequest when it holds no tensors.

    Also raises it when there is no parameter, unless ``may_be_empty``.
    """
    if isinstance(source, torch.nn.Module):
        pairs = list(source.named_parameters())
        groups = [ParameterGroup(tuple(n for n, _ in pairs), tuple(p for _, p in pairs), {}, False)] if pairs else []
    elif isinstance(source, torch.Tensor):
        raise InvalidRequest("one tensor is not a list of parameters", remedy="give [tensor]")
    else:
        items = list(source)
        given = items if items and isinstance(items[0], Mapping) else [{"params": items}] if items else []
        groups, count = [], 0
        for item in given:
            groups.append(_read_group(item, count))
            count += len(groups[-1].parameters)
    if not may_be_empty and not any(group.parameters for group in groups):
        raise InvalidRequest("the model has no parameters", remedy="give a module or list that holds at least one")
    return groups or [ParameterGroup((), (), {}, False)]


def _read_group(given: Any, first: int) -> ParameterGroup:
    if not isinstance(given, Mapping) or "params" not in given:
        raise InvalidRequest(
            "a parameter group is not a dict with 'params'",
            actual=type(given).__name__,
            remedy="give parameters, (name, parameter) pairs, or dicts as torch.optim takes them, not a mixture",
        )
    params = given["params"]
    items = [params] if isinstance(params, torch.Tensor) else list(params)
    named = [isinstance(item, tuple) for item in items]
    if any(named) and not all(named):
        raise InvalidRequest("some parameters of a group have names and some have not", remedy="name all or none")
    tensors = [item[1] if isinstance(item, tuple) else item for item in items]
    names = [str(item[0]) if isinstance(item, tuple) else f"param_{first + i}" for i, item in enumerate(items)]
    for name, tensor in zip(names, tensors, strict=True):
        if not isinstance(tensor, torch.Tensor):
            raise InvalidRequest("a parameter is not a tensor", variable=name, actual=type(tensor).__name__)
    options = {key: value for key, value in given.items() if key != "params"}
    return ParameterGroup(tuple(names), tuple(tensors), options, any(named))


def named_as_in(module: torch.nn.Module, groups: Iterable[ParameterGroup]) -> list[ParameterGroup]:
    """``groups`` with the names that ``module`` has for its parameters, where the user gave none."""
    known = {id(parameter): name for name, parameter in module.named_parameters()}
    return [
        group
        if group.named
        else replace(
            group,
            names=tuple(known.get(id(p), name) for name, p in zip(group.names, group.parameters, strict=True)),
        )
        for group in groups
    ]


def check_free(bindings: Bindings, held: Mapping[int, str]) -> None:
    """Raises InvalidRequest for a parameter of another optimizer; ``held``: the model's name by ``id(parameter)``."""
    for variable, parameter in zip(bindings.variables, bindings.parameters, strict=False):
        if id(parameter) in held:
            raise InvalidRequest(
                f"the parameter '{variable.name}' belongs to the optimizer of model '{held[id(parameter)]}' already",
                variable=variable.name,
                expected="each parameter in one optimizer",
                remedy="use one cluster.optimizer(...) with parameter groups, give each its own parameters, "
                "or close() the first one",
            )


def bind(groups: list[ParameterGroup], module: torch.nn.Module | None = None, without: Container[str] = ()) -> Bindings:
    """Check and name every tensor; with ``module``, also its persistent buffers except those in ``without``.

    Raises InvalidRequest. Names are the same whether or not modules are compiled.
    """
    variables: list[Variable] = []
    parameters: list[torch.Tensor] = []
    for number, group in enumerate(groups):
        for name, tensor in zip(group.names, group.parameters, strict=True):
            variables.append(_parameter(plain_name(name), tensor, number))
            parameters.append(tensor)
    _check_together([v.name for v in variables], parameters)
    references = []
    for name, reference in persistent_buffers(module) if module is not None else ():
        if name in without:
            continue
        variables.append(_buffer(name, reference.value))
        references.append(reference)
    return Bindings(tuple(variables), tuple(parameters), tuple(references))


def _buffer(name: str, value: torch.Tensor) -> Variable:
    check_plain(name, value, otherwise=_LOCAL)
    short = str(value.dtype).removeprefix("torch.")
    dtype = next((known for known in DType if known.value == short), None)
    if dtype is None:
        raise InvalidRequest(
            f"the buffer '{name}' is of a dtype that shards cannot hold",
            variable=name,
            expected=", ".join(known.value for known in DType),
            actual=short,
            remedy=_LOCAL,
        )
    if value.layout is not torch.strided or value.device.type == "meta":
        actual = "the meta device" if value.device.type == "meta" else str(value.layout)
        raise InvalidRequest(
            f"the buffer '{name}' has no dense values",
            variable=name,
            expected="a dense tensor",
            actual=actual,
            remedy=_LOCAL,
        )
    return Variable(name, tuple(value.shape), dtype, Kind.BUFFER)


def _parameter(name: str, tensor: torch.Tensor, group: int) -> Variable:
    if torch.nn.parameter.is_lazy(tensor):
        raise InvalidRequest("a lazy parameter has no shape yet", variable=name, remedy="run the model once first")
    check_plain(name, tensor)
    if tensor.layout is not torch.strided:
        raise InvalidRequest("sparse parameters are not supported", variable=name, actual=str(tensor.layout))
    short = str(tensor.dtype).removeprefix("torch.")
    dtype = next((known for known in _GRADIENT_DTYPES if known.value == short), None)
    if dtype is None:
        raise InvalidRequest(
            "a parameter must be of a floating-point dtype",
            variable=name,
            expected=", ".join(d.value for d in _GRADIENT_DTYPES),
            actual=short,
            remedy="give a complex parameter as two real ones (torch.view_as_real)"
            if tensor.is_complex()
            else "register tensors that get no gradient as buffers",
        )
    if tensor.device.type == "meta":
        raise InvalidRequest("a parameter on the meta device has no values", variable=name, remedy="materialise it")
    if not tensor.is_leaf:
        raise InvalidRequest("a parameter is the result of a computation", variable=name, expected="a leaf tensor")
    if not _is_dense(tensor):
        raise InvalidRequest(
            "a parameter is not dense: its memory has gaps, or elements share a place",
            variable=name,
            actual=f"shape {tuple(tensor.shape)}, strides {tensor.stride()}",
            remedy="give it contiguous memory first: p.data = p.data.contiguous()",
        )
    return Variable(name, tuple(tensor.shape), dtype, Kind.PARAMETER, group)


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether its elements fill its memory without gaps or overlaps, in any order of the axes."""
    if not tensor.numel():
        return True
    filled = 1
    for stride, size in sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride != filled:
            return False
        filled *= size
    return True


def _check_together(names: list[str], parameters: list[torch.Tensor]) -> None:
    """No name twice, no memory twice."""
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise InvalidRequest("two parameters have the same name", variable=name)
        seen.add(name)
    spans = sorted(
        (str(p.device), p.data_ptr(), p.data_ptr() + p.nbytes, i) for i, p in enumerate(parameters) if p.nbytes
    )
    for (one, _, end, first), (other, begin, _, second) in pairwise(spans):
        if one == other and begin < end:
            raise InvalidRequest(
                f"two parameters share memory; the other is '{names[first]}'",
                variable=names[second],
                remedy="tie layers by sharing the Parameter itself, and list it once",
            )


def persistent_buffers(module: torch.nn.Module) -> Iterable[tuple[str, BufferRef]]:
    """Buffers that are in ``state_dict``; one that is shared is listed once."""
    seen: set[int] = set()
    for path, owner in module.named_modules():
        for key, value in owner._buffers.items():
            if value is None or key in owner._non_persistent_buffers_set or id(value) in seen:
                continue
            seen.add(id(value))
            yield plain_name(f"{path}.{key}" if path else key), BufferRef(owner, key)
