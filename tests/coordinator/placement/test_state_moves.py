"""What the cluster's state says while slices move, and when shards are added, used and spare."""

from dataclasses import replace

import pytest

from ps_protocol.cluster.view import Joined, JoinRequest, Role
from ps_protocol.errors import InvalidRequest, NotReady, Unavailable, UnknownShard
from ps_protocol.model.spec import ShardMap
from ps_server.coordinator.placement.move_plan import MoveTarget, batches, plan
from tests.coordinator.cluster import SPEC, Cluster
from tests.coordinator.persistence.test_persisted_state import restarted


def added(c: Cluster, index: int) -> Joined:
    c.joins += 1
    ask = JoinRequest(Role.SHARD, index, "host:1", f"token {c.joins}", add=True, take_over=True)
    return c.state.membership.join(ask, c.now).value


def two_shards(**settings: object) -> tuple[Cluster, list[Joined]]:
    """Two shards with a model, and a third that was added."""
    c = Cluster(expected_shards=2, **settings)
    shards = [c.shard(0), c.shard(1)]
    c.declare(c.worker())
    return c, [*shards, added(c, 2)]


def next_maps(c: Cluster, shards: tuple[int, ...], *, balance: bool = True) -> tuple[ShardMap, ...]:
    maps = c.state.placement.shard_maps
    return next(batches(maps, plan(maps, MoveTarget(shards, balance)), 1 << 30)).maps


def incarnations(shards: list[Joined]) -> dict[int, int]:
    return {shard.member.index: shard.member.incarnation for shard in shards}


def test_a_shard_is_added_as_a_spare_one_and_so_are_the_numbers_below_it() -> None:
    c = Cluster(expected_shards=2)
    joined = added(c, 4)
    assert joined.member.index == 4
    assert (c.state.view.expected_shards, c.state.view.spare) == (5, {2, 3, 4})
    assert c.state.view.used_shards == (0, 1)
    assert joined.revision == c.state.view.revision
    added(c, 3)
    assert c.state.view.expected_shards == 5


@pytest.mark.parametrize("index", [4096, 1 << 31])
def test_a_number_that_must_be_a_slip_is_not_added(index: int) -> None:
    c = Cluster()
    before = c.state.persisted_state()
    with pytest.raises(UnknownShard, match="no shard"):
        added(c, index)
    assert c.state.persisted_state() == before


def test_without_the_word_a_number_that_is_new_is_refused_and_the_remedy_names_it() -> None:
    with pytest.raises(UnknownShard, match="--add"):
        Cluster().shard(1)


def test_adding_takes_the_number_that_is_there_like_any_start() -> None:
    c = Cluster(expected_shards=2)
    old = c.shard(1)
    assert added(c, 1).member.incarnation > old.member.incarnation
    assert c.state.view.spare == frozenset()


def test_nobody_waits_for_a_spare_shard() -> None:
    c = Cluster(expected_shards=1, expected_workers=1)
    added(c, 1)
    c.shard(0)
    worker = c.worker()
    assert c.state.view.started
    c.leave(added(c, 2))
    assert c.declare(worker).holders == [0]


def test_a_job_begins_when_the_shard_it_waits_for_is_drained_instead() -> None:
    c = Cluster(expected_shards=2, expected_workers=1)
    c.shard(0), c.worker()
    assert not c.state.view.started
    assert "the job starts" in c.state.use_shards({0}).reason
    assert c.state.view.started


def test_new_models_are_placed_on_the_shards_in_use_by_their_own_numbers() -> None:
    c, _ = two_shards()
    c.state.use_shards({0, 1, 2})
    c.state.use_shards({0, 1, 2})
    spec = replace(SPEC, name="other", variables=SPEC.variables[:1])
    c.declare(c.worker(), spec)
    assert c.state.placement.shard_map("other").holders == [0, 1, 2]
    again = Cluster(expected_shards=3)
    again.shard(0), again.shard(1), again.shard(2)
    again.state.use_shards({0, 2})
    shard_map = again.declare(again.worker(), spec)
    assert shard_map.holders == [0, 2]
    assert shard_map.shards == 3


def test_a_missing_spare_shard_is_no_reason_to_refuse_a_model_and_a_used_one_is() -> None:
    c = Cluster(expected_shards=3)
    c.shard(0)
    c.state.use_shards({0, 2})
    with pytest.raises(NotReady, match=r"1 of 2 shards are missing; shard: 2"):
        c.declare(c.worker())


def test_a_shard_that_holds_slices_is_not_spare() -> None:
    c, _ = two_shards()
    with pytest.raises(NotReady, match="still holds part of a model; shard: 1; remedy: drain it"):
        c.state.use_shards({0, 2})


