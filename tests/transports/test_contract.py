"""The contract of a stream's transports, kept alike by grpc, bulk and shm: carriers of both sides and a real shard."""

from __future__ import annotations

import re
from contextlib import ExitStack, contextmanager

import pytest

from ps_protocol.cluster.answers import Outcome
from ps_protocol.errors import Fenced, InvalidRequest, NonFiniteGradient, Unavailable
from ps_protocol.model.spec import Consistency, Mode
from ps_protocol.v1 import shard_pb2 as pb
from ps_protocol.v1 import shard_pb2_grpc
from tests.support.length import paired
from tests.support.shards import unflat, wait_until
from tests.transports.support import (
    BLOCKING,
    LARGE,
    TRANSPORTS,
    assert_same,
    begin,
    has_come,
    hold_loop,
    interrupted,
    is_idle,
    leaves_no_descriptors,
    line,
    running_shard,
    shared_mappings,
    trained,
    whole_numbers,
)

pytestmark = pytest.mark.usefixtures("loop", "quiet")

SYNC = Consistency(Mode.SYNC)
TWO = {0: 1, 1: 2}
"""Live workers: rank to incarnation."""

SIZES = {
    "a few bytes": ((4, 3), (5,)),
    "exactly what travels inside a message": ((16 << 10,),),
    "one more than travels inside a message": (((16 << 10) + 1,),),
    "what is moved on the event loop": ((177, 333),),
    "more than 2 MB of odd sizes": LARGE,
}


@contextmanager
def serving(*shapes, live=None, consistency=None, **arguments):
    """A shard, its model and the initial values; no memory of pushes and replies is in use at the end."""
    with running_shard(live, consistency) as shard:
        model, initial = begin(shard, *shapes, **arguments)
        yield shard, model, initial
        wait_until(lambda: is_idle(model))


@pytest.mark.parametrize(("size", "loop"), paired(list(SIZES), ["asyncio", "uvloop"]), indirect=["loop"])
def test_steps_of_every_size_are_those_of_one_process(transport, size):
    with serving(*SIZES[size]) as (shard, model, initial):
        steps = [whole_numbers(model, seed) for seed in (1, 2, 3)]
        with line(shard, model, transport) as worker:
            for number, step in enumerate(steps, 1):
                worker.forget()
                result = worker.exchange(step)
                assert (result.outcome, result.version, result.sequence) == (Outcome.APPLIED, number, number)
                assert_same(worker.values, trained(initial, *steps[:number]))


def test_absent_slices_in_hundreds_of_pieces_are_left_alone(transport):
    with serving(*[(50 + i % 7,) for i in range(1200)]) as (shard, model, initial):
        step = whole_numbers(model, 1)
        step[::2] = [None] * 600
        with line(shard, model, transport) as worker:
            worker.exchange(step)
            assert_same(worker.values, trained(initial, step))
            # No gradient at all is a step too.
            result = worker.exchange([None] * 1200)
            assert (result.outcome, result.version) == (Outcome.APPLIED, 2)
            assert_same(worker.values, trained(initial, step))


@pytest.mark.parametrize("shapes", [((4, 3),), LARGE], ids=["small", "large"])
def test_buffers_come_with_a_push_that_says_so_and_with_no_other(transport, shapes):
    def buffers():
        stub = shard_pb2_grpc.ShardStub(shard.channel)
        result, *chunks = list(stub.Pull(pb.PullRequest(model="model")))
        payload = result.result.payload + b"".join(reply.chunk.payload for reply in chunks)
        return unflat(model.layout, payload)[model.layout.parameter_slices :]

    served = serving(*shapes, buffer_shapes=((4097,), (3,)))
    with served as (shard, model, initial), line(shard, model, transport) as worker:
        first, second = (whole_numbers(model, seed, with_buffers=True) for seed in (1, 2))
        worker.exchange(first, with_buffers=True)
        assert_same(buffers(), first[-2:])
        worker.exchange(second)
        assert_same(buffers(), first[-2:])
        assert_same(worker.values, trained(initial[:-2], first, second))


def test_a_skipped_step_moves_the_clock_and_carries_nothing(transport):
    with serving(*LARGE) as (shard, model, initial), line(shard, model, transport) as worker:
        result = worker.exchange(whole_numbers(model, 1), skipped=True)
        assert (result.outcome, result.version, result.clock) == (Outcome.SKIPPED, 0, 1)
        assert_same(worker.values, initial)
        step = whole_numbers(model, 2)
        worker.exchange(step)
        assert_same(worker.values, trained(initial, step))


