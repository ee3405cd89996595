"""Rows in a message: where their bytes go, what is wrong with them, and how those of several pushes become one step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ps_protocol.errors import InvalidRequest, NonFiniteGradient
from ps_protocol.model.layout import Layout
from ps_protocol.model.spec import NonFinite
from ps_protocol.model.tables import MAX_ROWS_BYTES, Ids, RowCount, RowOptions
from ps_server import tables as row_tables
from ps_server.consistency import Position
from ps_server.tables.step import RowStep

ROW_COST_BYTES = 256
"""What finding a row costs, as bytes that are moved in the same time."""

ID_COST_BYTES = 16
"""What looking at an id costs: whether it comes twice, and whether it belongs here."""


@dataclass(frozen=True, slots=True)
class TableRows:
    """Rows of one table: ids int64 [n], in the shard's own memory, and gradients float32 [n, dim]."""

    table: int
    ids: Ids
    gradients: npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class PushedRows:
    """What a push brings for tables, and the options of each of the model's tables."""

    parts: tuple[TableRows, ...]
    options: Sequence[RowOptions]
    #: Where the payload goes: all ids, then all gradients. Where it was lent, ids are copies.
    buffer: memoryview
    #: Gradients are in memory that the worker can change.
    lent: bool = False

    @property
    def rows(self) -> int:
        """Rows of all tables."""
        return sum(part.ids.size for part in self.parts)

    @property
    def cost(self) -> int:
        """Bytes that could be moved in the time that updating these rows takes."""
        return len(self.buffer) + ROW_COST_BYTES * self.rows

    @property
    def ids_cost(self) -> int:
        """The same for a look at the ids."""
        return ID_COST_BYTES * self.rows


def announced(
    tables: Iterable[RowCount],
    layout: Layout,
    options: Sequence[RowOptions],
    lent: Callable[[int], memoryview] | None = None,
) -> PushedRows:
    """Memory for the rows that a push announces; ``lent`` gives it where they are there already. Raises InvalidRequest.

    What is lent may change at any time. Ids are copied out of it, for what is checked has to be what finds rows;
    gradients are values and nothing else.
    """
    counts = checked_counts(tables, layout)
    dims = [layout.shard_map.spec.tables[table].dim for table, _ in counts]
    ids_bytes = 8 * sum(rows for _, rows in counts)
    size = ids_bytes + sum(4 * rows * dim for (_, rows), dim in zip(counts, dims, strict=True))
    _check_size(size, layout)
    data = np.frombuffer(lent(size), np.uint8, size) if lent else np.empty(size, np.uint8)
    ids, values = data[:ids_bytes].view(np.int64), data[ids_bytes:].view(np.float32)
    if lent:
        ids = ids.copy()
    parts, row, at = [], 0, 0
    for (table, rows), dim in zip(counts, dims, strict=True):
        parts.append(TableRows(table, ids[row : row + rows], values[at : at + rows * dim].reshape(rows, dim)))
        row, at = row + rows, at + rows * dim
    return PushedRows(tuple(parts), options, memoryview(data.data), lent is not None)


def checked_counts(tables: Iterable[RowCount], layout: Layout) -> list[RowCount]:
    """Numbers of tables and rows of each. Raises InvalidRequest unless the numbers exist and rise."""
    counts = list(tables)
    numbers = [table for table, _ in counts]
    known = len(layout.shard_map.spec.tables)
    if numbers != sorted(set(numbers)) or (numbers and numbers[-1] >= known):
        raise InvalidRequest(
            "a message names tables that do not exist, or not in order",
            shard=str(layout.shard),
            expected=f"numbers below {known}, rising",
            actual=", ".join(map(str, numbers)),
        )
    _check_size(8 * sum(rows for _, rows in counts), layout)
    return counts


def _check_size(size: int, layout: Layout) -> None:
    if size > MAX_ROWS_BYTES:
        raise InvalidRequest(
            "a message has more rows than one may",
            shard=str(layout.shard),
            expected=f"at most {MAX_ROWS_BYTES} bytes of ids and rows",
            actual=f"{size} bytes",
            remedy="split the batch",
        )


