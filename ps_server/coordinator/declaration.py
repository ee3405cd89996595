"""Decides whether a declared model can be placed, and in what two declarations of one model differ."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import islice

from ps_protocol.errors import InvalidRequest, ModelMismatch
from ps_protocol.model import Kind, ModelSpec, Variable

#: An error stays readable, and small enough for gRPC's trailers.
_SHOWN_DIFFERENCES = 20


def check_model(spec: ModelSpec) -> None:
    """Raises InvalidRequest for a model that no shard could hold, naming the variable."""
    if not spec.name:
        raise InvalidRequest("a model needs a name")
    if not any(v.kind is Kind.PARAMETER for v in spec.variables):
        raise InvalidRequest(
            f"model '{spec.name}' has no parameters", remedy="declare a model with at least one trainable parameter"
        )
    if twice := [name for name, count in Counter(v.name for v in spec.variables).items() if count > 1]:
        raise InvalidRequest(f"model '{spec.name}' names a variable twice", variable=twice[0])
    for v in spec.variables:
        if any(size < 0 for size in v.shape):
            raise InvalidRequest("a shape is negative", variable=v.name, actual=str(v.shape))
        if v.kind is Kind.PARAMETER and v.group >= len(spec.group_options):
            raise InvalidRequest(
                "a variable is in a parameter group that does not exist",
                variable=v.name,
                expected=f"below {len(spec.group_options)}",
                actual=str(v.group),
            )


def check_same(first: ModelSpec, later: ModelSpec, who: str) -> None:
    """Raises one ModelMismatch that lists every difference when ``later``, declared by ``who``, is not ``first``."""
    differences = list(_differences(first, later))
    if not differences:
        return
    shown = list(islice(differences, _SHOWN_DIFFERENCES))
    if len(differences) > len(shown):
        shown.append(f"and {len(differences) - len(shown)} more")
    count = f"{len(differences)} difference{'s' if len(differences) > 1 else ''}"
    raise ModelMismatch(
        f"{who} declared model '{first.name}' otherwise than the first worker did, {count}:\n  " + "\n  ".join(shown),
        remedy="run the same script with the same arguments on every worker, or give the models different names",
    )


def _differences(first: ModelSpec, later: ModelSpec) -> Iterator[str]:
    if first.optimizer != later.optimizer:
        yield f"optimizer: {later.optimizer} instead of {first.optimizer}"
    before, after = ({v.name: v for v in spec.variables} for spec in (first, later))
    for name in before.keys() - after.keys():
        yield f"variable '{name}' is missing"
    for name in after.keys() - before.keys():
        yield f"variable '{name}' is extra"
    for name, v in before.items():
        if name in after:
            yield from _variable_differences(v, after[name])
    common = [v.name for v in first.variables if v.name in after]
    if common != [v.name for v in later.variables if v.name in before]:
        yield "the variables are in another order"
    yield from _option_differences(first, later)
    for attribute, name in (("nonfinite", "non-finite policy"), ("buffers", "buffer policy")):
        ours, theirs = getattr(first, attribute).value, getattr(later, attribute).value
        if ours != theirs:
            yield f"{name}: {theirs} instead of {ours}"
    if first.unsplit != later.unsplit:
        yield f"unsplit: {later.unsplit} instead of {first.unsplit}"


def _variable_differences(before: Variable, after: Variable) -> Iterator[str]:
    for what, ours, theirs in (
        ("shape", before.shape, after.shape),
        ("dtype", before.dtype.value, after.dtype.value),
        ("kind", before.kind.value, after.kind.value),
        ("parameter group", before.group, after.group),
    ):
        if ours != theirs:
            yield f"variable '{before.name}': {what} {theirs} instead of {ours}"


def _option_differences(first: ModelSpec, later: ModelSpec) -> Iterator[str]:
    if len(first.group_options) != len(later.group_options):
        yield f"parameter groups: {len(later.group_options)} instead of {len(first.group_options)}"
    missing = object()
    for group, (before, after) in enumerate(zip(first.group_options, later.group_options, strict=False)):
        for key in sorted({*before, *after}):
            ours, theirs = before.get(key, missing), after.get(key, missing)
            if ours != theirs:
                shown = ("absent" if value is missing else repr(value) for value in (theirs, ours))
                yield f"parameter group {group}: {key} {' instead of '.join(shown)}"
