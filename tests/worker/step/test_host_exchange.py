"""What a leader takes from the deposits of others."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from ps_protocol.errors import InvalidRequest
from ps_protocol.wire.shared_memory import SharedMemory
from ps_worker.host.leader import TakenDeposit
from ps_worker.host.memory import LentRows, MappedSegments
from ps_worker.host.messages import Deposit, HostWorker
from ps_worker.step.host_exchange import _mapped_rows
from ps_worker.tables.row_payloads import array_bytes
from tests.support.tables import table_spec

TABLES = [table_spec(name="a", dim=2), table_spec(name="b", dim=3), table_spec(name="c", dim=1)]


def taken(tables: tuple[int, ...], segment: SharedMemory | None) -> TakenDeposit:
    mapped = MappedSegments()
    if segment is not None:
        mapped._mapped[7] = segment
    deposit = Deposit(1, 0, 1, 1, 1.0, False, False, (), (), (), "[[],[]]", tables, 7)
    return TakenDeposit(HostWorker(1, 1), deposit, SimpleNamespace(mapped=mapped))  # type: ignore[arg-type]


def test_rows_of_a_deposit_are_read_as_they_were_lent() -> None:
    ids = [np.array([5, -1]), np.array([9])]
    gradients = [np.array([[1, 2], [3, 4]], np.float32), np.array([[7]], np.float32)]
    segment = LentRows().take([array_bytes(each) for each in (*ids, *gradients)])
    found, kept = _mapped_rows(taken((0, 2, 1, 0, 2, 1), segment), TABLES)
    assert kept is segment
    assert [each.table for each in found] == [0, 1, 2]
    assert [each.ids.tolist() for each in found] == [[5, -1], [], [9]]
    assert [each.gradients.tolist() for each in found] == [[[1, 2], [3, 4]], [], [[7]]]


def test_tables_that_took_part_without_rows_need_no_memory() -> None:
    found, kept = _mapped_rows(taken((1, 0), None), TABLES)
    assert kept is None
    assert [(each.table, each.ids.shape, each.gradients.shape) for each in found] == [(1, (0,), (0, 3))]


@pytest.mark.parametrize(
    "tables",
    [(0,), (1, 1, 0, 1), (0, 1, 0, 1), (3, 1), (1 << 63, 0), (0, 1 << 63), (0, 4097), (0, 1, 1, 1 << 62)],
    ids=str,
)
def test_rows_that_do_not_fit_the_tables_or_their_memory_are_refused(tables: tuple[int, ...]) -> None:
    with pytest.raises(InvalidRequest, match="does not fit the tables"):
        _mapped_rows(taken(tables, SharedMemory.create(1 << 16)), TABLES)


def test_memory_for_rows_is_used_again_and_replaced_where_it_is_too_small() -> None:
    lent = LentRows()
    assert lent.take([]) is None
    first = lent.take([memoryview(b"abc"), memoryview(b"de")])
    assert first is not None
    assert bytes(first.bytes[:5]) == b"abcde"
    assert lent.take([memoryview(b"xy")]) is first
    assert bytes(first.bytes[:5]) == b"xycde"
    second = lent.take([memoryview(bytes(1 << 17))])
    assert second is not None
    assert len(second.bytes) == 1 << 17
