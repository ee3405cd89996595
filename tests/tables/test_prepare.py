"""What is done before a push changes nothing but the time that the push takes. Costs 3 s of CPU."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest

from ps_protocol.model.tables import Ids, RowLife
from ps_server.tables import store as store_module
from ps_server.tables.arrays import Reserved
from ps_server.tables.store import RowStore
from ps_server.tables.table import ShardTable
from tests.support.length import few
from tests.tables.samples import random_ids, resident, same, spec, table, use, values

SEEDS = few(range(3))


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """One map is enlarged at a time."""
    monkeypatch.setattr(store_module, "_MOVED_AT_ONCE", 1)


def prepared(held: ShardTable, ids: Ids) -> int:
    """Look up, and do all of what a push would have to do; how many pieces that were."""
    values(held, ids)
    if ahead := held.memory_ahead(ids):
        ahead()
    pieces = 1
    while held.prepare(ids):
        pieces += 1
    return pieces


def batches(random: np.random.Generator, count: int) -> Iterator[Ids]:
    """Ids of pushes: new ones among some that were there before."""
    known = random_ids(random, 4000)
    for _ in range(count):
        yield random.choice(known, int(random.integers(1, 1500)), replace=False)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("life", [RowLife(), RowLife(admit_after=2), RowLife(expire_after_updates=3)])
def test_a_table_that_was_prepared_holds_the_same(small_pieces: None, life: RowLife, seed: int) -> None:
    of = spec("rowwise_adagrad", life=life)
    plain, ready = table(of), table(of)
    random = np.random.default_rng(seed)
    for number, ids in enumerate(batches(random, 25)):
        held = ready.rows
        prepared(ready, ids)
        assert ready.rows == held, "what is prepared has no row yet"
        assert np.array_equal(values(plain, ids), values(ready, ids))
        if number % 3 == 0:
            # Another worker's push comes first.
            other = next(batches(random, 1))
            gradients = random.standard_normal((other.size, of.dim), np.float32)
            use(plain, other, gradients)
            use(ready, other, gradients)
        if number % 5 == 0:
            gone = ids[:: number + 2]
            plain.drop(gone, gone)
            ready.drop(gone, gone)
        gradients = random.standard_normal((ids.size, of.dim), np.float32)
        use(plain, ids, gradients)
        use(ready, ids, gradients)
        for bucket in range(of.buckets):
            assert same(plain.contents(bucket), ready.contents(bucket))


def test_a_prepared_push_enlarges_no_map(small_pieces: None, monkeypatch: pytest.MonkeyPatch) -> None:
    held = table(spec())
    for first in range(0, 6000, 1000):
        ids = np.arange(first, first + 1000)
        assert prepared(held, ids) > 2
        with monkeypatch.context() as during:
            during.setattr(RowStore, "_resize", lambda *arguments: pytest.fail("a map grows in the push"))
            use(held, ids)
    assert held.rows == 6000


def test_a_map_that_has_grown_meanwhile_is_left_alone(small_pieces: None) -> None:
    store = RowStore(8, 1, with_uses=False)
    ids = np.arange(1000)
    store.look_up(ids, np.empty((1000, 1), np.float32))
    assert store.prepare(ids), "ids are compared first"
    assert store.prepare(ids), "then maps grow, one at a time"
    store.insert(np.arange(5000, 25_000), 1)
    before = store._capacities.copy()
    assert not store.prepare(ids)
    assert np.array_equal(store._capacities, before)


def test_an_id_that_comes_twice_is_noticed_all_the_same() -> None:
    held = table(spec())
    twice, once = np.array([1, 2, 3, 2]), np.array([1, 2, 3, 4])
    for ids in (twice, once, twice):
        assert prepared(held, ids) >= 1
        assert held.has_duplicates(ids) == (ids is twice)
    assert held.has_duplicates(np.array([4, 4]))
    assert not held.has_duplicates(np.array([4, 5]))
    assert held.prepare(np.array([7])) is False, "what nobody has looked up is not prepared"


def test_ids_of_a_lookup_are_compared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    held, ids = table(spec()), np.arange(100)
    prepared(held, ids)
    compared: list[int] = []
    monkeypatch.setattr("ps_server.tables.invalid.unique", lambda these: compared.append(these.size))
    monkeypatch.setattr(store_module, "unique", lambda these: compared.append(these.size))
    assert not held.has_duplicates(ids.copy())
    held.prepare(ids)
    assert compared == []


def test_memory_comes_before_the_rows_and_some_more() -> None:
    store = RowStore(4, 16, with_uses=False)
    ids = np.arange(20_000)
    store.look_up(ids, np.empty((ids.size, 16), np.float32))
    ahead = store.memory_ahead(ids)
    assert ahead is not None
    ahead()
    assert store.memory_ahead(ids) is None, "it is there"
    assert resident(store.rows[: ids.size]) == 1.0
    store.insert(ids, 1)
    more = np.arange(20_000, 21_000)
    store.look_up(more, np.empty((more.size, 16), np.float32))
    beyond = store.memory_ahead(more)
    assert beyond is not None
    beyond()
    assert resident(store.rows[:22_000]) == 1.0, "as many more"
    known = np.arange(100)
    store.look_up(known, np.empty((known.size, 16), np.float32))
    assert store.memory_ahead(known) is None
    store.remove(ids)
    assert store._populated == store.count == 0
    assert resident(store.rows[512:22_000]) == 0.0, "it is given back with the rows"


def test_rows_that_are_there_need_no_memory() -> None:
    store, ids = RowStore(4, 1, with_uses=False), np.arange(100)
    store.insert(ids, 1)
    assert store.memory_ahead(ids) is None, "nobody has looked them up"
    store.look_up(ids, np.empty((ids.size, 1), np.float32))
    assert store.memory_ahead(ids) is None


def test_memory_in_use_keeps_its_values_while_it_is_taken() -> None:
    column, count = Reserved(1 << 16, 1, np.int64), 1 << 16
    begun = threading.Event()

    def take() -> None:
        begun.set()
        for _ in range(20):
            column.populate(0, count)

    helper = threading.Thread(target=take)
    helper.start()
    assert begun.wait(60)
    for turn in range(1, 50):
        column.array[:, 0] = np.arange(count) * turn
        assert np.array_equal(column.array[:, 0], np.arange(count) * turn)
    helper.join()
    Reserved(10, 0, np.float32).populate(0, 10)
