"""The tables of one model in this process: the source of their rows, and their gradients."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from ps_protocol.errors import InvalidRequest
from ps_worker.tables.batch import DistinctIds, RowRequest, distinct
from ps_worker.tables.lookup import Lookup, Position, RequestedRows
from ps_worker.tables.row_gradients import RowGradients
from ps_worker.tables.row_payloads import RowUpdate
from ps_worker.tables.table import DeclaredTables, Table


class RowSource(Protocol):
    """Gets rows from the shards. Called by the training thread."""

    @property
    def next_position(self) -> Position:
        """Position of the next push."""
        ...

    def look_up(self, lookup: Lookup) -> None:
        """Request the rows; they may arrive later."""
        ...

    def finish(self, lookup: Lookup) -> None:
        """Wait until the rows are in memory. Raises PsError."""
        ...


@dataclass(slots=True, eq=False)
class PreparedRows:
    """Rows that were requested for a forward pass."""

    request: RowRequest
    versions: tuple[int, ...]
    distinct: DistinctIds
    #: float32 [rows, dim]; its rows come with ``lookup``.
    values: torch.Tensor
    lookup: Lookup

    def is_of(self, request: RowRequest) -> bool:
        """Whether it was requested for the same tensors, and these were not written since."""
        own = self.request
        return (
            own.table.name == request.table.name
            and own.padding_id == request.padding_id
            and len(own.ids) == len(request.ids)
            and all(mine is theirs for mine, theirs in zip(own.ids, request.ids, strict=True))
            and self.versions == request.versions()
        )


class TableBinding:
    """The tables of one model in this process. An optimizer makes it and pushes the gradients of rows; an evaluator
    only reads.

    Used by the training thread; gradients arrive in the threads of backward.
    """

    def __init__(self, declared: DeclaredTables, source: Callable[[], RowSource], *, trains: bool) -> None:
        """``source()`` is called at each lookup. Raises InvalidRequest when a table belongs to another model."""
        self.specs = declared.specs
        self.modules = declared.modules
        self.trains = trains
        self._source = source
        self._forwards = itertools.count()
        self._ready: list[PreparedRows] = []
        self.gradients = [RowGradients(number) for number in range(len(declared.specs))]
        self.closed = False
        self._tables = declared.tables
        for tables in declared.tables:
            for table in tables:
                _check_free(table)

    def bind(self) -> None:
        """Let the modules find their rows here from now on."""
        for number, tables in enumerate(self._tables):
            for table in tables:
                table.bound = self, number

    # -- forward passes

    def rows(self, requests: Sequence[RowRequest]) -> list[tuple[torch.Tensor, DistinctIds]]:
        """Return the rows of each request, float32, on the device of its ids; their gradients reach the next push.

        Rows without gradients belong to the caller: nobody else reads them. Waits for rows that ``prepare`` has
        requested, and requests the others together. Raises PsError.
        """
        found = [self._find(request) for request in requests]
        missing = [request for request, ready in zip(requests, found, strict=True) if isinstance(ready, DistinctIds)]
        ids = [ready for ready in found if isinstance(ready, DistinctIds)]
        asked = iter(self._ask(missing, ids, self._source().next_position, now=not torch.is_grad_enabled()))
        readies = [ready if isinstance(ready, PreparedRows) else next(asked) for ready in found]
        for ready in readies:
            self._source().finish(ready.lookup)
        return [
            (self._tracked(ready, request, is_shared=ready is first), ready.distinct)
            for ready, first, request in zip(readies, found, requests, strict=True)
        ]

    def prepare(self, requests: Sequence[RowRequest], ahead: int) -> list[PreparedRows]:
        """Request the rows of a later batch: for the next push, or the one ``ahead`` pushes after it."""
        phase, clock = self._source().next_position
        readies = self._ask(requests, [distinct(request) for request in requests], (phase, clock + ahead))
        self._ready += readies
        return readies

    def discard(self, readies: Sequence[PreparedRows]) -> None:
        """Drop prepared rows."""
        self._ready = [ready for ready in self._ready if ready not in readies]

    def _find(self, request: RowRequest) -> PreparedRows | DistinctIds:
        """Return prepared rows that are not too old; else the ids to request."""
        position = self._source().next_position if self._ready else (0, 0)
        usable = [
            ready
            for ready in self._ready
            if ready.lookup.position >= position and ready.request.table.name == request.table.name
        ]
        for ready in usable:
            if ready.is_of(request):
                return ready
        ids = distinct(request)
        for ready in usable:
            if ready.distinct.padded == ids.padded and np.array_equal(ready.distinct.ids, ids.ids):
                return PreparedRows(request, (), ids, ready.values, ready.lookup)
        return ids

    def _ask(
        self, requests: Sequence[RowRequest], ids: Sequence[DistinctIds], position: Position, *, now: bool = False
    ) -> list[PreparedRows]:
        wanted, values = [], []
        for request, each in zip(requests, ids, strict=True):
            rows = torch.empty(each.rows, request.table.dim)
            rows[: each.padded].zero_()
            wanted.append(RequestedRows(_number(request.table), each.ids, rows[each.padded :].numpy()))
            values.append(rows)
        lookup = Lookup(wanted, position, now=now)
        if wanted:
            self._source().look_up(lookup)
        return [
            PreparedRows(request, request.versions(), each, rows, lookup)
            for request, each, rows in zip(requests, ids, values, strict=True)
        ]

    def _tracked(self, ready: PreparedRows, request: RowRequest, *, is_shared: bool) -> torch.Tensor:
        """``is_shared``: prepared rows, which any number of forward passes may use."""
        rows = ready.values.detach().to(request.ids[0].device)
        if self.trains and torch.is_grad_enabled():
            rows.requires_grad_()
            self.gradients[_number(request.table)].expect(next(self._forwards), ready.distinct.ids, rows)
        elif is_shared:
            rows = rows.clone()
        return rows

    # -- steps

    def collect(self) -> RowUpdate:
        """Return the gradients since the last step."""
        found = (gradients.collect() for gradients in self.gradients)
        return RowUpdate([gradients for gradients in found if gradients is not None])

    def clear(self) -> None:
        """Drop the gradients."""
        for gradients in self.gradients:
            gradients.clear()


def bound_of(table: Table) -> TableBinding:
    """Return the binding of ``table``. Raises InvalidRequest before it has one, and after that was closed."""
    binding = table.bound[0] if table.bound is not None else None
    if not isinstance(binding, TableBinding) or binding.closed:
        raise InvalidRequest(
            f"table '{table.name}' is used "
            + ("before any shard has its rows" if table.bound is None else "after its cluster was closed"),
            variable=table.name,
            remedy="call cluster.optimizer(..., model) first, or cluster.follow(model) to read alone",
        )
    return binding


def _number(table: Table) -> int:
    assert table.bound is not None
    return table.bound[1]


def _check_free(table: Table) -> None:
    if table.bound is not None and table.bound[0].trains and not table.bound[0].closed:
        raise InvalidRequest(
            f"table '{table.name}' belongs to another model already",
            variable=table.name,
            remedy="give all that uses one table to one cluster.optimizer(...), or each model its own table",
        )
