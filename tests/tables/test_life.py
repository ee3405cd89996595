"""When a row comes to be, and when it goes."""

from __future__ import annotations

import numpy as np
import pytest

from ps_protocol.model.tables import Eviction, RowLife
from ps_server.tables import retention
from ps_server.tables.table import ShardTable
from tests.tables.samples import NO_IDS, ids_there, spec, table, use, values


def _drop_all(held: ShardTable, now: float = 0.0, keep: np.ndarray = NO_IDS) -> tuple[set[int], set[int]]:
    rows, waiting = set[int](), set[int]()
    while True:
        ids, waiting_ids = held.to_drop(now, keep)
        if not ids.size and not waiting_ids.size:
            return rows, waiting
        held.drop(ids, waiting_ids)
        rows |= set(ids.tolist())
        waiting |= set(waiting_ids.tolist())


# -- coming


def test_an_id_gets_a_row_at_its_nth_use_and_gradients_before_are_dropped() -> None:
    held = table(spec("sgd", lr=1.0, life=RowLife(admit_after=3)))
    first, ones = values(held, [7]), np.ones((1, 4), np.float32)
    for _ in range(2):
        use(held, [7], ones)
        assert (held.rows, held.waiting) == (0, 1)
        assert (values(held, [7]) == first).all()
    use(held, [7], ones)
    assert (held.rows, held.waiting, held.inserted) == (1, 0, 1)
    np.testing.assert_allclose(values(held, [7]), first - 1, rtol=1e-6)


def test_uses_before_admission_count_for_eviction() -> None:
    held = table(spec(life=RowLife(admit_after=3, max_rows=8, eviction=Eviction.LFU), buckets=1))
    for _ in range(4):
        use(held, [7])
    assert held.contents(0).uses.tolist() == [4]


def test_a_load_does_not_wait() -> None:
    held = table(spec(life=RowLife(admit_after=3)))
    use(held, [7])
    held.load(np.array([7, 8]), np.ones((2, 4), np.float32), with_state=False, only_new=False)
    assert (held.rows, held.waiting) == (2, 0)


def test_chance_admits_as_often_as_told_and_alike_in_every_replay() -> None:
    def admitted(seed: int) -> list[set[int]]:
        held = table(spec(life=RowLife(admit_probability=0.2), seed=seed))
        there = []
        for _ in range(4):
            use(held, range(5000))
            there.append(ids_there(held))
        return there

    first = admitted(1)
    assert first == admitted(1)
    assert first != admitted(2)
    for uses, there in enumerate(first, 1):
        assert abs(len(there) / 5000 - (1 - 0.8**uses)) < 0.02
    assert not table(spec(life=RowLife(admit_probability=0.2))).waiting


# -- going


def test_rows_go_that_were_not_used_in_so_many_updates() -> None:
    held = table(spec(life=RowLife(expire_after_updates=3)))
    use(held, [1, 2, 3])
    for _ in range(2):
        use(held, [2])
    values(held, [3])
    assert _drop_all(held) == (set(), set())
    use(held, [4])
    assert _drop_all(held) == ({1, 3}, set())
    assert ids_there(held) == {2, 4}
    assert (held.expired, held.evicted) == (2, 0)


def test_rows_go_that_were_not_used_for_so_many_seconds() -> None:
    held = table(spec(life=RowLife(expire_after_seconds=100)))
    use(held, [1, 2])
    assert _drop_all(held, 1000.0) == (set(), set())
    use(held, [2])
    assert _drop_all(held, 1050.0) == (set(), set())
    assert _drop_all(held, 1099.9) == (set(), set())
    assert _drop_all(held, 1100.0) == ({1}, set())
    assert _drop_all(held, 1149.9) == (set(), set())
    assert _drop_all(held, 1150.0) == ({2}, set())


def test_seconds_are_told_apart_to_a_64th_of_the_time() -> None:
    calendar = retention.Calendar(RowLife(expire_after_seconds=64))
    for second in range(1000):
        through = calendar.expired_through(float(second), second)
        assert through == (second - 64 if second >= 64 else -1)
    assert len(calendar._samples) <= 66


def test_a_clock_set_back_lets_nothing_go_early() -> None:
    calendar = retention.Calendar(RowLife(expire_after_seconds=10))
    assert calendar.expired_through(1000.0, 5) == -1
    assert calendar.expired_through(500.0, 6) == -1
    assert calendar.expired_through(509.0, 7) == -1
    assert calendar.expired_through(1010.0, 8) == 5


