"""Tables as a script declares them, and the tables of a model's modules."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol, Self

import torch

from ps_protocol.errors import ConfigError, InvalidRequest
from ps_protocol.model.tables import DEFAULT_BUCKETS, Eviction, RowLife, TableSpec, size_in_bytes, validate
from ps_worker.rows import Adagrad, Init, RowOptimizer, Uniform
from ps_worker.tables.row_gradients import RowGradients

INNER_MODULE = "_orig_mod"
"""What ``torch.compile`` calls the module inside the one that it makes."""

_ANY_SEED = 0


class RowBinding(Protocol):
    """The tables of one model in this process, as their modules see it."""

    @property
    def trains(self) -> bool:
        """Whether gradients of rows are pushed; else rows are only read."""
        ...

    @property
    def closed(self) -> bool:
        """Whether rows can be read no longer."""
        ...

    @property
    def gradients(self) -> Sequence[RowGradients]:
        """The gradients of each table."""
        ...


class Table:
    """A sparse table: rows of ``dim`` float32 numbers by int64 id, which shards create when an id is first used.

    Modules that are given the same table share its rows. A copy, by ``copy.deepcopy`` or pickle, has the settings
    alone. Used from the training thread.
    """

    def __init__(
        self,
        dim: int,
        *,
        name: str,
        optimizer: RowOptimizer | None = None,
        seed: int | None = None,
        init: Init | None = None,
        admit_after: int = 0,
        admit_probability: float = 0.0,
        expire_after_updates: int = 0,
        expire_after_seconds: float = 0.0,
        max_rows: int = 0,
        eviction: str = "refuse",
        memory: int | str = 0,
        buckets: int = DEFAULT_BUCKETS,
    ) -> None:
        """Declare a table. Its rows are on the shards from ``Cluster.optimizer`` or ``Cluster.follow`` on.

        Args:
            dim: Numbers of a row.
            name: Name of the table in its model.
            optimizer: Row optimizer. None: ``rows.Adagrad()``.
            seed: Seed of the first values. None: the seed of the job.
            init: Distribution of the first values. None: uniform in ±1/sqrt(dim).
            admit_after: Use at which an id gets a row; a use is a step with a gradient for it.
            admit_probability: Probability with which an id gets a row at each use.
            expire_after_updates: Remove rows that were not used in so many updates of the table. 0: never.
            expire_after_seconds: Remove rows that were not used for so long. 0: never.
            max_rows: Most rows of the table. 0: no limit.
            eviction: What a full table does with a new row: "refuse" it, or evict the least recently ("lru") or least
                frequently ("lfu") used one.
            memory: Memory of the table on all shards together, in bytes or as "4GB": the rows that were not used lately
                are on the disks of the shards. 0: all are in memory, unless ``ps-server --table-memory`` limits them.
            buckets: Number of parts in which rows are placed on shards and moved.

        Raises:
            InvalidRequest: A setting is out of its range.
            UnsupportedOptimizer: No shard has such a row optimizer.
            ConfigError: Unknown ``eviction``.
        """
        self.name = name
        self.optimizer = Adagrad() if optimizer is None else optimizer
        self.seed = seed
        bound = 1 / math.sqrt(max(1, dim))
        self.init = Uniform(-bound, bound) if init is None else init
        self._spec = TableSpec(
            name=name,
            dim=dim,
            seed=_ANY_SEED if seed is None else seed,
            init=self.init.init(),
            optimizer=self.optimizer.kind,
            options=self.optimizer.options(),
            life=RowLife(
                admit_after,
                admit_probability,
                expire_after_updates,
                expire_after_seconds,
                max_rows,
                _eviction(eviction),
                size_in_bytes(memory),
            ),
            buckets=buckets,
        )
        validate(self._spec)
        #: First values of the rows 0, 1, …, float32 [n, dim]: set for a converted embedding.
        self.initial: torch.Tensor | None = None
        #: The tables of its model, and its number among them.
        self.bound: tuple[RowBinding, int] | None = None

    @property
    def dim(self) -> int:
        """Numbers of a row."""
        return self._spec.dim

    def spec(self, seed: int) -> TableSpec:
        """Return the declaration of the table.

        Args:
            seed: Seed of the job, for a table without its own.
        """
        given = {field.name: getattr(self._spec, field.name) for field in fields(TableSpec)}
        return TableSpec(**{**given, "seed": seed if self.seed is None else self.seed})

    def __repr__(self) -> str:
        return f"Table({self.dim}, name={self.name!r}, optimizer={self.optimizer!r})"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "bound": None}


def _eviction(value: str) -> Eviction:
    try:
        return Eviction(value)
    except ValueError:
        expected = ", ".join(repr(member.value) for member in Eviction)
        raise ConfigError("unknown value for eviction", expected=expected, actual=repr(value)) from None


class NoTensorError(InvalidRequest, AttributeError):
    """A table has no tensor with all its rows; ``hasattr`` returns False."""


class TableModule(torch.nn.Module):
    """A module whose rows are in tables. ``tables`` are its own, in the order of its features.

    Its parameters are the rows with a gradient since the last step, so that ``clip_grad_norm_(model.parameters(), …)``
    finds them. They are in no ``state_dict``, and do not move to a device with the module.
    """

    tables: tuple[Table, ...]
    #: The number of rows of a converted embedding; not set for others.
    num_embeddings: int

    @property  # type: ignore[override]
    def _parameters(self) -> dict[str, torch.Tensor | None]:
        own: dict[str, torch.Tensor | None] = self.__dict__["_parameters"]
        rows = {
            f"rows_of_{table.name}": tensor
            for table in self.__dict__.get("tables", ())
            if table.bound is not None and not table.bound[0].closed
            for tensor in table.bound[0].gradients[table.bound[1]].tensors
        }
        return {**own, **rows} if rows else own

    @_parameters.setter
    def _parameters(self, value: dict[str, torch.Tensor | None]) -> None:
        self.__dict__["_parameters"] = value

    def _save_to_state_dict(self, *arguments: Any, **named: Any) -> None:
        """Does nothing: rows are in checkpoints of the job."""

    def _load_from_state_dict(self, *arguments: Any, **named: Any) -> None:
        """Does nothing, for the same reason."""

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        """Does nothing: rows come to the device of the ids."""
        return self

    def __getattr__(self, name: str) -> Any:
        if name == "weight":
            raise NoTensorError(
                "a table has no weight: its rows are on the shards",
                variable=", ".join(table.name for table in self.tables),
                remedy="call the module with the ids whose rows are wanted, or export a checkpoint: psctl export",
            )
        if name in ("num_embeddings", "embedding_dim"):
            raise NoTensorError(
                f"this module has no {name}: "
                + ("a table takes any id" if name == "num_embeddings" else "its tables have a dim each"),
                variable=", ".join(table.name for table in self.tables),
                remedy="leave it out" if name == "num_embeddings" else "use table.dim",
            )
        return super().__getattr__(name)


@dataclass(frozen=True, slots=True)
class DeclaredTables:
    """The tables of one model: the declarations, and the table objects of the script for each."""

    specs: tuple[TableSpec, ...] = ()
    tables: tuple[tuple[Table, ...], ...] = ()
    modules: tuple[TableModule, ...] = ()

    def initial_rows(self) -> dict[int, torch.Tensor]:
        """Return the first values of tables that have some, by number of the table."""
        firsts = enumerate(next((t.initial for t in tables if t.initial is not None), None) for tables in self.tables)
        return {number: initial for number, initial in firsts if initial is not None}

    def forget_initial_rows(self) -> None:
        """Drop the first values: the shards have them."""
        for tables in self.tables:
            for table in tables:
                table.initial = None


NO_TABLES = DeclaredTables()


def declared(modules: Iterable[torch.nn.Module], seed: Callable[[], int]) -> DeclaredTables:
    """Return the tables that ``modules`` use, in the order found; ``seed()`` is the seed of the job.

    Raises InvalidRequest when two of one name have different settings.
    """
    specs: dict[str, TableSpec] = {}
    found: dict[str, dict[int, Table]] = {}
    users = [module for module in modules if isinstance(module, TableModule)]
    for module in users:
        for table in module.tables:
            spec = table.spec(seed())
            _check_same(specs.setdefault(table.name, spec), spec)
            found.setdefault(table.name, {})[id(table)] = table
    return DeclaredTables(
        tuple(specs.values()), tuple(tuple(tables.values()) for tables in found.values()), tuple(users)
    )


def _check_same(first: TableSpec, second: TableSpec) -> None:
    different = [f.name for f in fields(TableSpec) if getattr(first, f.name) != getattr(second, f.name)]
    if different:
        raise InvalidRequest(
            f"table '{first.name}' is declared twice with other settings: {', '.join(different)}",
            variable=first.name,
            expected=", ".join(f"{name}={getattr(first, name)}" for name in different),
            actual=", ".join(f"{name}={getattr(second, name)}" for name in different),
            remedy="give one table object to both modules, or each a name of its own",
        )


def modules_in(given: Iterable[object]) -> list[torch.nn.Module]:
    """Return every module in the argument ``tables`` of an optimizer. Raises InvalidRequest for other objects."""
    modules: list[torch.nn.Module] = []
    for each in given:
        if not isinstance(each, torch.nn.Module):
            raise InvalidRequest(
                "tables= takes modules, as cluster.embedding(...) and the like make them", actual=type(each).__name__
            )
        modules += each.modules()
    return modules


def table_differences(theirs: Sequence[TableSpec], own: Sequence[TableSpec]) -> list[str]:
    """Return, as text, the differences because of which ``own`` tables cannot read the declared ones, ``theirs``."""
    dims = {spec.name: spec.dim for spec in own}
    differences = [f"table '{spec.name}' is missing here" for spec in theirs if spec.name not in dims]
    differences += [
        f"table '{spec.name}' has dim {dims[spec.name]} instead of {spec.dim}"
        for spec in theirs
        if dims.get(spec.name, spec.dim) != spec.dim
    ]
    known = {spec.name for spec in theirs}
    return differences + [f"table '{name}' is not in the declared model" for name in dims if name not in known]


def matched(own: DeclaredTables, theirs: Sequence[TableSpec]) -> DeclaredTables:
    """Return ``own`` tables in the order of the declared ones, ``theirs``, which have the same names."""
    by_name = {spec.name: tables for spec, tables in zip(own.specs, own.tables, strict=True)}
    return DeclaredTables(tuple(theirs), tuple(by_name[spec.name] for spec in theirs), own.modules)


def plain_name(name: str) -> str:
    """``name``, of a parameter, buffer or module, as it is without ``torch.compile`` around any of its modules."""
    return ".".join(part for part in name.split(".") if part != INNER_MODULE) if INNER_MODULE in name else name