@pytest.mark.parametrize("numbers", [set(), {3}])
def test_models_need_shards_that_exist(numbers: set[int]) -> None:
    with pytest.raises(InvalidRequest, match="some of 0 to 2"):
        Cluster(expected_shards=3).state.use_shards(numbers)


def test_a_move_shows_in_the_view_until_it_is_made_and_models_are_placed_by_it_then() -> None:
    c, shards = two_shards()
    maps = next_maps(c, (0, 1, 2))
    revision = c.state.placement.begin_move("cut").value
    assert (c.state.view.moving, c.state.view.revision, c.state.view.models) == ("cut", revision, {"net": 1})
    c.state.placement.commit_move("cut", maps, incarnations(shards))
    view = c.state.view
    assert (view.moving, view.models, view.spare) == ("", {"net": 2}, frozenset())
    assert c.state.placement.shard_map("net") is maps[0]
    assert view.revision > revision
    assert c.state.placement.abort_move("cut").reason == ""
    assert c.state.view is view


def test_a_move_that_is_given_up_changes_nothing_and_cannot_be_made_any_more() -> None:
    c, shards = two_shards()
    before = c.state.placement.shard_map("net")
    maps = next_maps(c, (0, 1, 2))
    revision = c.state.placement.begin_move("cut").value
    assert "given up" in c.state.placement.abort_move("cut").reason
    assert c.state.view.revision > revision
    with pytest.raises(Unavailable, match="given up"):
        c.state.placement.commit_move("cut", maps, incarnations(shards))
    assert c.state.placement.shard_map("net") is before
    assert (c.state.view.moving, c.state.view.spare) == ("", {2})


def test_one_move_at_a_time() -> None:
    c, _ = two_shards()
    c.state.placement.begin_move("one")
    with pytest.raises(NotReady, match="moved already"):
        c.state.placement.begin_move("two")
    c.state.placement.abort_move("two")
    assert c.state.view.moving == "one"


@pytest.mark.parametrize("lost", [0, 1, 2])
@pytest.mark.parametrize("back", [False, True])
def test_a_move_is_refused_when_a_shard_that_prepared_has_gone_or_is_another_process(lost: int, back: bool) -> None:
    c, shards = two_shards()
    maps = next_maps(c, (0, 1, 2))
    c.state.placement.begin_move("cut")
    c.leave(shards[lost])
    if back:
        c.shard(lost)
    before = c.state.persisted_state()
    with pytest.raises(Unavailable, match=f"shard {lost} was lost"):
        c.state.placement.commit_move("cut", maps, incarnations(shards))
    assert c.state.persisted_state() == before


@pytest.mark.parametrize("forgotten", [0, 2])
def test_a_move_is_refused_when_a_shard_with_slices_before_or_after_was_not_asked(forgotten: int) -> None:
    c, shards = two_shards()
    maps = next_maps(c, (1, 2), balance=False)
    c.state.placement.begin_move("cut")
    prepared = incarnations(shards)
    del prepared[forgotten]
    with pytest.raises(Unavailable, match=f"shard {forgotten} "):
        c.state.placement.commit_move("cut", maps, prepared)


def test_a_move_is_refused_from_another_epoch_than_the_one_in_force() -> None:
    c, shards = two_shards()
    (shard_map,) = next_maps(c, (0, 1, 2))
    c.state.placement.begin_move("cut")
    with pytest.raises(InvalidRequest, match="expected: epoch 2; actual: epoch 3"):
        c.state.placement.commit_move("cut", [replace(shard_map, epoch=3)], incarnations(shards))
    assert c.state.view.moving == "cut"


def test_a_drained_shard_is_spare_when_it_holds_nothing() -> None:
    c, shards = two_shards()
    maps = next_maps(c, (0,), balance=False)
    c.state.placement.begin_move("cut")
    c.state.placement.commit_move("cut", maps, incarnations(shards))
    assert c.state.view.used_shards == (0, 1)
    c.state.use_shards({0})
    assert c.state.view.used_shards == (0,)
    c.leave(shards[1])
    c.declare(c.worker(), replace(SPEC, name="later"))


def test_a_coordinator_that_returns_knows_added_spare_and_moved_and_gives_up_the_move_under_way() -> None:
    c, shards = two_shards()
    c.state.placement.begin_move("cut")
    c.state.placement.commit_move("cut", next_maps(c, (1, 2), balance=False), incarnations(shards))
    c.state.use_shards({1, 2})
    assert restarted(c).state.view == c.state.view
    c.state.placement.begin_move("another")
    again = restarted(c)
    assert again.state.view.revision > c.state.view.revision
    assert again.state.view == replace(c.state.view, moving="", revision=again.state.view.revision)
    assert again.state.placement.shard_map("net") == c.state.placement.shard_map("net")
    with pytest.raises(Unavailable):
        again.state.placement.commit_move("another", next_maps(c, (1,), balance=False), incarnations(shards))
    assert again.state.view.spare == {0}