def inspect(pushed: PushedRows, tables: Sequence[row_tables.ShardTable], layout: Layout, *, finite: bool) -> str | None:
    """In the executor: the name of a table with a gradient that is not finite, where the policy asks for it; else None.

    Raises InvalidRequest for an id that comes twice or is of another shard, TableFull; nothing was changed then.
    """
    for part in pushed.parts:
        table = tables[part.table]
        if table.has_duplicates(part.ids):
            raise InvalidRequest(
                "a push has an id twice",
                variable=table.spec.name,
                shard=str(layout.shard),
                remedy="add the gradients of equal ids up before they are pushed",
            )
        table.check_here(part.ids)
        table.room_for(part.ids)
    if finite or layout.shard_map.spec.nonfinite is NonFinite.ALLOW:
        return None
    for part in pushed.parts:
        if row_tables.first_nonfinite_row(part.gradients) is not None:
            return tables[part.table].spec.name
    return None


def nonfinite_rows(name: str, rank: int, shard: int) -> NonFiniteGradient:
    """A push with NaN or infinity in rows of table ``name``."""
    return NonFiniteGradient(
        f"a gradient of rows from worker {rank} holds NaN or infinity; nothing was applied",
        variable=name,
        shard=str(shard),
        remedy='lower the learning rate, clip gradients, or pass nonfinite="skip" to cluster.optimizer',
    )


@dataclass(frozen=True, slots=True)
class WantedRows:
    """Rows that a worker wants, by table; the buffer is where their ids go."""

    parts: tuple[tuple[int, Ids], ...]
    buffer: memoryview
    #: Bytes of the rows.
    rows_bytes: int


@dataclass(frozen=True, slots=True)
class RequestedLookup:
    """What is still to be sent to a worker that asked for rows."""

    number: int
    wanted: WantedRows
    #: Where the worker stands before the push that the rows are for; None: in every mode, at once.
    position: Position | None


def wanted(tables: Iterable[RowCount], layout: Layout) -> WantedRows:
    """Memory for the ids that a lookup announces. Raises InvalidRequest."""
    counts = checked_counts(tables, layout)
    rows_bytes = 4 * sum(rows * layout.shard_map.spec.tables[table].dim for table, rows in counts)
    _check_size(rows_bytes, layout)
    ids = np.empty(sum(rows for _, rows in counts), np.int64)
    parts, row = [], 0
    for table, rows in counts:
        parts.append((table, ids[row : row + rows]))
        row += rows
    return WantedRows(tuple(parts), memoryview(ids.view(np.uint8).data), rows_bytes)


def combined_rows(
    pushes: Sequence[PushedRows | None],
    tables: Sequence[row_tables.ShardTable],
    weights: Sequence[float] | None = None,
    *,
    keep: bool = False,
) -> list[RowStep]:
    """In the executor: the rows in the step that ``pushes`` make, in rank order.

    ``weights``: the share of each push in the mean; None: equal ones. ``keep``: none of it is in memory that a worker
    can change.
    """
    from ps_protocol.wire.row_means import merge_rows

    count = len(pushes)
    present = [(pushed, at) for at, pushed in enumerate(pushes) if pushed is not None]
    steps = []
    for number in sorted({part.table for pushed, _ in present for part in pushed.parts}):
        found = [(part, at) for each, at in present for part in each.parts if part.table == number]
        if count == 1:
            ids, gradients = found[0][0].ids, found[0][0].gradients
        else:
            own = None if weights is None else [weights[at] for _, at in found]
            ids, gradients = merge_rows([(part.ids, part.gradients) for part, _ in found], count, own)
        if keep and count == 1 and present[0][0].lent:
            gradients = gradients.copy()
        steps.append(RowStep(number, ids, gradients, tables[number].updates + 1, present[0][0].options[number]))
    return steps
