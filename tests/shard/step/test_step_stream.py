"""The step stream of a real shard, spoken by a client that knows the generated stubs only."""

from __future__ import annotations

import grpc
import pytest

from ps_protocol.errors import (
    NonFiniteGradient,
    Unavailable,
)
from ps_protocol.model.spec import Consistency, Mode, NonFinite, StalePolicy
from ps_protocol.v1 import shard_pb2 as pb
from tests.support.shards import (
    StubStream,
    assert_equal,
    flat,
    gradients,
    reference,
    running_shard,
    start,
    wait_until,
)

SYNC = Consistency(Mode.SYNC)


def test_one_exchange_applies_the_gradients_and_returns_the_next_parameters():
    with running_shard() as shard:
        model, initial = start(shard, momentum=0.9)
        stream = StubStream(shard)
        steps = [gradients(model, seed) for seed in range(3)]
        for version, grads in enumerate(steps, 1):
            result, payload = stream.exchange(flat(model.layout, *grads))
            assert (result.outcome, result.version) == (pb.OUTCOME_APPLIED, version)
        assert_equal(payload, model, reference(initial, steps, momentum=0.9))
        stream.end()


def test_a_push_repeated_on_a_new_stream_after_a_lost_reply_is_not_applied_again():
    with running_shard() as shard:
        model, initial = start(shard)
        grads = gradients(model, 1)
        first = StubStream(shard)
        first.push(flat(model.layout, *grads))
        first.result()
        first.cancel()
        second = StubStream(shard)
        assert second.opened.last_sequence == 1
        result, payload = second.exchange(flat(model.layout, *grads), sequence=1, clock=1)
        assert result.outcome == pb.OUTCOME_DUPLICATE
        assert_equal(payload, model, reference(initial, [grads]))


def test_a_reply_lost_after_the_apply_is_given_again_to_the_repeated_push_and_its_region_returned():
    def drop():
        shard.failpoints.disarm("after_apply_before_reply")
        raise Unavailable("dropped by the test")

    with running_shard() as shard:
        model, initial = start(shard)
        grads = gradients(model, 1)
        shard.failpoints.arm("after_apply_before_reply", drop)
        stream = StubStream(shard)
        with pytest.raises(grpc.RpcError):
            stream.exchange(flat(model.layout, *grads))
        again = StubStream(shard)
        result, payload = again.exchange(flat(model.layout, *grads), sequence=1, clock=1)
        assert result.outcome == pb.OUTCOME_DUPLICATE
        assert_equal(payload, model, reference(initial, [grads]))
        wait_until(lambda: model.pool.in_use == 0)


def test_sync_answers_when_the_last_worker_has_pushed_and_applies_the_mean_once():
    with running_shard({0: 1, 1: 2}, SYNC) as shard:
        model, initial = start(shard)
        one, two = StubStream(shard), StubStream(shard, rank=1, incarnation=2)
        a, b = gradients(model, 1), gradients(model, 2)
        two.push(flat(model.layout, *b))
        one.push(flat(model.layout, *a))
        (_, first), (result, second) = one.result(), two.result()
        assert first == second
        assert result.version == 1
        assert_equal(first, model, reference(initial, [[(x + y) / 2 for x, y in zip(a, b, strict=True)]]))


def test_a_parked_pull_whose_worker_is_gone_is_forgotten_and_its_push_stays():
    with running_shard({0: 1, 1: 2}, SYNC) as shard:
        model, _ = start(shard)
        stream, other = StubStream(shard), StubStream(shard, rank=1, incarnation=2)
        stream.push(flat(model.layout, *gradients(model, 1)))
        wait_until(lambda: model.parked_pulls == 1)
        stream.cancel()
        wait_until(lambda: model.parked_pulls == 0)
        other.exchange(flat(model.layout, *gradients(model, 2)))
        assert model.tracker.counts.outcomes["applied"] == 2


def test_a_stale_push_is_rejected_above_the_threshold_and_still_answered():
    policy = Consistency(Mode.ASYNC, stale_policy=StalePolicy.REJECT, stale_threshold=0)
    with running_shard({0: 1, 1: 2}, policy) as shard:
        model, _ = start(shard)
        one, two = StubStream(shard), StubStream(shard, rank=1, incarnation=2)
        one.exchange(flat(model.layout, *gradients(model, 1)))
        result, _ = two.exchange(flat(model.layout, *gradients(model, 2)))
        assert (result.outcome, result.version) == (pb.OUTCOME_STALE, 1)
        stats = shard.counters.stats()
        assert (stats.steps, stats.dropped) == (2, 1)


def test_a_nan_is_refused_by_name_nothing_is_applied_and_the_stream_goes_on():
    with running_shard() as shard:
        model, initial = start(shard)
        stream = StubStream(shard)
        bad, good = gradients(model, 1), gradients(model, 2)
        bad[1][2] = float("nan")
        result, payload = stream.exchange(flat(model.layout, *bad))
        assert (result.outcome, payload) == (pb.OUTCOME_REFUSED, b"")
        assert result.error.code == NonFiniteGradient.code
        assert result.error.variable == "v1"
        _, payload = stream.exchange(flat(model.layout, *good))
        assert_equal(payload, model, reference(initial, [good]))


def test_a_nan_is_skipped_where_the_model_says_so():
    with running_shard() as shard:
        model, initial = start(shard, nonfinite=NonFinite.SKIP)
        stream = StubStream(shard)
        bad = gradients(model, 1)
        bad[0][0, 0] = float("inf")
        result, payload = stream.exchange(flat(model.layout, *bad))
        assert result.outcome == pb.OUTCOME_SKIPPED
        assert_equal(payload, model, initial)


def test_memory_of_a_push_broken_off_in_the_middle_is_returned():
    with running_shard() as shard:
        model, _ = start(shard)
        stream = StubStream(shard)
        stream.send(push=pb.PushHeader(sequence=1, clock=1))
        stream.send(chunk=pb.Chunk(payload=b"1234"))
        wait_until(lambda: model.pool.in_use == 1)
        stream.cancel()
        wait_until(lambda: (model.pool.in_use, model.pool.spare) == (0, 0))
        assert model.tracker.version == 0
