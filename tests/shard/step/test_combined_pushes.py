"""Pushes of several workers on one stream: taken for all of them, known for each of them, or not taken at all."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from ps_protocol.model.spec import Buffers, Consistency, Mode
from ps_protocol.model.tables import RowInit
from ps_protocol.v1 import shard_pb2 as pb
from tests.shard.disks import held, shard_on
from tests.support.shards import (
    StubStream,
    assert_equal,
    flat,
    gradients,
    load,
    reference,
    running_shard,
    simple_spec,
    start,
    unflat,
    wait_until,
    whole_map,
)
from tests.support.tables import RowStream, array, start_with, table_spec

LIVE = {0: 1, 1: 2, 2: 3}
SYNC = Consistency(Mode.SYNC)
MODES = [Consistency(Mode.ASYNC), Consistency(Mode.SSP, staleness=1), SYNC]


def others(*ranks, clock=1, **fields):
    """What these workers have in a combined push of the first step."""
    return [
        pb.PushContribution(
            worker=pb.WorkerId(rank=rank, incarnation=rank + 1), **({"sequence": clock, "clock": clock} | fields)
        )
        for rank in ranks
    ]


def streams(shard):
    return [StubStream(shard, rank, incarnation) for rank, incarnation in LIVE.items()]


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_a_push_of_all_workers_is_one_update_and_brings_parameters_to_the_one_that_sent_it(mode):
    with running_shard(LIVE, mode) as shard:
        model, initial = start(shard)
        sender, *_ = streams(shard)
        grads = gradients(model, 1)
        result, payload = sender.exchange(flat(model.layout, *grads), weight=3.0, contributions=others(1, 2))
        assert (result.outcome, result.version) == (pb.OUTCOME_APPLIED, 1)
        assert_equal(payload, model, reference(initial, [grads]))
        standings = [(each.rank, each.clock, each.last_sequence) for each in model.status().clocks]
        assert standings == [(0, 1, 1), (1, 1, 1), (2, 1, 1)]
        assert model.status().outcomes["applied"] == 1


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_after_the_sender_died_each_of_the_others_pushes_by_itself_and_its_gradient_is_not_applied_again(mode):
    with running_shard(LIVE, mode) as shard:
        model, initial = start(shard)
        sender, *rest = streams(shard)
        grads = gradients(model, 1)
        sender.exchange(flat(model.layout, *grads), weight=3.0, contributions=others(1, 2))
        sender.cancel()
        for stream in rest:
            result, payload = stream.exchange(flat(model.layout, *gradients(model, 2)))
            assert (result.outcome, result.version) == (pb.OUTCOME_DUPLICATE, 1)
            assert_equal(payload, model, reference(initial, [grads]))


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_where_one_has_pushed_by_itself_the_answer_comes_at_once_without_parameters_and_the_stream_goes_on(mode):
    with running_shard(LIVE, mode) as shard:
        model, initial = start(shard)
        sender, first, second = streams(shard)
        single = [gradients(model, rank) for rank in range(3)]
        first.push(flat(model.layout, *single[1]))
        wait_until(lambda: model.tracker.clocks()[1].last_sequence == 1)
        mean = flat(model.layout, *gradients(model, 9))
        result, payload = sender.exchange(mean, weight=3.0, contributions=others(1, 2))
        assert (result.outcome, payload) == (pb.OUTCOME_SEPARATE, b"")
        sender.push(flat(model.layout, *single[0]), sequence=1, clock=1)
        second.push(flat(model.layout, *single[2]))
        outcomes = [stream.result()[0].outcome for stream in (sender, first, second)]
        assert outcomes == [pb.OUTCOME_APPLIED] * 3
        if mode is SYNC:
            means = [torch.stack(each).mean(0) for each in zip(*single, strict=True)]
            assert_equal(sender.exchange(mean, skipped=True, sequence=1)[1], model, reference(initial, [means]))
        wait_until(lambda: model.pool.in_use == 0)


def test_in_sync_the_mean_is_that_over_all_workers_of_all_hosts():
    with running_shard(LIVE, SYNC) as shard:
        model, initial = start(shard)
        one, _, lone = streams(shard)
        single = [gradients(model, rank) for rank in range(3)]
        mean = [(a + b) / 2 for a, b in zip(single[0], single[1], strict=True)]
        one.push(flat(model.layout, *mean), weight=2.0, contributions=others(1))
        result, payload = lone.exchange(flat(model.layout, *single[2]))
        assert result.version == one.result()[0].version == 1
        means = [torch.stack(each).mean(0) for each in zip(*single, strict=True)]
        assert_equal(payload, model, reference(initial, [means]))


def test_in_a_round_it_makes_the_bytes_of_one_push_with_the_sum_of_the_weights():
    values = []
    for whole in (True, False):
        live = LIVE if whole else {0: 1, 2: 3}
        with running_shard(live, SYNC) as shard:
            model, _ = start(shard, momentum=0.9)
            one, lone = StubStream(shard, 0, 1), StubStream(shard, 2, 3)
            for clock in range(1, 6):
                pair, single = (flat(model.layout, *gradients(model, clock * 7 + rank)) for rank in (0, 2))
                both = {"contributions": others(1, clock=clock)} if whole else {}
                one.push(pair, weight=5.0, **both)
                lone.push(single, weight=3.0)
                _, payload = one.result()
                lone.result()
            values.append(payload)
    assert values[0] == values[1]


def test_rows_of_a_combined_push_have_its_weight_in_the_mean():
    with running_shard(LIVE, SYNC) as shard:
        start_with(shard, table_spec(init=RowInit("constant", 0.0)))
        one, lone = RowStream(shard, 0, 1), RowStream(shard, 2, 3)
        ids = array(5, 7)
        for stream, value, how in ((one, 3.0, {"weight": 2.0, "contributions": others(1)}), (lone, 9.0, {})):
            stream.push_rows(bytes(64), {0: (ids, np.full((2, 4), value, np.float32))}, **how)
        one.result()
        lone.result()
        assert np.allclose(one.look_up(ids, 4), -0.5 * 5.0)


def test_buffers_of_a_combined_push_count_as_often_as_it_has_workers():
    with running_shard(LIVE, SYNC) as shard:
        spec = replace(simple_spec((2,), buffer_shapes=((2,),)), buffers=Buffers.AVERAGE)
        model = shard.place(whole_map(spec))
        load(shard, model, flat(model.layout, torch.zeros(2), torch.zeros(2)))
        one, _, lone = streams(shard)
        both, single = (flat(model.layout, torch.zeros(2), torch.full((2,), value)) for value in (3.0, 9.0))
        one.push(both, weight=2.0, contributions=others(1), with_buffers=True)
        lone.push(single, with_buffers=True)
        one.result()
        one.send(fetch=pb.Fetch())
        _, payload = one.result()
        assert unflat(model.layout, payload)[1].tolist() == [5.0, 5.0]


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_every_worker_of_it_is_known_after_a_kill(mode, tmp_path, killed):
    with shard_on(tmp_path / "a", LIVE, mode) as shard:
        model, _ = start(shard, momentum=0.9)
        sender = streams(shard)[0]
        sender.exchange(flat(model.layout, *gradients(model, 1)), weight=3.0, contributions=others(1, 2))
        before = held(shard, model)
        with killed(shard, LIVE, mode) as again:
            found = again.place(model.layout.shard_map)
            assert torch.equal(held(again, found), before)
            assert found.tracker.persisted_state() == model.tracker.persisted_state()
            for rank, stream in enumerate(streams(again)):
                assert stream.opened.last_sequence == 1
                whole = {"contributions": others(1, 2), "weight": 3.0} if rank == 0 else {}
                result, _ = stream.exchange(flat(found.layout, *gradients(found, 5)), sequence=1, clock=1, **whole)
                assert result.outcome == pb.OUTCOME_DUPLICATE
            assert torch.equal(held(again, found), before)


def test_while_a_checkpoint_waits_for_a_push_of_one_of_its_workers_each_pushes_by_itself():
    with running_shard(LIVE) as shard:
        model, _ = start(shard)
        sender, first, _ = streams(shard)
        payload = flat(model.layout, *gradients(model, 1))

        async def admit(targets):
            model.gate.admit(targets)

        worker = model.tracker.clocks()[1].worker
        shard.loop.run(admit({worker: 1}))
        result, _ = sender.exchange(payload, weight=2.0, contributions=others(1))
        assert result.outcome == pb.OUTCOME_SEPARATE
        sender.push(payload, sequence=1, clock=1)
        first.push(payload)
        wait_until(lambda: [each.last_sequence for each in model.tracker.clocks()] == [0, 1, 0])

        async def resume():
            model.resume()

        shard.loop.run(resume())
        assert [stream.result()[0].outcome for stream in (sender, first)] == [pb.OUTCOME_APPLIED] * 2


def test_while_a_checkpoint_waits_for_none_of_its_workers_it_waits_as_a_whole():
    with running_shard(LIVE) as shard:
        model, _ = start(shard)
        sender, *_ = streams(shard)

        async def pause():
            model.gate.pause()

        async def resume():
            model.resume()

        shard.loop.run(pause())
        sender.push(flat(model.layout, *gradients(model, 1)), weight=2.0, contributions=others(1))
        wait_until(lambda: shard.counters.pushes == 1)
        assert model.tracker.version == 0
        shard.loop.run(resume())
        assert sender.result()[0].outcome == pb.OUTCOME_APPLIED
        assert model.tracker.clocks()[1].last_sequence == 1
