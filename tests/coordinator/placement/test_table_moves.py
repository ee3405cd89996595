"""Tables on the move: buckets beside slices, in batches of a known size, planned and then made by fake shards."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ps_protocol import retry
from ps_protocol.cluster.view import Role
from ps_protocol.errors import InvalidRequest, Unavailable
from ps_protocol.model.spec import DType, ModelSpec, ShardMap, Variable
from ps_server.coordinator.jobs.move_runner import bucket_bytes
from ps_server.coordinator.placement.move_plan import BUCKET_BYTES, MoveRequest, MoveTarget, batches, plan, target_of
from ps_server.coordinator.placement.tables import BucketPlace
from ps_server.coordinator.placement.variables import Balanced, first_map
from tests.coordinator.moving_job import Job, on_job
from tests.coordinator.placement.test_move_plan import view_of
from tests.coordinator.tables import bucket_counts, model, shard_numbers, table, tables_of
from tests.support.length import examples

Maps = dict[str, ShardMap]


@st.composite
def jobs(draw: st.DrawFn) -> Maps:
    """Two models with variables and tables on some shards."""
    used, maps = draw(shard_numbers), {}
    for name in "ab":
        rows = draw(st.lists(st.integers(0, 3000), max_size=6))
        variables = tuple(Variable(f"v{i}", (count,), DType.FLOAT32) for i, count in enumerate(rows))
        spec = ModelSpec(name, "torch.optim.SGD", variables, ({"lr": 0.1},), tables=tables_of(draw(bucket_counts)))
        maps[name] = first_map(spec, used, Balanced())
    return maps


@given(jobs(), shard_numbers, st.booleans(), st.integers(1, 1 << 20), st.integers(0, 1 << 18))
@examples(200)
def test_batches_bring_every_bucket_to_where_it_is_to_be_and_hold_no_more_than_they_may(
    maps: Maps, shards: tuple[int, ...], balance: bool, batch_bytes: int, size: int
) -> None:
    goal, sizes = MoveTarget(shards, balance), {("a", "t0"): size}
    moves = plan(maps, goal, sizes)
    current, changed = dict(maps), 0
    for batch in batches(maps, moves, batch_bytes):
        receivers, units = set(), 0
        for following in batch.maps:
            before = current[following.spec.name]
            assert following.epoch == before.epoch + 1
            assert following.shards > max(following.holders)
            for then, now in zip(before.tables, following.tables, strict=True):
                went = [to for owner, to in zip(then, now, strict=True) if owner != to]
                receivers.update(went)
                units += len(went)
            places = {(s.variable, s.row_begin): s.shard for s in before.slices}
            went = [s.shard for s in following.slices if places[s.variable, s.row_begin] != s.shard]
            receivers.update(went)
            units += len(went)
            current[following.spec.name] = following
        assert receivers == batch.receivers
        assert batch.nbytes <= batch_bytes or units == 1
        changed += units
    assert changed == len(moves)
    assert all(set(shard_map.holders) <= set(shards) for shard_map in current.values())
    assert plan(current, goal, sizes) == []


def test_a_bucket_counts_as_large_as_its_table_says_and_never_as_nothing() -> None:
    maps = {"net": first_map(model(table("big", 4), table("unknown", 4)), [0, 1], Balanced())}
    moves = plan(maps, MoveTarget((0,), balance=False), {("net", "big"): 1 << 20, ("net", "unknown"): 7})
    assert [move.nbytes for move in moves] == [1 << 20, 1 << 20, BUCKET_BYTES, BUCKET_BYTES]


def test_one_table_moves_by_its_name_with_all_its_buckets_and_nothing_else() -> None:
    maps = {"net": first_map(model(table("a", 4), table("b", 4), rows=9), [0, 1], Balanced())}
    goal = target_of(MoveRequest(to=(1,), model="net", variable="b"), view_of({0, 1}, 2), maps)
    moves = plan(maps, goal)
    assert [move.piece for move in moves] == [BucketPlace(1, 0, 0), BucketPlace(1, 1, 0)]
    (batch,) = batches(maps, moves, 1 << 30)
    assert batch.maps[0].tables == ((0, 0, 1, 1), (1, 1, 1, 1))
    assert batch.maps[0].slices == maps["net"].slices
    with pytest.raises(InvalidRequest, match="no such variable or table; variable: c; expected: w, a, b"):
        target_of(MoveRequest(to=(1,), model="net", variable="c"), view_of({0, 1}, 2), maps)


ROWS = 1000
MODEL = model(table("emb", 8), table("small", 8), name="ads")


class TableJob(Job):
    """Two shards with a model of two tables, beside one of slices, and a third that was added."""

    async def start(self) -> None:
        await super().start()
        for shard in self.shards:
            shard.bucket_rows = {"emb": ROWS}
        self.declare(MODEL)

    def buckets(self, number: int) -> list[int]:
        """How many buckets of each table of the model a shard holds."""
        return [owners.count(number) for owners in self.driver.shard_map("ads").tables]


on_table_job = partial(on_job, kind=TableJob)


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retry, "MOVE", replace(retry.MOVE, first_seconds=0.01))
    monkeypatch.setattr("ps_server.coordinator.times.BREATH_SECONDS", 0.0)
    monkeypatch.setattr("ps_protocol.times.BRIEF_CALL_SECONDS", 60.0)


@on_table_job
async def test_shards_tell_how_large_a_bucket_is_and_who_does_not_answer_is_left_out(job: TableJob) -> None:
    measured = {("ads", "emb"): 100 * ROWS, ("ads", "small"): 0}
    assert await bucket_bytes(job.driver.view, job.driver.shard_maps) == measured
    job.shards[0].bucket_rows = {"emb": 3 * ROWS}
    assert (await bucket_bytes(job.driver.view, job.driver.shard_maps))["ads", "emb"] == 200 * ROWS
    job.shards[0].fails["GetModel"] = [Unavailable("lost")]
    assert await bucket_bytes(job.driver.view, job.driver.shard_maps) == measured
    for shard in job.shards[:2]:
        assert shard.joined
        job.driver.leave(Role.SHARD, shard.number, shard.joined.member.incarnation, "lost")
    assert await bucket_bytes(job.driver.view, job.driver.shard_maps) == {}


@on_table_job
async def test_a_new_shard_gets_its_share_of_every_table_in_batches_of_about_the_size_asked_for(job: TableJob) -> None:
    assert (job.buckets(0), job.buckets(1), job.buckets(2)) == ([4, 4], [4, 4], [0, 0])
    progress = await job.reshard(MoveRequest(to=(2,)), 110 * ROWS)
    assert sorted(sum(job.buckets(number)) for number in range(3)) == [5, 5, 6]
    assert all(max(counts) - min(counts) <= 1 for counts in zip(*map(job.buckets, range(3)), strict=True))
    emb = job.buckets(2)[0]
    assert progress[-1].moved_bytes == progress[-1].total_bytes
    assert progress[-1].moved_bytes >= emb * 100 * ROWS
    assert progress[-1].batches >= emb
    assert job.driver.view.spare == frozenset()
    job.check_all_go_on()


@on_table_job
async def test_one_table_alone_makes_a_spare_shard_a_used_one(job: TableJob) -> None:
    await job.reshard(MoveRequest(to=(2,), model="ads", variable="small"))
    assert (job.buckets(0), job.buckets(2)) == ([4, 0], [0, 8])
    assert job.driver.view.spare == frozenset()
    assert job.held == [4, 4, 0]
    job.check_all_go_on()


@on_table_job
async def test_a_shard_that_holds_buckets_alone_is_brought_to_the_same_point(job: TableJob) -> None:
    await job.reshard(MoveRequest(to=(2,), model="ads", variable="small"))
    job.shards[2].sequence = 40
    await job.reshard(MoveRequest(to=(0,), model="ads", variable="small"))
    assert job.shards[0].sequence == 40
    assert job.buckets(0) == [4, 8]
