"""The tables of one model in this process: where their rows come from, and where their gradients go."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from ps_protocol.errors import InvalidRequest
from ps_worker.tables.batch import Distinct, Request, distinct
from ps_worker.tables.leaves import Leaves
from ps_worker.tables.lookup import Lookup, Position, Wanted
from ps_worker.tables.table import Declared, Table
from ps_worker.tables.update import RowUpdate


class RowSource(Protocol):
    """Who gets rows from the shards. Called by the training thread."""

    @property
    def next_position(self) -> Position:
        """Of the next push."""
        ...

    def look_up(self, lookup: Lookup) -> None:
        """Ask; the rows may come later."""
        ...

    def finish(self, lookup: Lookup) -> None:
        """Wait until the rows are in place. Raises PsError."""
        ...


@dataclass(slots=True, eq=False)
class Ready:
    """Rows that have been asked for, for a request."""

    request: Request
    versions: tuple[int, ...]
    distinct: Distinct
    #: float32 [rows, dim]; its rows come with ``lookup``.
    values: torch.Tensor
    lookup: Lookup

    def is_of(self, request: Request) -> bool:
        """Whether it was asked for these very tensors, which have not been written since."""
        own = self.request
        return (
            own.table.name == request.table.name
            and own.padding_id == request.padding_id
            and len(own.ids) == len(request.ids)
            and all(mine is theirs for mine, theirs in zip(own.ids, request.ids, strict=True))
            and self.versions == request.versions()
        )


class BoundTables:
    """Made by a model's optimizer, which pushes gradients of rows, or by a follower, which reads alone.

    Used by the training thread; gradients come in from the threads of backward.
    """

    def __init__(self, declared: Declared, source: Callable[[], RowSource], *, trains: bool) -> None:
        """``source()`` is asked at each lookup. Raises InvalidRequest when a table belongs to another model."""
        self.specs = declared.specs
        self.modules = declared.modules
        self.trains = trains
        self._source = source
        self._forwards = itertools.count()
        self._ready: list[Ready] = []
        self.leaves = [Leaves(number) for number in range(len(declared.specs))]
        self.closed = False
        self._tables = declared.tables
        for tables in declared.tables:
            for table in tables:
                _check_free(table)

    def bind(self) -> None:
        """From now on modules find their rows here."""
        for number, tables in enumerate(self._tables):
            for table in tables:
                table.bound = self, number

    # -- forward passes

    def rows(self, requests: Sequence[Request]) -> list[tuple[torch.Tensor, Distinct]]:
        """For each request its rows, float32, on the device of its ids; their gradients reach the next push.

        Those that ``prepare`` has asked for are waited for; the rest is asked for together. Raises PsError.
        """
        found = [self._find(request) for request in requests]
        missing = [request for request, ready in zip(requests, found, strict=True) if isinstance(ready, Distinct)]
        ids = [ready for ready in found if isinstance(ready, Distinct)]
        asked = iter(self._ask(missing, ids, self._source().next_position, now=not torch.is_grad_enabled()))
        readies = [ready if isinstance(ready, Ready) else next(asked) for ready in found]
        for ready in readies:
            self._source().finish(ready.lookup)
        return [(self._leaf(ready, request), ready.distinct) for ready, request in zip(readies, requests, strict=True)]

    def prepare(self, requests: Sequence[Request], ahead: int) -> list[Ready]:
        """Ask for rows of a batch that comes later: for the next push, or that many pushes behind it."""
        phase, clock = self._source().next_position
        readies = self._ask(requests, [distinct(request) for request in requests], (phase, clock + ahead))
        self._ready += readies
        return readies

    def discard(self, readies: Sequence[Ready]) -> None:
        """What was prepared is not wanted any more."""
        self._ready = [ready for ready in self._ready if ready not in readies]

    def _find(self, request: Request) -> Ready | Distinct:
        """Rows that were asked for already and are not too old; else the ids to ask for."""
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
                return Ready(request, (), ids, ready.values, ready.lookup)
        return ids

    def _ask(
        self, requests: Sequence[Request], ids: Sequence[Distinct], position: Position, *, now: bool = False
    ) -> list[Ready]:
        wanted, values = [], []
        for request, each in zip(requests, ids, strict=True):
            rows = torch.empty(each.rows, request.table.dim)
            rows[: each.padded].zero_()
            wanted.append(Wanted(_number(request.table), each.ids, rows[each.padded :].numpy()))
            values.append(rows)
        lookup = Lookup(wanted, position, now=now)
        if wanted:
            self._source().look_up(lookup)
        return [
            Ready(request, request.versions(), each, rows, lookup)
            for request, each, rows in zip(requests, ids, values, strict=True)
        ]

    def _leaf(self, ready: Ready, request: Request) -> torch.Tensor:
        leaf = ready.values.detach().to(request.ids[0].device)
        if self.trains and torch.is_grad_enabled():
            leaf.requires_grad_()
            self.leaves[_number(request.table)].expect(next(self._forwards), ready.distinct.ids, leaf)
        return leaf

    # -- steps

    def collect(self) -> RowUpdate:
        """The gradients since the last step."""
        found = (leaves.collect() for leaves in self.leaves)
        return RowUpdate([gradients for gradients in found if gradients is not None])

    def clear(self) -> None:
        """Drop the gradients: they have been pushed, or are not wanted."""
        for leaves in self.leaves:
            leaves.clear()


def bound_of(table: Table) -> BoundTables:
    """The tables of the model that ``table`` belongs to. Raises InvalidRequest before there is one, and afterwards."""
    if table.bound is None or table.bound[0].closed:
        raise InvalidRequest(
            f"table '{table.name}' is used "
            + ("before its rows are anywhere" if table.bound is None else "after its cluster was closed"),
            variable=table.name,
            remedy="call cluster.optimizer(..., model) first, or cluster.follow(model) to read alone",
        )
    return table.bound[0]


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
