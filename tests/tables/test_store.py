"""Rows by id behave like a dict, through growth, removal and shrinking."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ps_protocol.errors import TableFull
from ps_server.tables import id_map
from ps_server.tables.id_map import BLOCK, LEAD
from ps_server.tables.store import Columns, RowStore, map_capacity
from tests.support.length import examples
from tests.tables.samples import random_ids, resident

_ID = st.one_of(st.integers(0, 60), st.integers(-(2**63), 2**63 - 1), st.sampled_from([-1, 2**63 - 1, -(2**63)]))
_ACTION = st.tuples(st.sampled_from(["insert", "insert", "remove"]), st.lists(_ID, max_size=60, unique=True))


def _look_up(store: RowStore, ids: np.ndarray) -> np.ndarray:
    """The indexes of ids without a row."""
    return store.look_up(ids, np.empty((ids.size, store.rows.shape[1]), np.float32))


def _check(store: RowStore, expected: dict[int, int]) -> None:
    ids = np.array(list(expected), np.int64)
    assert store.count == len(expected)
    found = store.find(ids)
    assert sorted(found) == list(range(store.count))
    assert store.touched[found].tolist() == list(expected.values())
    assert store.rows[found].tolist() == [[value, -value] for value in expected.values()]
    assert store.uses[found].tolist() == [value % 7 for value in expected.values()]
    of_buckets = [store.of_bucket(bucket) for bucket in range(store.counts.size)]
    assert sorted(np.concatenate(of_buckets)) == list(range(store.count))
    assert all((np.sort(store.ids[rows]) == store.ids[rows]).all() for rows in of_buckets)


@examples(60, derandomize=True)
@given(st.sampled_from([1, 4, 64]), st.lists(_ACTION, max_size=12))
def test_a_store_is_a_dict(buckets: int, actions: list[tuple[str, list[int]]]) -> None:
    store, expected = RowStore(buckets, 2, with_uses=True), dict[int, int]()
    for number, (action, numbers) in enumerate(actions, 1):
        if action == "insert":
            ids = np.array(numbers, np.int64)
            new = store.find(ids) < 0
            assert new.tolist() == [id_ not in expected for id_ in numbers]
            before = store.count
            found = store.insert(ids, number)
            assert found[new].tolist() == list(range(before, store.count))
            store.rows[before : store.count] = [number, -number]
            store.uses[before : store.count] = number % 7
            expected |= {id_: number for id_ in numbers if id_ not in expected}
        else:
            there = [id_ for id_ in numbers if id_ in expected] + list(expected)[:: number + 1]
            there = list(dict.fromkeys(there))
            store.remove(np.array(there, np.int64))
            expected = {id_: value for id_, value in expected.items() if id_ not in there}
        _check(store, expected)


def test_rows_that_were_looked_up_are_looked_for_again_once_one_was_removed() -> None:
    store = RowStore(4, 1, with_uses=False)
    ids = np.arange(10)
    store.insert(ids, 1)
    _look_up(store, ids)
    store.remove(np.array([3]))
    found = store.insert(ids, 2)
    assert store.ids[found].tolist() == ids.tolist()
    assert store.count == 10


def test_ids_without_a_row_are_not_kept_by_a_lookup() -> None:
    store = RowStore(4, 1, with_uses=False)
    store.insert(np.arange(9), 1)
    assert _look_up(store, np.arange(10)).tolist() == [9]
    assert store.insert(np.arange(10), 2).tolist() == list(range(10))


def test_ids_in_another_order_are_other_ids() -> None:
    store = RowStore(4, 1, with_uses=False)
    ids = np.arange(10)
    store.insert(ids, 1)
    _look_up(store, ids)
    order = np.array([0, *range(9, 0, -1)])
    assert store.insert(ids[order], 2).tolist() == order.tolist()


def test_the_rows_of_a_lookup_are_found_once(monkeypatch: pytest.MonkeyPatch) -> None:
    store = RowStore(4, 1, with_uses=False)
    ids = np.arange(10)
    expected = store.insert(ids, 1).tolist()
    _look_up(store, ids)
    searches = []
    insert = id_map.insert
    monkeypatch.setattr(id_map, "insert", lambda *given: searches.append(given) or insert(*given))
    assert store.insert(ids.copy(), 2).tolist() == expected
    assert not searches
    assert store.insert(ids, 3).tolist() == expected
    assert len(searches) == 1


@pytest.mark.parametrize("count", [0, 1, LEAD - 1, LEAD, LEAD + 1, 2 * LEAD, 2 * LEAD + 1, BLOCK, BLOCK + 1, 3 * BLOCK])
def test_any_number_of_ids_passes_the_stages_of_a_search(count: int) -> None:
    store = RowStore(2, 1, with_uses=False)
    ids = np.unique(random_ids(np.random.default_rng(11), 4 * BLOCK))[:count]
    known = ids[::2].copy()
    assert store.insert(known, 1).tolist() == list(range(known.size))
    rows = {int(each): row for row, each in enumerate(known)}
    assert store.find(ids).tolist() == [rows.get(int(each), -1) for each in ids]
    for each in ids[1::2]:
        rows[int(each)] = len(rows)
    assert store.insert(ids, 2).tolist() == [rows[int(each)] for each in ids]
    assert store.find(np.tile(ids, 2)).tolist() == 2 * [rows[int(each)] for each in ids]
    assert sorted(store.of_bucket(0).tolist() + store.of_bucket(1).tolist()) == list(range(count))


@pytest.mark.parametrize("columns", [1, 2, 5])
def test_a_lookup_writes_as_many_columns_as_there_is_room_for_and_names_what_has_no_row(columns: int) -> None:
    random = np.random.default_rng(7)
    store = RowStore(4, 5, with_uses=False)
    ids = np.unique(random_ids(random, 3_000))
    found = store.insert(ids[::3].copy(), 1)
    store.rows[found] = random.random((found.size, 5), np.float32)
    wanted = random.permutation(np.concatenate([ids, ids[:500]]))
    out = np.full((wanted.size, columns), -1, np.float32)
    missing = store.look_up(wanted, out)
    known = np.isin(wanted, ids[::3])
    assert missing.tolist() == np.flatnonzero(~known).tolist()
    assert (out[missing] == -1).all()
    assert (out[known] == store.rows[store.find(wanted[known]), :columns]).all()


@pytest.mark.parametrize("with_uses", [False, True])
def test_rows_are_touched(with_uses: bool) -> None:
    store = RowStore(4, 1, with_uses=with_uses)
    store.insert(np.arange(100), 1)
    rows = np.random.default_rng(3).permutation(100)[:60]
    store.touch(rows, 7)
    store.touch(rows[:20], 8)
    expected = np.ones(100, np.int64)
    expected[rows], expected[rows[:20]] = 7, 8
    assert store.touched[:100].tolist() == expected.tolist()
    if with_uses:
        uses = np.zeros(100, np.int64)
        uses[rows], uses[rows[:20]] = 1, 2
        assert store.uses[:100].tolist() == uses.tolist()


def test_ids_that_lie_close_in_a_map_are_told_apart() -> None:
    random = np.random.default_rng(5)
    store = RowStore(1, 0, with_uses=False)
    ids = random_ids(random, 50_000)
    store.insert(ids, 0)
    assert store.find(ids).tolist() == list(range(ids.size))
    assert (store.find(ids ^ 1 << 40)[~np.isin(ids ^ 1 << 40, ids)] == -1).all()
    store.remove(ids[::2].copy())
    found = store.find(ids)
    assert (found[::2] == -1).all()
    assert (store.ids[found[1::2]] == ids[1::2]).all()


def test_buckets_with_as_many_rows_do_not_grow_together() -> None:
    grown = [sum(map_capacity(b, n) != map_capacity(b, n + 1) for b in range(256)) for n in range(2_000, 3_000)]
    assert max(grown) <= 3
    assert all(0.55 < n / map_capacity(b, n) <= 0.85 for b in range(0, 256, 17) for n in range(100, 100_000, 977))


def test_maps_shrink_when_rows_go() -> None:
    store = RowStore(4, 0, with_uses=False)
    ids = np.arange(100_000)
    store.insert(ids, 0)
    full = store.size_bytes
    store.remove(ids[:99_000])
    assert store.size_bytes < full / 50
    assert store.find(ids[99_000:]).min() >= 0


def test_memory_of_rows_that_went_is_given_back() -> None:
    store = RowStore(4, 256, with_uses=False)
    ids = np.arange(40_000)
    store.insert(ids, 0)
    store.rows[: store.count] = 1
    rows = store.rows[: ids.size]
    assert resident(rows) == 1.0
    store.remove(ids[2_000:])
    assert resident(rows) * rows.nbytes < 2_000 * 1024 + (4 << 20)
    assert (store.rows[: store.count] == 1).all()
    store.insert(ids, 0)
    assert (store.rows[:2_000] == 1).all()
    assert (store.rows[10_000:10_100] == 0).all()


def test_more_rows_than_fit_into_memory_are_refused_before_anything_changes() -> None:
    store = RowStore(4, 1, with_uses=False)
    store.insert(np.arange(3), 0)
    store.capacity = 5
    with pytest.raises(TableFull, match="at most 5 rows"):
        store.insert(np.arange(3, 6), 0)
    assert store.find(np.arange(6)).tolist() == [0, 1, 2, -1, -1, -1]


def test_rows_make_do_with_the_address_space_there_is_unless_it_is_far_too_small(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("ps_server.tables.store.machine_bytes", lambda: 1 << 60)
    assert 1 << 20 < RowStore(4, 1 << 14, with_uses=False).capacity < 1 << 32
    monkeypatch.setattr("ps_server.tables.store._FEWEST_ROWS", 1 << 40)
    with pytest.raises(TableFull, match="address space"):
        RowStore(4, 1 << 14, with_uses=False)


def test_copied_rows_are_written_as_they_were() -> None:
    store, other = RowStore(4, 1, with_uses=True), RowStore(4, 1, with_uses=True)
    columns = Columns(np.arange(5), np.arange(5) + 10, np.ones((5, 1), np.float32), np.arange(5).astype(np.uint32))
    store.write(columns)
    other.write(store.copy(store.find(columns.ids)))
    copied = other.copy(other.find(columns.ids))
    assert all((getattr(copied, name) == getattr(columns, name)).all() for name in Columns.__slots__)
