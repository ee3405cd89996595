"""Checks whether a declared model can be placed, and compares two declarations of one model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ps_protocol.errors import InvalidRequest, NotReady
from ps_protocol.model.option_ranges import require_fitting_rule, require_in_range
from ps_protocol.model.spec import Kind, ModelSpec, Option, ShardMap, Variable
from ps_protocol.model.tables import TableSpec, validate
from ps_protocol.records import to_plain
from ps_server.coordinator.placement.job_limits import check_limits, check_shapes
from ps_server.coordinator.placement.variables import PartitionRule, first_map, most_slices
from ps_server.limits import JobLimits
from ps_server.model_differences import in_policies, in_structure, raise_differences


@dataclass(frozen=True, slots=True)
class PlacementPlan:
    """The values needed to place or compare a declared model, usable in any thread."""

    spec: ModelSpec
    #: The worker that declares it, as text.
    who: str
    #: The shard map of an existing model of this name.
    known: ShardMap | None
    #: The shards for a new model, and the missing ones among them.
    shards: tuple[int, ...]
    missing: tuple[int, ...]
    #: The maps of all models.
    placed: tuple[ShardMap, ...]
    rule: PartitionRule
    limits: JobLimits
    #: Places a new model whose values come from a checkpoint.
    as_saved: Callable[[ShardMap], ShardMap] | None
    #: The last epoch of a released model of this name; 0: none.
    released: int = 0

    def make(self) -> ShardMap:
        """Make the shard map. Raises ModelMismatch if the model differs from the known one, the errors of
        ``check_limits`` and ``check_model``, and NotReady while shards are missing.
        """
        check_shapes(self.spec, self.limits)
        if self.known is not None:
            check_same(self.known.spec, self.spec, self.who)
            return self.known
        check_limits(self.spec, most_slices(self.spec, len(self.shards), self.rule), self.placed, self.limits)
        check_model(self.spec)
        check_present(self.spec, self.shards, self.missing)
        shard_map = first_map(self.spec, self.shards, self.rule)
        if self.released:
            # The checkpoint has a different model of this name.
            return replace(shard_map, epoch=self.released + 1)
        return self.as_saved(shard_map) if self.as_saved else shard_map


def check_present(spec: ModelSpec, shards: Sequence[int], missing: Sequence[int]) -> None:
    """Raises NotReady when some of ``shards`` are ``missing``."""
    if missing:
        raise NotReady(
            f"model '{spec.name}' cannot be placed yet: {len(missing)} of {len(shards)} shards are missing",
            shard=", ".join(map(str, missing)),
            remedy="start the missing shards; the worker tries again",
        )


def check_model(spec: ModelSpec) -> None:
    """Raises the errors of ``validate`` and ``require_in_range``, and InvalidRequest for a model that cannot be
    placed.
    """
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
    require_fitting_rule(spec.optimizer, spec.stale)
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
        f"{who} declared model '{first.name}' differently from the first worker",
        [
            *in_structure(first, later),
            *_in_order("variables", first.variables, later.variables),
            *_in_order("tables", first.tables, later.tables),
            *_in_group_options(first, later),
            *_in_tables(first, later),
            *in_policies(first, later),
        ],
        "run the same script with the same arguments on every worker, or give the models different names",
    )


def _in_order(what: str, first: Sequence[Variable | TableSpec], later: Sequence[Variable | TableSpec]) -> Iterator[str]:
    before, after = ({each.name: None for each in named} for named in (first, later))
    if [name for name in before if name in after] != [name for name in after if name in before]:
        yield f"the {what} are in another order"


def _in_group_options(first: ModelSpec, later: ModelSpec) -> Iterator[str]:
    for group, (before, after) in enumerate(zip(first.group_options, later.group_options, strict=False)):
        yield from _in_options(f"parameter group {group}", before, after)


def _in_tables(first: ModelSpec, later: ModelSpec) -> Iterator[str]:
    """Differences of two declarations of a table, besides its structure."""
    declared = {table.name: table for table in later.tables}
    for before in first.tables:
        if after := declared.get(before.name):
            yield from _in_options(f"table '{before.name}'", before.options, after.options)
            yield from _in_options(f"table '{before.name}'", to_plain(before.life), to_plain(after.life))


def _in_options(where: str, before: Mapping[str, Option], after: Mapping[str, Option]) -> Iterator[str]:
    missing = object()
    for key in sorted({*before, *after}):
        ours, theirs = before.get(key, missing), after.get(key, missing)
        if ours != theirs:
            shown = ("absent" if value is missing else repr(value) for value in (theirs, ours))
            yield f"{where}: {key} {' instead of '.join(shown)}"
