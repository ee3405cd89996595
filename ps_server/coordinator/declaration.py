"""Decides whether a declared model can be placed, and in what two declarations of one model differ."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from ps_protocol.errors import InvalidRequest
from ps_protocol.model import Kind, ModelSpec
from ps_server.model_differences import in_structure, raise_differences


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
    raise_differences(
        f"{who} declared model '{first.name}' otherwise than the first worker did",
        [
            *in_structure(first, later),
            *_in_order(first, later),
            *_in_options(first, later),
            *_in_policies(first, later),
        ],
        "run the same script with the same arguments on every worker, or give the models different names",
    )


def _in_order(first: ModelSpec, later: ModelSpec) -> Iterator[str]:
    before, after = ([v.name for v in spec.variables] for spec in (first, later))
    if [name for name in before if name in after] != [name for name in after if name in before]:
        yield "the variables are in another order"


def _in_policies(first: ModelSpec, later: ModelSpec) -> Iterator[str]:
    for attribute, name in (("nonfinite", "non-finite policy"), ("buffers", "buffer policy")):
        ours, theirs = getattr(first, attribute).value, getattr(later, attribute).value
        if ours != theirs:
            yield f"{name}: {theirs} instead of {ours}"


def _in_options(first: ModelSpec, later: ModelSpec) -> Iterator[str]:
    missing = object()
    for group, (before, after) in enumerate(zip(first.group_options, later.group_options, strict=False)):
        for key in sorted({*before, *after}):
            ours, theirs = before.get(key, missing), after.get(key, missing)
            if ours != theirs:
                shown = ("absent" if value is missing else repr(value) for value in (theirs, ours))
                yield f"parameter group {group}: {key} {' instead of '.join(shown)}"
