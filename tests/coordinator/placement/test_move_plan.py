"""Which slices move: whole, few, to where they fit; checked over random models."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ps_protocol.cluster.view import ClusterView, Member, Role
from ps_protocol.errors import InvalidRequest, NotReady, UnknownModel, UnknownShard
from ps_protocol.model.layout import Layout
from ps_protocol.model.spec import DType, ModelSpec, ShardMap, Variable
from ps_server.coordinator.placement.move_plan import Move, MoveBatch, MoveRequest, MoveTarget, batches, plan, target_of
from ps_server.coordinator.placement.variables import Balanced, FixedShards, first_map
from tests.support.length import examples

Maps = dict[str, ShardMap]


def spec_of(*rows: int, name: str = "m", unsplit: bool = False) -> ModelSpec:
    """Variables of 4 bytes a row."""
    variables = tuple(Variable(f"v{i}", (count,), DType.FLOAT32) for i, count in enumerate(rows))
    return ModelSpec(name, "torch.optim.SGD", variables, ({"lr": 0.1},), unsplit=unsplit)


def size(shard_map: ShardMap, shard: int) -> int:
    return sum((s.row_end - s.row_begin) * 4 for s in shard_map.slices if s.shard == shard)


def sizes(maps: Maps, shards: tuple[int, ...]) -> dict[str, list[int]]:
    return {name: [size(m, shard) for shard in shards] for name, m in maps.items()}


def rows_of(shard_map: ShardMap) -> Counter[tuple[int, int, int]]:
    return Counter((s.variable, s.row_begin, s.row_end) for s in shard_map.slices)


def after(maps: Maps, made: list[MoveBatch]) -> Maps:
    return maps | {m.spec.name: m for batch in made for m in batch.maps}


def carried_out(maps: Maps, goal: MoveTarget, batch_bytes: int = 64 << 20) -> tuple[Maps, list[Move], list[MoveBatch]]:
    moves = plan(maps, goal)
    made = list(batches(maps, moves, batch_bytes))
    return after(maps, made), moves, made


def moved_bytes(moves: list[Move]) -> int:
    return sum(move.nbytes for move in moves)


def view_of(live: set[int], shards: int, spare: set[int] | None = None) -> ClusterView:
    members = tuple(Member(Role.SHARD, number, 100 + number, f"host:{number}") for number in sorted(live))
    return ClusterView(5, members, expected_shards=shards, spare=frozenset(spare or ()))


models = st.lists(st.lists(st.integers(0, 3000), min_size=1, max_size=12), min_size=1, max_size=3)
rules = st.one_of(st.just(Balanced()), st.builds(FixedShards, st.integers(1, 9)))
subsets = st.sets(st.integers(0, 5), min_size=1, max_size=6).map(lambda found: tuple(sorted(found)))


@st.composite
def jobs(draw: st.DrawFn) -> tuple[Maps, tuple[int, ...]]:
    """Models on some of six shards."""
    used, rule = draw(subsets), draw(rules)
    maps = {}
    for number, rows in enumerate(draw(models)):
        spec = spec_of(*rows, name=f"m{number}", unsplit=draw(st.booleans()))
        maps[spec.name] = first_map(spec, used, rule)
    return maps, used


@given(jobs(), subsets, st.booleans(), st.integers(1, 5000))
@examples(300)
def test_whatever_moves_every_slice_is_whole_and_on_one_used_shard_and_nothing_more_moves_then(
    job: tuple[Maps, tuple[int, ...]], shards: tuple[int, ...], balance: bool, batch_bytes: int
) -> None:
    maps, _ = job
    goal = MoveTarget(shards, balance)
    done, moves, made = carried_out(maps, goal, batch_bytes)
    for name, shard_map in done.items():
        assert rows_of(shard_map) == rows_of(maps[name])
        assert set(shard_map.holders) <= set(shards)
        assert shard_map.shards > max(shard_map.holders)
    assert moved_bytes(moves) == sum(batch.nbytes for batch in made)
    assert plan(done, goal) == []
    assert plan(maps, goal) == moves


@given(jobs(), subsets, st.integers(1, 5000))
@examples(200)
def test_each_batch_is_the_next_shard_map_and_holds_no_more_than_it_may_unless_one_slice_does(
    job: tuple[Maps, tuple[int, ...]], shards: tuple[int, ...], batch_bytes: int
) -> None:
    maps, _ = job
    _, moves, made = carried_out(maps, MoveTarget(shards, balance=True), batch_bytes)
    current, counted = dict(maps), 0
    for batch in made:
        changed = []
        for shard_map in batch.maps:
            before = current[shard_map.spec.name]
            assert shard_map.epoch == before.epoch + 1
            places = {(s.variable, s.row_begin, s.row_end): s.shard for s in before.slices}
            changed += [s.shard for s in shard_map.slices if places[s.variable, s.row_begin, s.row_end] != s.shard]
            current[shard_map.spec.name] = shard_map
        assert changed
        assert set(changed) == batch.receivers
        assert batch.nbytes <= batch_bytes or len(changed) == 1
        counted += len(changed)
    assert counted == len(moves)


@given(jobs(), subsets)
@examples(300)
def test_shards_are_within_five_percent_of_the_mean_or_no_slice_of_the_largest_would_help(
    job: tuple[Maps, tuple[int, ...]], shards: tuple[int, ...]
) -> None:
    done, _, _ = carried_out(job[0], MoveTarget(shards, balance=True))
    for name, loads in sizes(done, shards).items():
        mean = sum(loads) / len(shards)
        if max(loads) <= 1.05 * mean and min(loads) >= 0.95 * mean:
            continue
        largest = shards[loads.index(max(loads))]
        held = [4 * (s.row_end - s.row_begin) for s in done[name].slices if s.shard == largest]
        assert all(nbytes >= max(loads) - min(loads) for nbytes in held if nbytes)


@given(jobs(), st.data())
@examples(200)
def test_a_drain_moves_exactly_the_bytes_of_the_drained_shards(
    job: tuple[Maps, tuple[int, ...]], data: st.DataObject
) -> None:
    maps, used = job
    if len(used) == 1:
        return
    drained = data.draw(st.sets(st.sampled_from(used), min_size=1, max_size=len(used) - 1))
    _, moves, _ = carried_out(maps, MoveTarget(tuple(n for n in used if n not in drained), balance=False))
    assert moved_bytes(moves) == sum(size(m, shard) for m in maps.values() for shard in drained)


@given(st.lists(st.integers(1, 30), min_size=200, max_size=300), st.integers(1, 6))
@examples(50)
def test_a_new_shard_gets_its_share_and_no_more_and_the_others_exchange_nothing(rows: list[int], shards: int) -> None:
    maps = {"m": first_map(spec_of(*rows), range(shards), Balanced())}
    done, moves, _ = carried_out(maps, MoveTarget(tuple(range(shards + 1)), balance=True))
    assert {move.to for move in moves} == {shards}
    mean = 4 * sum(rows) / (shards + 1)
    assert 0.95 * mean <= size(done["m"], shards) <= mean + 4 * max(rows)


@given(st.lists(st.integers(1, 30), min_size=200, max_size=300), st.integers(1, 6))
@examples(50)
def test_what_was_placed_evenly_stays_where_it_is(rows: list[int], shards: int) -> None:
    maps = {"m": first_map(spec_of(*rows), range(shards), Balanced())}
    assert plan(maps, MoveTarget(tuple(range(shards)), balance=True)) == []


def test_an_unsplit_variable_stays_whole_and_a_model_of_one_slice_is_not_pushed_about() -> None:
    maps = {"m": first_map(spec_of(4000, unsplit=True), [0], Balanced())}
    assert plan(maps, MoveTarget((0, 1), balance=True)) == []
    (move,) = plan(maps, MoveTarget((1,), balance=False))
    assert (move.to, move.nbytes) == (1, 16_000)


def test_what_leaves_several_models_spreads_over_the_others() -> None:
    maps = {name: first_map(spec_of(100, name=name), [2], Balanced()) for name in "ab"}
    done, _, _ = carried_out(maps, MoveTarget((0, 1), balance=False))
    assert {name: m.holders for name, m in done.items()} == {"a": [0], "b": [1]}


def test_what_moves_lies_behind_what_its_next_shard_has_and_what_stays_keeps_its_place() -> None:
    maps = {"m": first_map(spec_of(4, 4, 4, 4), range(2), Balanced())}
    done, _, _ = carried_out(maps, MoveTarget((0,), balance=False))
    assert [s.variable for s in done["m"].slices] == [0, 2, 1, 3]


def test_of_slices_of_one_size_those_leave_that_are_last_in_memory() -> None:
    maps = {"m": first_map(spec_of(*[4] * 12), range(2), Balanced())}
    before = {shard: Layout.of(maps["m"], shard).slices for shard in range(2)}
    done, _, _ = carried_out(maps, MoveTarget((0, 1, 2), balance=True))
    for shard, spans in before.items():
        after = Layout.of(done["m"], shard).slices
        assert len(after) < len(spans)
        assert [(s.slice, s.begin) for s in after] == [(s.slice, s.begin) for s in spans[: len(after)]]


def test_the_map_keeps_what_it_says_of_a_checkpoint() -> None:
    maps = {"m": replace(first_map(spec_of(4, 4), range(2), Balanced()), restored_from="/there")}
    done, _, _ = carried_out(maps, MoveTarget((0,), balance=False))
    assert done["m"].restored_from == "/there"


def test_one_variable_moves_with_all_its_slices_and_nothing_else() -> None:
    maps = {"m": first_map(spec_of(900, 300), range(3), FixedShards(3))}
    goal = target_of(MoveRequest(to=(1,), model="m", variable="v0"), view_of({0, 1, 2}, 3), maps)
    done, moves, _ = carried_out(maps, goal)
    assert {move.piece.variable for move in moves} == {0}
    assert {s.shard for s in done["m"].slices if s.variable == 0} == {1}
    assert [s for s in done["m"].slices if s.variable == 1] == [s for s in maps["m"].slices if s.variable == 1]


@pytest.mark.parametrize(
    ("wish", "shards", "balance"),
    [
        (MoveRequest(), (0, 2), True),
        (MoveRequest(to=(3,)), (0, 2, 3), True),
        (MoveRequest(to=(0,)), (0, 2), True),
        (MoveRequest(drain=(2,)), (0,), False),
        (MoveRequest(to=(3,), drain=(2,)), (0, 3), False),
        (MoveRequest(drain=(1,)), (0, 2), False),
    ],
)
def test_a_wish_means_these_shards(wish: MoveRequest, shards: tuple[int, ...], balance: bool) -> None:
    assert target_of(wish, view_of({0, 2, 3}, 4, {1, 3}), {}) == MoveTarget(shards, balance)


@pytest.mark.parametrize(
    ("wish", "error", "says"),
    [
        (
            MoveRequest(to=(5,)),
            UnknownShard,
            r"no shard 5; .*expected: 0 to 3; remedy: add it first: ps-server --shard 5",
        ),
        (MoveRequest(drain=(4,)), UnknownShard, "no shard 4"),
        (MoveRequest(to=(3,)), NotReady, "a shard is missing; shard: 3; remedy: start it"),
        (
            MoveRequest(drain=(0, 1)),
            InvalidRequest,
            "has to hold the models; .*remedy: add one first: .*--shard 4",
        ),
        (MoveRequest(to=(1,), drain=(1,)), InvalidRequest, "both as a target and to be drained"),
        (MoveRequest(to=(1,), model="net", variable="w"), UnknownModel, "no model 'net'.*expected: 'm'"),
        (
            MoveRequest(to=(1,), model="m", variable="w"),
            InvalidRequest,
            r"no such variable or table; variable: w; .*v0, v1",
        ),
        (MoveRequest(to=(1,), model="m"), InvalidRequest, "name its model"),
        (MoveRequest(to=(0, 1), model="m", variable="v0"), InvalidRequest, "one target shard"),
    ],
)
def test_a_request_that_cannot_be_fulfilled_says_why_and_what_to_do(
    wish: MoveRequest, error: type[Exception], says: str
) -> None:
    maps = {"m": first_map(spec_of(9, 9), [0, 1], Balanced())}
    with pytest.raises(error, match=says):
        target_of(wish, view_of({0, 1, 2}, 4, {2, 3}), maps)
