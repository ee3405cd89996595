"""What snapshots copy of a table: everything, then what has changed, which together are the table again."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ps_protocol.model.tables import RowLife
from ps_server.tables import changes
from ps_server.tables.bucket_contents import BucketChanges, BucketContents
from ps_server.tables.saves import SavedBuckets
from ps_server.tables.table import ShardTable
from tests.support.length import paired
from tests.support.seeds import drawn_seed
from tests.tables.samples import NO_IDS, random_ids, spec, table, use
from tests.tables.test_rows_on_disk import LIVES, act, memory_of, same

Saved = list[BucketContents | BucketChanges]


def save(held: ShardTable, since: SavedBuckets | None) -> Saved:
    made = held.save(since)
    found = [made.copy(bucket) for bucket in np.flatnonzero(held.here)]
    made.end("here")
    return found


def restore(into: ShardTable, saved: Saved) -> None:
    for each in saved:
        if isinstance(each, BucketChanges):
            into.put_changes(each)
        else:
            into.put(each)


def assert_same(one: ShardTable, other: ShardTable) -> None:
    assert all(same(one.contents(bucket), other.contents(bucket)) for bucket in range(one.spec.buckets))


@pytest.mark.parametrize(("life", "on_disk"), paired(list(LIVES), [True, False]))
def test_everything_and_the_changes_after_it_are_the_table_whatever_happened(
    tmp_path: Path, life: str, on_disk: bool
) -> None:
    seed = drawn_seed()
    of = spec("adagrad", dim=3, life=LIVES[life])
    held = ShardTable(of, range(of.buckets), memory_of(tmp_path, of, 50) if on_disk else None)
    random = np.random.default_rng(seed)
    ids = random_ids(random, 1000)
    parts: list[Saved] = []
    for number in range(120):
        act(held, np.random.default_rng([seed, number]), ids)
        if random.random() < 0.1:
            parts.append(save(held, held.saved))
    parts.append(save(held, held.saved))
    again = table(of)
    for part in parts:
        restore(again, part)
    assert_same(again, held)
    assert any(isinstance(each, BucketChanges) for part in parts for each in part)


def test_what_did_not_change_is_not_copied() -> None:
    held = table(spec("adagrad"))
    use(held, range(1000))
    whole = save(held, held.saved)
    use(held, range(10))
    held.drop(np.array([500, 501]), NO_IDS)
    changed = save(held, held.saved)
    assert all(isinstance(each, BucketChanges) for each in changed)
    assert sum(each.contents.ids.size for each in changed if isinstance(each, BucketChanges)) == 10
    assert sum(each.deleted.size for each in changed if isinstance(each, BucketChanges)) == 2
    assert sum(each.nbytes for each in changed) < 0.03 * sum(each.nbytes for each in whole)


def test_a_row_that_was_removed_and_came_back_before_the_first_copy_is_not_removed_by_the_second() -> None:
    held = table(spec())
    use(held, range(100))
    held.drop(np.array([7]), NO_IDS)
    use(held, [7])
    first = save(held, held.saved)
    use(held, [8])
    again = table(held.spec)
    restore(again, first)
    restore(again, save(held, held.saved))
    assert_same(again, held)


def test_a_bucket_that_was_loaded_into_or_came_is_copied_whole() -> None:
    held = table(spec())
    use(held, range(100))
    save(held, held.saved)
    held.load(np.array([3]), np.ones((1, 4), np.float32), with_state=False, only_new=False)
    found = save(held, held.saved)
    assert [type(each) for each in found].count(BucketContents) == 1


def test_after_more_deletions_than_are_remembered_everything_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changes, "KEPT_CHANGES", 64)
    held = table(spec())
    use(held, range(200))
    save(held, held.saved)
    held.drop(np.arange(100), NO_IDS)
    assert all(isinstance(each, BucketContents) for each in save(held, held.saved))


def test_a_waiting_id_that_was_admitted_and_removed_waits_no_more() -> None:
    held = table(spec(life=RowLife(admit_after=2)))
    use(held, range(20))
    first = save(held, held.saved)
    use(held, [4, 5])
    held.drop(np.array([4]), NO_IDS)
    again = table(held.spec)
    restore(again, first)
    restore(again, save(held, held.saved))
    assert_same(again, held)
    assert again.waiting == 18