@pytest.mark.parametrize("shapes", [((4, 3),), LARGE], ids=["small", "large"])
def test_a_repeated_push_is_answered_again_and_not_applied_again(transport, shapes):
    with serving(*shapes) as (shard, model, initial):
        step = whole_numbers(model, 1)
        with line(shard, model, transport) as worker:
            worker.exchange(step)
        # The stream was lost with the answer, as far as this worker knows.
        with line(shard, model, transport) as again:
            assert (again.opened.last_sequence, again.opened.clock) == (1, 1)
            result = again.exchange(step, sequence=1, clock=1)
            assert (result.outcome, result.version) == (Outcome.DUPLICATE, 1)
            assert_same(again.values, trained(initial, step))


def test_an_arrival_sent_behind_a_push_is_taken_in_order(transport):
    with serving(*LARGE, live=TWO, consistency=SYNC) as (shard, model, initial):
        step = whole_numbers(model, 1)
        with line(shard, model, transport) as one, line(shard, model, transport, rank=1, incarnation=2) as two:
            two.carrier.arrive(0)  # it holds nobody back in phase 0
            one.push(step)
            one.carrier.arrive(0)
            assert one.receive().outcome == Outcome.APPLIED
            assert_same(one.values, trained(initial, step))
            wait_until(lambda: [s.position.phase for s in model.tracker.clocks()] == [1, 1])


def test_two_pushes_on_their_way_are_answered_in_order(transport):
    """A worker with one gradient segment may not do this: its second push would overwrite the first."""
    with serving(*LARGE, live=TWO) as (shard, model, initial):
        step = whole_numbers(model, 1)
        with line(shard, model, transport) as worker:
            worker.push(step)
            worker.push(step)
            assert [worker.receive().sequence for _ in range(2)] == [1, 2]
            assert_same(worker.values, trained(initial, step, step))


def test_a_parked_pull_gives_signs_of_life_and_then_its_parameters(transport, monkeypatch):
    monkeypatch.setattr("ps_protocol.times.HINT_SECONDS", 0.02)
    with serving(*LARGE, live=TWO, consistency=SYNC) as (shard, model, initial):
        step = whole_numbers(model, 1)
        with line(shard, model, transport) as worker:
            worker.on_wait = lambda: shard.set_view({0: 1}) if len(worker.waits) == 3 else None
            worker.exchange(step)
            assert len(worker.waits) >= 3
            assert "waiting for worker 1" in worker.waits[0]
            assert_same(worker.values, trained(initial, step))


def test_a_worker_that_lost_its_place_gets_fenced(transport):
    with serving(*LARGE) as (shard, model, _), line(shard, model, transport) as worker:
        shard.set_view({0: 2})
        worker.push(whole_numbers(model, 1))
        with pytest.raises(Fenced):
            worker.receive()
        wait_until(lambda: not worker.carrier.alive)


def test_a_push_that_breaks_the_protocol_ends_the_stream_with_its_error(transport):
    with serving(*LARGE) as (shard, model, _), line(shard, model, transport) as worker:
        worker.push(whole_numbers(model, 1), sequence=0)
        with pytest.raises(InvalidRequest, match="a push needs a sequence"):
            worker.receive()


def test_a_refused_push_is_an_error_in_its_answer_and_the_stream_goes_on(transport):
    with serving(*LARGE) as (shard, model, initial):
        bad, good = whole_numbers(model, 1), whole_numbers(model, 2)
        bad[1][2] = float("nan")
        with line(shard, model, transport) as worker:
            result = worker.exchange(bad)
            assert (result.outcome, result.error.code) == (Outcome.REFUSED, NonFiniteGradient.code)
            assert result.error.variable == "v1"
            worker.exchange(good)
            assert_same(worker.values, trained(initial, good))


def test_a_stream_closed_in_the_middle_of_a_large_push_ends_at_once_and_half_a_push_is_nothing(transport):
    with serving(*BLOCKING) as (shard, model, initial):
        step = whole_numbers(model, 1)
        with leaves_no_descriptors():
            with line(shard, model, transport) as worker:
                go_on = hold_loop(shard.loop)
                worker.push(step)
                worker.close()
                worker.close()
            go_on()
            wait_until(lambda: is_idle(model))
        with line(shard, model, transport) as again:
            # In shared memory a push is whole as soon as its header is.
            assert again.opened.last_sequence == 0 or transport == "shm"
            again.exchange(step, sequence=1, clock=1)
            assert_same(again.values, trained(initial, step))


def test_a_stream_closed_while_its_reply_is_being_sent_gives_the_memory_back(transport):
    with running_shard({0: 1, 1: 2}) as shard:
        model, initial = begin(shard, *BLOCKING)
        step = whole_numbers(model, 1)
        with leaves_no_descriptors(), line(shard, model, transport) as worker:
            worker.push(step)
            wait_until(lambda: model.tracker.version == 1)
        wait_until(lambda: is_idle(model))
        with line(shard, model, transport, rank=1, incarnation=2) as other:
            other.exchange(step)
            assert_same(other.values, trained(initial, step, step))


