"""The parameter groups of tables in an optimizer; they follow those of variables."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ps_protocol.errors import InvalidRequest
from ps_protocol.model.tables import RowOptions
from ps_protocol.wire.convert.options import changed_options
from ps_worker.tables.binding import TableBinding
from ps_worker.tables.row_gradients import RowTensors

Groups = list[dict[str, Any]]


class TableGroups:
    """The parameter groups of tables, which follow those of variables. Used by the optimizer, in its thread.

    The parameters of a table's group are the rows that have a gradient, so that torch's tools find them. torch
    sometimes replaces the groups, in the same order.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, tables: TableBinding) -> None:
        """Add a group for each table to ``optimizer``, which has all others."""
        self._tables = tables
        self._first = len(optimizer.param_groups)
        self._sent: tuple[list[RowOptions], tuple[RowOptions, ...]] = [], ()
        # torch wants names in all groups or in none.
        names: dict[str, list[str]] = {"param_names": []} if "param_names" in optimizer.param_groups[0] else {}
        for table in tables.specs:
            optimizer.add_param_group({"params": [], **names, **table.options, "table": table.name})
        self._show_rows(optimizer)

    def others(self, groups: Groups) -> Groups:
        """Return the groups of variables."""
        return groups[: self._first]

    def options(self, groups: Groups) -> tuple[RowOptions, ...]:
        """Return the options of each table that are not as declared; the same object until one changes."""
        options: list[RowOptions] = [
            {name: float(group[name]) for name in table.options}
            for group, table in zip(self._own(groups), self._tables.specs, strict=True)
        ]
        if options != self._sent[0]:
            declared = [table.options for table in self._tables.specs]
            self._sent = options, tuple(map(changed_options, declared, options))
        return self._sent[1]

    @contextmanager
    def without_rows(self, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """A context without the rows: they change with every step, so they have no number in a ``state_dict``."""
        for group in self._own(optimizer.param_groups):
            group["params"] = []
        try:
            yield
        finally:
            self._show_rows(optimizer)

    def completed(self, optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return ``state_dict``, with the present options where it has no tables. Raises InvalidRequest for other
        tables.
        """
        if not self._tables.specs:
            return state_dict
        groups = state_dict["param_groups"]
        if len(groups) == self._first:
            return {**state_dict, "param_groups": [*groups, *optimizer.param_groups[self._first :]]}
        own, names = [table.name for table in self._tables.specs], [g.get("table") for g in groups[self._first :]]
        if len(names) == len(own) and names != own:
            raise InvalidRequest(
                "this state is of another model: its tables differ",
                expected=", ".join(own) or "none",
                actual=", ".join(map(str, names)),
            )
        return state_dict

    def _own(self, groups: Groups) -> Groups:
        """The groups of tables. A model without tables may have other groups behind those of variables."""
        return groups[self._first : self._first + len(self._tables.specs)]

    def _show_rows(self, optimizer: torch.optim.Optimizer) -> None:
        for group, gradients in zip(self._own(optimizer.param_groups), self._tables.gradients, strict=True):
            group["params"] = RowTensors(gradients)
