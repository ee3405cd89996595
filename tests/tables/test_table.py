"""Updates, loads and drops of a table's rows; the same rows however the table is spread."""

from __future__ import annotations

import numpy as np
import pytest

from ps_protocol.errors import InvalidRequest, TableFull
from ps_protocol.model.ids import buckets_of
from ps_protocol.model.row_optimizers import ROW_OPTIMIZERS
from ps_protocol.model.tables import Eviction, RowLife
from ps_protocol.wire.row_means import merge_rows
from ps_server.tables.step import RowStep
from ps_server.tables.table import ShardTable
from tests.tables.samples import NO_IDS, ids_there, random_ids, same, spec, table, use, values


@pytest.mark.parametrize("name", list(ROW_OPTIMIZERS))
def test_rows_are_bitwise_the_same_on_one_shard_and_on_three(name: str) -> None:
    random = np.random.default_rng(11)
    life = RowLife(admit_after=2)
    ids = random_ids(random, 500)
    whole = table(spec(name, dim=5, buckets=16, life=life))
    shards = [ShardTable(whole.spec, range(shard, 16, 3)) for shard in range(3)]
    finer = table(spec(name, dim=5, buckets=64, life=life))
    for _ in range(8):
        pushes = [
            (chosen, random.standard_normal((chosen.size, 5)).astype(np.float32))
            for chosen in (random.permutation(ids)[:200] for _ in range(3))
        ]
        merged, mean = merge_rows(pushes, 3)
        use(whole, merged, mean)
        use(finer, merged, mean)
        for number, shard in enumerate(shards):
            owned = [buckets_of(chosen, 16) % 3 == number for chosen, _ in pushes]
            parts = [(c[own], g[own]) for (c, g), own in zip(pushes, owned, strict=True)]
            use(shard, *merge_rows(parts, 3))
    expected = values(whole, ids).tobytes()
    assert values(finer, ids).tobytes() == expected
    assert ids_there(finer) == ids_there(whole) == set().union(*map(ids_there, shards))
    owners = buckets_of(ids, 16) % 3
    for number, shard in enumerate(shards):
        own = owners == number
        assert values(shard, ids[own]).tobytes() == values(whole, ids[own]).tobytes()


def test_an_update_without_rows_counts() -> None:
    held = table(spec("adam"))
    use(held, [])
    assert (held.updates, held.rows) == (1, 0)


def test_an_update_says_when_its_rows_were_used() -> None:
    held = table(spec(buckets=1))
    use(held, [1, 2])
    use(held, [2, 3])
    contents = held.contents(0)
    assert (contents.ids.tolist(), contents.touched.tolist()) == ([1, 2, 3], [1, 2, 2])


@pytest.mark.parametrize("life", [RowLife(), RowLife(admit_after=2), RowLife(admit_probability=0.5)])
def test_skipped_buckets_are_left_alone_by_every_change(life: RowLife) -> None:
    random = np.random.default_rng(12)
    ids = random_ids(random, 400)
    skip = np.arange(8) % 2 == 0

    def change(held: ShardTable, skipped: np.ndarray | None) -> None:
        for _ in range(3):
            rows = np.ones((ids.size, 4), np.float32)
            held.apply(RowStep(0, ids, rows, held.updates + 1, held.spec.options), 1.0, skipped)
        held.load(ids[:200], np.full((200, 4), 3, np.float32), with_state=False, only_new=False, skip=skipped)
        held.drop(ids[100:150], ids[150:200], skipped)

    held, everything = table(spec("adagrad", life=life)), table(spec("adagrad", life=life))
    use(held, ids[::2])
    use(everything, ids[::2])
    before = [held.contents(bucket) for bucket in range(8)]
    change(held, skip)
    change(everything, None)
    assert held.updates == 4
    for bucket in range(8):
        expected = before[bucket] if skip[bucket] else everything.contents(bucket)
        assert same(held.contents(bucket), expected)