def test_ids_that_wait_expire_too() -> None:
    held = table(spec(life=RowLife(admit_after=9, expire_after_updates=2)))
    use(held, [1, 2])
    use(held, [2])
    use(held, [3])
    assert _drop_all(held) == (set(), {1})
    assert held.waiting == 2


def test_the_least_recently_used_rows_make_room() -> None:
    held = table(spec(life=RowLife(max_rows=128, eviction=Eviction.LRU)))
    for id_ in range(130):
        use(held, [id_])
    use(held, [0])
    assert _drop_all(held) == ({1, 2, 3, 4}, set())
    assert (held.rows, held.evicted) == (126, 4)


def test_the_least_frequently_used_rows_make_room_the_older_first() -> None:
    held = table(spec(life=RowLife(max_rows=8, eviction=Eviction.LFU)))
    use(held, range(9))
    use(held, range(5))
    use(held, [8])
    use(held, [10])
    assert held.rows == 10
    went, _ = _drop_all(held)
    assert len(went) == 2
    assert went < {5, 6, 7}


def test_as_many_rows_as_allowed_may_stay() -> None:
    held = table(spec(life=RowLife(max_rows=8, eviction=Eviction.LRU)))
    use(held, range(8))
    assert _drop_all(held) == (set(), set())


@pytest.mark.parametrize("eviction", [Eviction.LRU, Eviction.LFU])
def test_a_row_that_is_kept_never_goes(eviction: Eviction) -> None:
    held = table(spec(life=RowLife(max_rows=64, eviction=eviction, expire_after_updates=5)))
    for _ in range(3):
        use(held, range(200))
    keep = np.arange(50, 150)
    went, _ = _drop_all(held, keep=keep)
    assert went == set(range(200)) - set(keep.tolist())
    for _ in range(9):
        use(held, [])
    assert _drop_all(held, keep=keep[:60])[0] == set(range(110, 150))
    assert ids_there(held) == set(range(50, 110))


def test_waiting_ids_are_as_many_as_rows_may_be_at_most() -> None:
    held = table(spec(life=RowLife(admit_after=3, max_rows=64)))
    use(held, range(50))
    use(held, range(100, 150))
    rows, waiting = _drop_all(held, keep=np.arange(10))
    assert not rows
    assert waiting < set(range(10, 50))
    assert held.waiting <= 64


def test_a_table_says_whether_its_rows_ever_go() -> None:
    lives = {
        RowLife(): False,
        RowLife(admit_after=3): False,
        RowLife(max_rows=64): False,
        RowLife(max_rows=64, admit_after=3): True,
        RowLife(max_rows=64, eviction=Eviction.LFU): True,
        RowLife(expire_after_updates=1): True,
        RowLife(expire_after_seconds=1): True,
    }
    assert [table(spec(life=each)).ages for each in lives] == list(lives.values())


@pytest.mark.parametrize("eviction", [Eviction.LRU, Eviction.LFU])
def test_of_very_many_rows_the_oldest_go_in_bounded_lots(eviction: Eviction, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention, "WINDOW_ROWS", 100)
    monkeypatch.setattr(retention, "LOT_ROWS", 30)
    held = table(spec(life=RowLife(max_rows=1024, eviction=eviction)))
    for begin in range(0, 2000, 50):
        use(held, range(begin, begin + 50))
    keep = np.arange(0, 2000, 40)
    lots = []
    for _ in range(300):
        ids, _ = held.to_drop(0.0, keep)
        assert ids.size <= 30
        held.drop(ids, NO_IDS)
        lots.append(ids)
    assert held.rows <= 1024
    went = np.concatenate(lots)
    assert not np.isin(went, keep).any()
    assert went.max() < 1400
    assert held.evicted == went.size


def test_of_very_many_rows_all_expired_ones_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention, "WINDOW_ROWS", 100)
    monkeypatch.setattr(retention, "LOT_ROWS", 30)
    held = table(spec(life=RowLife(expire_after_updates=2)))
    use(held, range(3000))
    use(held, range(0, 3000, 3))
    use(held, [])
    went = set[int]()
    for _ in range(200):
        ids, _ = held.to_drop(0.0, NO_IDS)
        assert ids.size <= 30
        held.drop(ids, NO_IDS)
        went |= set(ids.tolist())
    assert went == set(range(3000)) - set(range(0, 3000, 3))