def test_parameters_that_a_worker_does_not_read_are_not_changed_under_it(transport):
    with serving(*BLOCKING, live=TWO) as (shard, model, initial):
        steps = [whole_numbers(model, seed) for seed in (1, 2)]
        with line(shard, model, transport) as slow, line(shard, model, transport, rank=1, incarnation=2) as fast:
            slow.push(steps[0])
            wait_until(lambda: model.tracker.version == 1)
            fast.exchange(steps[1])
            slow.receive()
            assert_same(fast.values, trained(initial, *steps))
            # What it got is one version: that of its own push, or a later one.
            assert_same(slow.values, trained(initial, *steps[: slow.version]))


def test_a_shard_that_ends_while_a_pull_is_parked_is_named(transport):
    with ExitStack() as stack:
        shard = stack.enter_context(running_shard({0: 1, 1: 2}, SYNC))
        model, _ = begin(shard, *LARGE)
        with line(shard, model, transport) as worker:
            worker.push(whole_numbers(model, 1))
            wait_until(lambda: model.parked_pulls == 1)
            stack.close()
            with pytest.raises(Unavailable, match=re.escape(f"shard 0 at {shard.address}")):
                worker.receive()
            wait_until(lambda: not worker.carrier.alive)


def test_a_shard_that_ends_in_the_middle_of_its_reply_is_named_and_leaves_nothing_in_use(transport):
    with ExitStack() as stack:
        shard = stack.enter_context(running_shard())
        model, initial = begin(shard, *BLOCKING)
        step = whole_numbers(model, 1)
        with line(shard, model, transport) as worker:
            worker.push(step)
            wait_until(lambda: model.tracker.version == 1 and model.pool.in_use == 0)
            if transport == "shm":  # the header comes once the update is made
                wait_until(lambda: has_come(worker))
            stack.close()
            if transport == "shm":  # a reply is whole as soon as its header is here
                worker.receive()
                assert_same(worker.values, trained(initial, step))
                worker.push(step)
            with pytest.raises(Unavailable, match=re.escape(f"shard 0 at {shard.address}")):
                worker.receive()
            assert is_idle(model)


def test_ctrl_c_ends_the_waiting_for_an_answer_and_the_accepted_push_counts(transport):
    with serving(*LARGE, live=TWO, consistency=SYNC) as (shard, model, initial):
        one, two = whole_numbers(model, 1), whole_numbers(model, 2)
        with line(shard, model, transport) as worker:
            worker.push(one)
            with interrupted("receive", lambda: model.parked_pulls == 1):
                worker.receive()
            assert not worker.carrier.alive  # the rest of an answer would be taken for the next one
        wait_until(lambda: model.parked_pulls == 0)
        with line(shard, model, transport, rank=1, incarnation=2) as other:
            other.exchange(two)
            assert_same(other.values, trained(initial, [(a + b) / 2 for a, b in zip(one, two, strict=True)]))


def test_streams_opened_again_and_again_leave_nothing_behind(transport):
    with serving(*LARGE) as (shard, model, initial):
        steps = [whole_numbers(model, seed) for seed in range(6)]
        with line(shard, model, transport) as worker:
            worker.exchange(steps[0])
        wait_until(lambda: is_idle(model))
        with leaves_no_descriptors():
            for number, step in enumerate(steps[1:], 2):
                with line(shard, model, transport) as worker:
                    worker.exchange(step)
                    assert_same(worker.values, trained(initial, *steps[:number]))


def test_a_hundred_replies_use_a_few_segments_only(transport):
    with serving((300, 77), live=TWO) as (shard, model, initial):
        steps = [whole_numbers(model, seed) for seed in range(100)]
        with line(shard, model, transport) as one, line(shard, model, transport, rank=1, incarnation=2) as two:
            mapped = shared_mappings()
            for first, second in zip(steps[::2], steps[1::2], strict=True):
                one.push(first)
                two.push(second)
                one.receive(), two.receive()
            # Per line at most the last 16 regions of the shard, and those regions themselves.
            assert shared_mappings() <= mapped + 3 * 16
            wait_until(lambda: model.tracker.version == 100)
            two.exchange(whole_numbers(model, 100))
            assert_same(two.values, trained(initial, *steps, whole_numbers(model, 100)))


def test_status_names_the_transport_of_each_open_stream(transport):
    def transports():
        status = shard_pb2_grpc.ShardStub(shard.channel).GetModel(pb.GetModelRequest(model="model"))
        return [clock.transport for clock in status.clocks]

    with running_shard({0: 1, 1: 2}) as shard:
        model, _ = begin(shard, *LARGE)
        with line(shard, model, transport) as worker:
            worker.exchange(whole_numbers(model, 1))
            assert transports() == [TRANSPORTS[transport], 0]
        wait_until(lambda: transports() == [0, 0])