def test_loaded_rows_are_written_with_their_state_or_reset_it() -> None:
    held = table(spec("adagrad", initial=0.5, dim=2, buckets=1))
    use(held, [1, 2], np.ones((2, 2), np.float32))
    assert held.load(np.array([2, 3]), np.full((2, 2), 7, np.float32), with_state=False, only_new=False) == 2
    contents = held.contents(0)
    assert contents.rows[1:].tolist() == [[7, 7, 0.5, 0.5]] * 2
    assert contents.rows[0, 2:].tolist() == [1.5, 1.5]
    assert contents.touched.tolist() == [1, 1, 1]
    assert held.load(np.array([1]), np.full((1, 4), 9, np.float32), with_state=True, only_new=False) == 1
    assert held.contents(0).rows[0].tolist() == [9, 9, 9, 9]


def test_a_load_of_new_rows_leaves_the_others_as_they_are() -> None:
    held = table(spec())
    use(held, [1, 2])
    before = values(held, [1, 2])
    assert held.load(np.array([1, 5, 2]), np.ones((3, 4), np.float32), with_state=False, only_new=True) == 1
    assert (values(held, [1, 2]) == before).all()
    assert (values(held, [5]) == 1).all()


def test_of_an_id_loaded_twice_the_last_row_holds() -> None:
    held = table(spec(dim=1))
    rows = np.arange(4, dtype=np.float32)[:, None]
    assert held.load(np.array([5, 6, 5, 5]), rows, with_state=False, only_new=False) == 2
    assert held.rows == 2
    assert values(held, [5, 6]).tolist() == [[3], [1]]


def test_dropped_rows_have_initial_values_again() -> None:
    held = table(spec("adagrad"))
    first = values(held, [1, 2])
    use(held, [1, 2], np.ones((2, 4), np.float32))
    held.drop(np.array([2, 77, 2]), np.array([78]))
    assert held.rows == 1
    assert (values(held, [2]) == first[1]).all()
    assert (values(held, [1]) != first[0]).all()


def test_an_id_of_another_shard_is_named() -> None:
    held = ShardTable(spec(), [0, 1])
    ids = np.arange(100)
    buckets = buckets_of(ids, 8)
    held.check_here(ids[buckets < 2])
    held.check_here(NO_IDS)
    foreign = int(ids[buckets == 5][0])
    with pytest.raises(InvalidRequest, match=f"'?id {foreign}, bucket 5"):
        held.check_here(np.append(ids[buckets < 2], foreign))


def test_a_table_that_refuses_is_full_at_its_share() -> None:
    held = ShardTable(spec(life=RowLife(max_rows=80)), [0, 1, 2, 3])
    ids = np.arange(400)
    mine = ids[buckets_of(ids, 8) < 4]
    assert held.share == 40
    held.room_for(mine[:40])
    use(held, mine[:40])
    held.room_for(mine[:40])
    with pytest.raises(TableFull, match="at most 40 rows"):
        held.room_for(mine[30:41])
    assert held.rows == 40
    held.drop(mine[:1], NO_IDS)
    held.room_for(mine[40:41])


@pytest.mark.parametrize("life", [RowLife(max_rows=8, admit_after=3), RowLife(max_rows=8, admit_probability=0.01)])
def test_ids_that_get_no_row_need_no_room(life: RowLife) -> None:
    held = table(spec(life=life))
    held.room_for(np.arange(20))
    with pytest.raises(TableFull):
        held.room_for(np.arange(20), loading=True)


def test_a_table_that_evicts_always_has_room() -> None:
    held = table(spec(life=RowLife(max_rows=8, eviction=Eviction.LRU)))
    held.room_for(np.arange(100))


def test_the_memory_of_the_machine_is_a_limit_of_every_table() -> None:
    held = table(spec())
    held._store.capacity = 10
    use(held, range(9))
    held.room_for(np.arange(10))
    with pytest.raises(TableFull, match="memory of this machine"):
        held.room_for(np.arange(11))


def test_a_replay_in_the_same_order_gives_the_same_bytes() -> None:
    def run() -> list[bytes]:
        random = np.random.default_rng(13)
        held = table(spec("rowwise_adagrad", life=RowLife(admit_probability=0.3, max_rows=64, eviction=Eviction.LRU)))
        for step in range(30):
            ids = np.unique(random.integers(0, 300, 60))
            use(held, ids, random.standard_normal((ids.size, 4)).astype(np.float32))
            if step % 5 == 4:
                held.drop(*held.to_drop(float(step), ids[:5]))
        return [b"".join(held.contents(bucket).pieces()) for bucket in range(8)]

    assert run() == run()
