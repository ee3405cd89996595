"""Which shard gets which ids and gradients, in what order, and how rows come together again."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ps_protocol.model.ids import buckets_of
from ps_protocol.model.spec import ModelSpec, ShardMap
from ps_protocol.model.tables import RowInit, TableSpec
from ps_worker.tables.lookup import Lookup, RequestedRows
from ps_worker.tables.row_payloads import RowRouter, RowUpdate, TableGradients

DIMS = (2, 3)
BUCKETS = 8

owners = st.lists(st.integers(0, 2), min_size=BUCKETS, max_size=BUCKETS).map(tuple)
ids = st.lists(st.integers(-(2**63), 2**63 - 1), max_size=30, unique=True)


def places_of(*tables: tuple[int, ...]) -> RowRouter:
    specs = tuple(
        TableSpec(f"t{i}", DIMS[i], 0, RowInit("constant"), "sgd", buckets=BUCKETS) for i in range(len(tables))
    )
    return RowRouter(ShardMap(1, ModelSpec("m", "torch.optim.SGD", (), (), tables=specs), 3, (), tables=tables))


def array(values: list[int]) -> np.ndarray:
    return np.array(values, np.int64)


def values_of(values: list[int], dim: int) -> np.ndarray:
    """Different for every id."""
    return (np.arange(len(values) * dim, dtype=np.float32) + 1).reshape(len(values), dim)


def owner(value: int, table: tuple[int, ...]) -> int:
    return table[buckets_of(array([value]), BUCKETS)[0]]


def joined(pieces: list[memoryview]) -> bytes:
    return b"".join(bytes(piece) for piece in pieces)


@given(owners, owners, ids, ids)
def test_each_shard_gets_its_own_rows_in_the_order_they_came(
    one: tuple[int, ...], two: tuple[int, ...], first: list[int], second: list[int]
) -> None:
    places = places_of(one, two)
    given = [(0, first, one), (1, second, two)]
    update = RowUpdate([TableGradients(t, array(own), values_of(own, DIMS[t])) for t, own, _ in given])
    for shard in range(3):
        payload = update.of(places, shard)
        mine = [[i for i, value in enumerate(own) if owner(value, table) == shard] for _, own, table in given]
        assert [(each.table, each.rows) for each in payload.tables] == [(0, len(mine[0])), (1, len(mine[1]))]
        wanted_ids = [array(own)[chosen].tobytes() for (_, own, _), chosen in zip(given, mine, strict=True)]
        wanted = [values_of(own, DIMS[t])[chosen].tobytes() for (t, own, _), chosen in zip(given, mine, strict=True)]
        assert joined(payload.pieces) == b"".join(wanted_ids + wanted)
        assert update.of(places, shard) == payload


@given(owners, owners, ids, ids, ids)
def test_rows_come_back_to_their_ids_whatever_the_shards(
    one: tuple[int, ...], two: tuple[int, ...], first: list[int], second: list[int], again: list[int]
) -> None:
    given = [(1, second), (0, first), (1, again)]
    rows = [np.zeros((len(own), DIMS[table]), np.float32) for table, own in given]
    lookup = Lookup(
        [RequestedRows(t, array(own), target) for (t, own), target in zip(given, rows, strict=True)], (0, 1)
    )
    for places in (places_of(two, one), places_of(one, two)):
        # The second map takes the place of the first before anything has come.
        lookup.lay_out(places)
    assert lookup.arrived == (not first and not second and not again)
    for part in lookup.parts.values():
        assert [each.table for each in part.tables] == sorted({each.table for each in part.tables})
        wanted = np.frombuffer(joined(part.ids), np.int64)
        dims = [DIMS[each.table] for each in part.tables for _ in range(each.rows)]
        answer = b"".join(
            np.full(dim, value % 9973, np.float32).tobytes() for value, dim in zip(wanted.tolist(), dims, strict=True)
        )
        for piece in part.pieces:
            piece[:], answer = answer[: len(piece)], answer[len(piece) :]
        assert answer == b""
        part.arrived = True
    assert lookup.arrived
    lookup.finish()
    for (_, own), target in zip(given, rows, strict=True):
        assert np.array_equal(target, np.repeat(array(own)[:, None] % 9973, target.shape[1], 1).astype(np.float32))
