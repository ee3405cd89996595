"""What leaves a shard that is busier than others, over random models with tables. Costs less than 1 CPU s."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ps_server.coordinator.placement.move_plan import MoveRequest, batches, pieces_to_move, plan, target_of
from ps_server.coordinator.placement.tables import BucketPlace
from ps_server.coordinator.placement.variables import Balanced, first_map
from tests.coordinator.placement.test_move_plan import view_of
from tests.coordinator.placement.test_table_moves import Maps, jobs
from tests.coordinator.tables import model, table
from tests.support.length import examples


@examples(100)
@given(jobs(), st.floats(0.0, 1.0), st.integers(1, 1 << 20))
def test_the_part_of_one_shard_goes_to_one_other_and_then_nothing_more(
    maps: Maps, part: float, batch_bytes: int
) -> None:
    used = sorted({piece.shard for each in maps.values() for piece in each.slices}) or [0]
    hot, to = used[0], used[0] + 1
    numbers = {*range(10)}
    goal = target_of(MoveRequest(relieve=hot, to=(to,), part=part), view_of(numbers, 10), maps)
    moves = plan(maps, goal)
    assert all(move.piece.shard == hot and move.to == to for move in moves)
    current = dict(maps)
    for batch in batches(maps, moves, batch_bytes):
        current |= {following.spec.name: following for following in batch.maps}
        left = plan(current, goal)
        assert len(left) < len(moves)
    assert not plan(current, goal)
    for name, before in maps.items():
        for number, owners in enumerate(before.tables):
            held, now = owners.count(hot), current[name].tables[number].count(hot)
            assert held - now == round(part * held)
        held_bytes = {piece: piece.row_end - piece.row_begin for piece in before.slices if piece.shard == hot}
        gone = sum(held_bytes.values()) - sum(
            piece.row_end - piece.row_begin for piece in current[name].slices if piece.shard == hot
        )
        assert gone <= part * sum(held_bytes.values())


def test_pieces_that_have_gone_or_whose_model_has_do_not_move_again() -> None:

    maps = {"m": first_map(model(table("t", 8)), (0, 1), Balanced())}
    pieces = pieces_to_move(maps, 0, 0.5)
    assert [each.piece for each in pieces] == [BucketPlace(0, 2, 0), BucketPlace(0, 3, 0)]
    goal = target_of(MoveRequest(relieve=0, to=(1,), part=0.5), view_of({0, 1}, 2), maps)
    assert not plan({}, goal)
