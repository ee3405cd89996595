"""In what two forms of one model differ, in words: as declared twice, as saved and declared, as kept and placed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from ps_protocol.errors import ModelMismatch
from ps_protocol.model.spec import ModelSpec, Variable
from ps_protocol.model.tables import RowInit, TableSpec

N = TypeVar("N", Variable, TableSpec)

#: An error stays readable, and small enough for gRPC's trailers.
_SHOWN = 20


def raise_differences(message: str, differences: Iterable[str], remedy: str) -> None:
    """Raises one ModelMismatch that begins with ``message`` and lists ``differences``, if there are any."""
    found = list(differences)
    if not found:
        return
    shown = found[:_SHOWN]
    if len(found) > len(shown):
        shown.append(f"and {len(found) - len(shown)} more")
    count = f"{len(found)} difference{'s' if len(found) > 1 else ''}"
    raise ModelMismatch(f"{message}, {count}:\n  " + "\n  ".join(shown), remedy=remedy)


def in_structure(first: ModelSpec, later: ModelSpec) -> Iterator[str]:
    """What ``later`` has otherwise than ``first`` that parameters, rows and optimizer state depend on."""
    if first.optimizer != later.optimizer:
        yield f"optimizer: {later.optimizer} instead of {first.optimizer}"
    if first.unsplit != later.unsplit:
        yield f"unsplit: {later.unsplit} instead of {first.unsplit}"
    yield from _by_name("variable", first.variables, later.variables, _in_variable)
    yield from _by_name("table", first.tables, later.tables, _in_table)
    if len(first.group_options) != len(later.group_options):
        yield f"parameter groups: {len(later.group_options)} instead of {len(first.group_options)}"


def in_policies(first: ModelSpec, later: ModelSpec) -> Iterator[str]:
    """What shards do otherwise with pushes of ``later`` than with those of ``first``."""
    for attribute, name in (("nonfinite", "non-finite policy"), ("buffers", "buffer policy")):
        ours, theirs = getattr(first, attribute).value, getattr(later, attribute).value
        if ours != theirs:
            yield f"{name}: {theirs} instead of {ours}"
    if first.clip_grad_norm != later.clip_grad_norm:
        yield f"clip_grad_norm: {later.clip_grad_norm or None} instead of {first.clip_grad_norm or None}"
    if first.stale != later.stale:
        yield f"stale: {later.stale or 'as the mode'} instead of {first.stale or 'as the mode'}"


def _by_name(
    kind: str, first: Iterable[N], later: Iterable[N], differences: Callable[[N, N], Iterable[str]]
) -> Iterator[str]:
    before, after = ({each.name: each for each in spec} for spec in (first, later))
    for name, each in before.items():
        if name in after:
            yield from differences(each, after[name])
        else:
            yield f"{kind} '{name}' is missing"
    for name in after:
        if name not in before:
            yield f"{kind} '{name}' is extra"


def _in_variable(before: Variable, after: Variable) -> Iterator[str]:
    for what, ours, theirs in (
        ("shape", before.shape, after.shape),
        ("dtype", before.dtype.value, after.dtype.value),
        ("kind", before.kind.value, after.kind.value),
        ("parameter group", before.group, after.group),
    ):
        if ours != theirs:
            yield f"variable '{before.name}': {what} {theirs} instead of {ours}"


def _in_table(before: TableSpec, after: TableSpec) -> Iterator[str]:
    for what, ours, theirs in (
        ("dim", before.dim, after.dim),
        ("buckets", before.buckets, after.buckets),
        ("seed", before.seed, after.seed),
        ("init", _init_text(before.init), _init_text(after.init)),
        ("optimizer", before.optimizer, after.optimizer),
    ):
        if ours != theirs:
            yield f"table '{before.name}': {what} {theirs} instead of {ours}"


def _init_text(init: RowInit) -> str:
    numbers = [init.low] if init.kind == "constant" else [init.low, init.high]
    return f"{init.kind}({', '.join(f'{number!r}' for number in numbers)})"
