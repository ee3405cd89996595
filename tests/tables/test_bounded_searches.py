"""A search in a damaged map ends, with a typed error: no thread of a shard may go round for ever."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from ps_protocol.errors import InternalError
from ps_protocol.model import ids as compiled
from ps_protocol.model.tables import Ids
from ps_server.tables.store import RowStore

HERE = np.arange(5)
MISSING = np.arange(100, 100 + 64)


def _store() -> RowStore:
    store = RowStore(1, 2, with_uses=True)
    store.insert(HERE, 1)
    return store


def _fill(store: RowStore, tag: int | None) -> None:
    """No place of the map is empty any more; of other ids (None: tags as they were) or with one tag."""
    block, capacity = store._blocks[0], int(store._capacities[0])
    tags = block[4 * capacity :]
    tags[tags == 0] = 1 if tag is None else tag
    if tag is not None:
        tags[:] = tag


@pytest.mark.parametrize("tag", [None, *range(1, 256, 51)])
@pytest.mark.parametrize(
    "search",
    [lambda s: s.find(MISSING), lambda s: s.insert(MISSING, 2), lambda s: s.remove(MISSING)],
    ids=["find", "insert", "remove"],
)
def test_a_search_in_a_map_without_an_empty_place_ends(search: Callable[[RowStore], object], tag: int | None) -> None:
    store = _store()
    _fill(store, tag)
    with pytest.raises(InternalError, match="does not end") as caught:
        search(store)
    assert caught.value.remedy


def test_an_insertion_of_more_ids_than_there_was_room_made_for_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    store = _store()
    monkeypatch.setattr(store, "_too_small", lambda ids, are_new: [])
    with pytest.raises(InternalError):
        store.insert(MISSING, 2)


@pytest.mark.parametrize("ids", [MISSING[:1], np.array([3, 3])], ids=["not there", "twice"])
def test_a_removal_of_what_is_not_there_ends(ids: Ids) -> None:
    with pytest.raises(InternalError):
        _store().remove(ids)


def test_rows_of_a_bucket_that_holds_more_than_it_counts_are_not_written_beyond_their_end() -> None:
    store = _store()
    store.counts[0] = 3
    with pytest.raises(InternalError):
        store.of_bucket(0)


def test_a_row_that_its_map_does_not_hold_ends_the_removal_that_looks_for_it() -> None:
    store = _store()
    rows = store._blocks[0][: 4 * int(store._capacities[0])].view(np.uint32)
    rows[rows == 4] = 9  # The last row, which would move into the hole.
    with pytest.raises(InternalError):
        store.remove(HERE[:1])


def _unmixed(bits: np.ndarray) -> Ids:
    """The ids that ``mix`` makes ``bits`` of, as who wants collisions computes them."""

    def unshifted(value: np.ndarray, shift: int) -> np.ndarray:
        found = value
        for _ in range(64 // shift):
            found = value ^ (found >> np.uint64(shift))
        return found

    bits = unshifted(bits, 31) * np.uint64(pow(0x94D049BB133111EB, -1, 1 << 64))
    bits = unshifted(bits, 27) * np.uint64(pow(0xBF58476D1CE4E5B9, -1, 1 << 64))
    return (unshifted(bits, 30) - np.uint64(0x9E3779B97F4A7C15)).view(np.int64)


@pytest.mark.parametrize("shift", [8, 12, 44], ids=["one place of a map", "another", "one place of a batch"])
def test_ids_that_were_chosen_to_collide_are_spread(shift: int) -> None:
    count = 20_000
    ids = _unmixed((np.arange(1, count + 1, dtype=np.uint64) << np.uint64(shift)) | np.uint64(5))
    assert compiled.buckets_of(ids, 256).max() == compiled.buckets_of(ids, 256).min()
    repeated = np.concatenate([ids[::-1], ids])
    found, places = compiled.unique(repeated)
    assert np.array_equal(found, ids[::-1])
    assert np.array_equal(found[places], repeated)
    assert compiled._unique(ids)[1].size == 0, "they are sorted instead"
    store = RowStore(256, 1, with_uses=False)
    store.insert(ids, 1)
    assert np.array_equal(store.find(ids), np.arange(count))
    (bucket,) = np.flatnonzero(store.counts)
    free = np.flatnonzero(store._blocks[int(bucket)][4 * int(store._capacities[bucket]) :] == 0)
    assert np.diff(free, prepend=-1).max() < 1000, "no search is longer"
    store.remove(ids)
    assert store.count == 0
