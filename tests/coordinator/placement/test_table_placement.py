"""Which shard holds which buckets: each exactly one, evenly, and no more moves than that takes."""

from collections import Counter
from dataclasses import replace
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from ps_protocol.model.spec import ShardMap
from ps_server.coordinator.placement.tables import bucket_moves, place_tables, shares
from ps_server.coordinator.placement.variables import Balanced, as_before, first_map
from tests.coordinator.tables import bucket_counts, model, shard_numbers, table, tables_of
from tests.support.length import examples


def spread(counts: list[int]) -> int:
    return max(counts) - min(counts)


def per_shard(owners: tuple[tuple[int, ...], ...], shards: tuple[int, ...]) -> list[list[int]]:
    """For each table, how many buckets each shard holds."""
    return [[held.count(shard) for shard in shards] for held in owners]


def moved(shard_map: ShardMap, shards: tuple[int, ...], *, balance: bool) -> tuple[ShardMap, int]:
    """After all moves, and how many those were."""
    tables = [list(owners) for owners in shard_map.tables]
    moves = list(bucket_moves(shard_map, shards, balance))
    for bucket, to in moves:
        assert tables[bucket.table][bucket.number] == bucket.shard != to
        tables[bucket.table][bucket.number] = to
    return replace(shard_map, tables=tuple(map(tuple, tables))), len(moves)


@st.composite
def scattered(draw: st.DrawFn) -> ShardMap:
    """A model whose buckets lie anywhere."""
    counts = draw(bucket_counts)
    shard = st.integers(0, 6)
    owners = tuple(tuple(draw(st.lists(shard, min_size=count, max_size=count))) for count in counts)
    return ShardMap(1, model(*tables_of(counts)), 7, (), tables=owners)


@given(bucket_counts, shard_numbers)
def test_at_first_every_bucket_has_one_shard_and_shards_have_equally_many_of_each_table_and_of_all(
    counts: list[int], shards: tuple[int, ...]
) -> None:
    owners = place_tables(tables_of(counts), shards)
    assert [len(held) for held in owners] == counts
    assert {shard for held in owners for shard in held} <= set(shards)
    held = per_shard(owners, shards)
    assert all(spread(each) <= 1 for each in held)
    assert spread([sum(column) for column in zip(*held, strict=True)]) <= 1


@given(bucket_counts, shard_numbers)
def test_at_first_each_shard_has_one_run_of_each_table(counts: list[int], shards: tuple[int, ...]) -> None:
    for held in place_tables(tables_of(counts), shards):
        assert all(before <= after for before, after in pairwise(held))


def test_a_first_map_places_tables_beside_variables_and_a_model_may_have_tables_alone() -> None:
    shard_map = first_map(model(table(buckets=4), table("b", buckets=2), rows=10), [1, 3], Balanced())
    assert shard_map.tables == ((1, 1, 3, 3), (1, 3))
    assert (shard_map.shards, shard_map.holders) == (4, [1, 3])
    alone = first_map(model(table(buckets=4)), [0, 2], Balanced())
    assert (alone.slices, alone.holders) == ((), [0, 2])


@given(scattered(), shard_numbers, st.booleans())
@examples(300)
def test_whatever_moves_ends_on_a_used_shard_and_nothing_more_moves_then(
    shard_map: ShardMap, shards: tuple[int, ...], balance: bool
) -> None:
    done, _ = moved(shard_map, shards, balance=balance)
    assert set(done.holders) <= set(shards)
    assert moved(done, shards, balance=balance) == (done, 0)
    assert moved(shard_map, shards, balance=balance)[0] == done


@given(scattered(), shard_numbers)
@examples(300)
def test_balanced_shards_have_equally_many_of_each_table_and_of_all(
    shard_map: ShardMap, shards: tuple[int, ...]
) -> None:
    held = per_shard(moved(shard_map, shards, balance=True)[0].tables, shards)
    assert all(spread(each) <= 1 for each in held)
    assert spread([sum(column) for column in zip(*held, strict=True)]) <= 1


@given(scattered(), shard_numbers)
@examples(300)
def test_nothing_moves_that_need_not(shard_map: ShardMap, shards: tuple[int, ...]) -> None:
    for number, (wanted, owners) in enumerate(
        zip(shares(shard_map.spec.tables, shards, shard_map.tables), shard_map.tables, strict=True)
    ):
        surplus = sum(max(0, count - wanted.get(shard, 0)) for shard, count in Counter(owners).items())
        assert surplus == sum(bucket.table == number for bucket, _ in bucket_moves(shard_map, shards, True))


@given(bucket_counts, st.integers(2, 6), st.data())
def test_a_drain_moves_what_the_drained_shards_hold_and_evenly(
    counts: list[int], shards: int, data: st.DataObject
) -> None:
    drained = data.draw(st.sets(st.integers(0, shards - 1), min_size=1, max_size=shards - 1))
    before = first_map(model(*tables_of(counts)), range(shards), Balanced())
    left = tuple(number for number in range(shards) if number not in drained)
    done, count = moved(before, left, balance=False)
    assert count == sum(owner in drained for owners in before.tables for owner in owners)
    assert all(spread(each) <= 1 for each in per_shard(done.tables, left))


@given(bucket_counts, st.integers(1, 6))
def test_a_new_shard_gets_its_share_and_the_others_exchange_at_most_one_bucket_of_a_table(
    counts: list[int], shards: int
) -> None:
    before = first_map(model(*tables_of(counts)), range(shards), Balanced())
    moves = list(bucket_moves(before, range(shards + 1), balance=True))
    exchanged = Counter((bucket.table, bucket.shard) for bucket, to in moves if to != shards)
    assert max(exchanged.values(), default=0) <= 1
    assert moved(before, tuple(range(shards)), balance=True) == (before, 0)


def test_many_tables_of_one_bucket_spread_over_the_shards() -> None:
    tables = tables_of([1] * 6)
    crowded = ShardMap(1, model(*tables), 2, (), tables=((0,),) * 6)
    done, count = moved(crowded, (0, 1), balance=True)
    assert ([owners[0] for owners in done.tables].count(1), count) == (3, 3)


def test_a_restored_model_is_placed_as_it_was_on_as_many_shards_whatever_their_numbers() -> None:
    spec = model(table("a", 4), table("b", 4), rows=8)
    known = replace(
        first_map(spec, [0, 2], Balanced()), epoch=9, tables=((0, 2, 2, 2), (2, 0, 0, 0)), restored_from="/old"
    )
    declared = first_map(replace(spec, tables=spec.tables[::-1]), [0, 1], Balanced())
    placed = as_before(declared, known)
    assert placed is not None
    assert placed.tables == ((1, 0, 0, 0), (0, 1, 1, 1))
    assert [s.shard for s in placed.slices] == [0, 1]
    assert (placed.epoch, placed.restored_from) == (1, "")
    assert as_before(first_map(spec, range(3), Balanced()), known) is None
