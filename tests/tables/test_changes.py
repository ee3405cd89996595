"""What a reader that follows a table can ask for."""

from __future__ import annotations

import numpy as np
import pytest

from ps_protocol.model.ids import buckets_of
from ps_protocol.model.tables import Eviction, RowLife
from ps_server.tables import changes
from tests.tables.samples import NO_IDS, spec, table, use, values


def test_rows_used_after_an_update_are_found_piece_by_piece() -> None:
    held = table(spec("adagrad", life=RowLife(max_rows=1000, eviction=Eviction.LFU)))
    use(held, range(100))
    use(held, range(20, 40))
    use(held, range(30, 50))
    found = np.concatenate([held.changed(begin, begin + 30, 1) for begin in range(0, 120, 30)])
    copied = held.copy_ids(held.last_uses(found)[0])
    assert sorted(copied.ids) == list(range(20, 50))
    assert dict(zip(copied.ids, copied.touched, strict=True)) == {i: 2 if i < 30 else 3 for i in range(20, 50)}
    assert copied.rows[:, :4].tobytes() == values(held, copied.ids).tobytes()
    assert copied.rows.shape == (30, held.spec.width)
    assert set(copied.uses[copied.ids < 30]) == {2}
    assert held.changed(0, 100, 3).size == 0


def test_a_scan_from_the_last_row_to_the_first_misses_none_that_stays() -> None:
    held = table(spec())
    use(held, range(1000))
    random, seen = np.random.default_rng(14), set[int]()
    for begin in range(900, -1, -100):
        seen |= set(held.last_uses(held.changed(begin, begin + 100, 0))[0].tolist())
        held.drop(random.integers(0, 1000, 30), NO_IDS)
    here, _ = held.last_uses(np.arange(held.rows))
    assert set(here.tolist()) <= seen


def test_deletions_are_told_in_order_from_any_change_on() -> None:
    held = table(spec())
    use(held, range(10))
    held.drop(np.array([3, 77, 1]), NO_IDS)
    middle = held.changes
    held.drop(np.array([9]), NO_IDS)
    assert _deleted(held.deletions_since(0)) == [3, 1, 9]
    assert _deleted(held.deletions_since(middle)) == [9]
    assert _deleted(held.deletions_since(held.changes)) == []


def _deleted(ids: np.ndarray | None) -> list[int]:
    assert ids is not None
    return ids.tolist()  # type: ignore[no-any-return]


def test_buckets_written_from_outside_have_arrived() -> None:
    held = table(spec())
    use(held, range(100))
    held.drop(np.array([5]), NO_IDS)
    assert not held.arrived.any()
    before = held.changes
    held.put(held.contents(3))
    held.load(np.array([8]), np.ones((1, 4), np.float32), with_state=False, only_new=False)
    loaded = int(buckets_of(np.array([8]), 8)[0])
    assert set(np.flatnonzero(held.arrived > before)) == {3, loaded}
    assert held.arrived.max() == held.changes
    held.drop(np.array([6]), NO_IDS)
    assert _deleted(held.deletions_since(0)) == [5, 6]
    assert _deleted(held.deletions_since(before)) == [6]


@pytest.mark.parametrize("lots", [[7, 5, 11], [40], [1] * 25, [9, 9]])
def test_of_deletions_too_long_ago_it_is_said_that_they_are_not_known(
    lots: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(changes, "KEPT_CHANGES", 10)
    remembered, told, next_id = changes.Changes(4), list[int](), 0
    for lot in lots:
        ids = np.arange(next_id, next_id + lot)
        next_id += lot
        remembered.delete(ids)
        told += ids.tolist()
    for since in range(len(told) + 1):
        ids_since = remembered.deletions_since(since)
        if len(told) - since > 10:
            assert ids_since is None
        else:
            assert _deleted(ids_since) == told[since:]
