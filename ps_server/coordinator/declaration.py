"""Decides whether a declared model can be placed, and in what two declarations of one model differ."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict

from ps_protocol.errors import InvalidRequest
from ps_protocol.model import Kind, ModelSpec, Option, Variable
from ps_protocol.option_ranges import require_in_range
from ps_protocol.tables import RowLife, TableSpec, validate
from ps_server.model_differences import in_structure, raise_differences


def check_model(spec: ModelSpec) -> None:
    """Raises what ``validate`` and ``require_in_range`` do, InvalidRequest for a model that no shard could hold."""
    if not spec.name:
        raise InvalidRequest("a model needs a name")
    if not spec.tables and not any(v.kind is Kind.PARAMETER for v in spec.variables):
        raise InvalidRequest(
            f"model '{spec.name}' has no parameters",
            remedy="declare a model with at least one trainable parameter or one table",
        )
    names = Counter([v.name for v in spec.variables] + [table.name for table in spec.tables])
    if twice := [name for name, count in names.items() if count > 1]:
        raise InvalidRequest(
            f"model '{spec.name}' has this name twice",
            variable=twice[0],
            remedy="give each variable and table a name of its own: cluster.embedding(…, name=…)",
        )
    for table in spec.tables:
        validate(table)
    require_in_range(spec, spec.group_options)
    for v in spec.variables:
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
            *_in_order("variables", first.variables, later.variables),
            *_in_order("tables", first.tables, later.tables),
            *_in_group_options(first, later),
            *_in_tables(first, later),
            *_in_policies(first, later),
        ],
        "run the same script with the same arguments on every worker, or give the models different names",
    )


def _in_order(what: str, first: Sequence[Variable | TableSpec], later: Sequence[Variable | TableSpec]) -> Iterator[str]:
    before, after = ({each.name: None for each in named} for named in (first, later))
    if [name for name in before if name in after] != [name for name in after if name in before]:
        yield f"the {what} are in another order"


def _in_policies(first: ModelSpec, later: ModelSpec) -> Iterator[str]:
    for attribute, name in (("nonfinite", "non-finite policy"), ("buffers", "buffer policy")):
        ours, theirs = getattr(first, attribute).value, getattr(later, attribute).value
        if ours != theirs:
            yield f"{name}: {theirs} instead of {ours}"


def _in_group_options(first: ModelSpec, later: ModelSpec) -> Iterator[str]:
    for group, (before, after) in enumerate(zip(first.group_options, later.group_options, strict=False)):
        yield from _in_options(f"parameter group {group}", before, after)


def _in_tables(first: ModelSpec, later: ModelSpec) -> Iterator[str]:
    """What two declarations of a table may not differ in, beside its structure."""
    declared = {table.name: table for table in later.tables}
    for before in first.tables:
        if after := declared.get(before.name):
            yield from _in_options(f"table '{before.name}'", before.options, after.options)
            yield from _in_options(f"table '{before.name}'", _life_options(before.life), _life_options(after.life))


def _life_options(life: RowLife) -> dict[str, Option]:
    return asdict(life) | {"eviction": life.eviction.value}


def _in_options(where: str, before: Mapping[str, Option], after: Mapping[str, Option]) -> Iterator[str]:
    missing = object()
    for key in sorted({*before, *after}):
        ours, theirs = before.get(key, missing), after.get(key, missing)
        if ours != theirs:
            shown = ("absent" if value is missing else repr(value) for value in (theirs, ours))
            yield f"{where}: {key} {' instead of '.join(shown)}"
