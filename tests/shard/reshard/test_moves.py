"""Slices move between shards: their bytes stay the same, and nothing is lost whatever happens meanwhile."""

from __future__ import annotations

import gc
import threading
import weakref
from dataclasses import replace

import grpc
import pytest

from ps_protocol.errors import InvalidRequest, ModelMoved
from ps_protocol.model.spec import Consistency, Mode
from ps_protocol.v1 import shard_pb2 as pb
from tests.shard.durability.test_replay import OPTIMIZERS
from tests.shard.reshard.moving import job, map_of, spec_of
from tests.shard.reshard.moving_worker import Worker, assert_same, undisturbed
from tests.support.shards import StubStream, error_of, load, refused_as, wait_until

FUSED = frozenset({"SGD", "Adam", "AdamW", "Adagrad"})
"""Their kernels round by where in a segment an element lies."""

HERE, THERE = [0, 0, 1, 1, 0], [0, 1, 2, 0, 2]

pytestmark = pytest.mark.usefixtures("small_blocks")


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_slice_that_moved_has_the_same_bytes_and_training_goes_on(optimizer):
    spec = spec_of(optimizer, **OPTIMIZERS[optimizer])
    with job(spec, HERE) as made:
        worker = Worker(made)
        worker.train(3)
        values, state = made.values(), made.state()
        made.move(THERE)
        assert_same(made.values(), values)
        assert_same(made.state(), state)
        worker.open()
        assert {stream.opened.last_sequence for stream in worker.streams.values()} == {3}
        assert {stream.opened.version for stream in worker.streams.values()} == {3}
        worker.train(3)
        wanted_values, wanted_state = undisturbed(spec, 6)
        assert_same(made.values(), wanted_values, exact=optimizer not in FUSED)
        assert_same(made.state(), wanted_state, exact=optimizer not in FUSED)
        worker.end()


def test_a_shard_that_is_drained_and_one_that_gets_everything_back():
    with job(spec_of(momentum=0.9), HERE) as made:
        worker = Worker(made)
        worker.train(2)
        values, state = made.values(), made.state()
        for places in ([1, 1, 1, 1, 1], [2] * 5, [0, 2, 0, 2, 0]):
            made.move(places)
            assert_same(made.values(), values)
            assert_same(made.state(), state)
        assert made.model(1).layout.region_bytes == 0
        assert made.model(1).initialised
        assert made.model(1).tracker.version == 0
        worker.open()
        worker.train(1)
        worker.end()


def test_slices_of_two_models_move_at_one_point():
    with job(spec_of(momentum=0.9), HERE) as made:
        worker = Worker(made)
        worker.train(2)
        other = map_of(replace(spec_of(), name="other"), HERE)
        made.declare(other)
        values = made.values()
        both = made.next_map(THERE), replace(map_of(other.spec, THERE), epoch=2)
        made.prepare_all(*both)
        made.commit(*both)
        assert_same(made.values(), values)
        assert {len(made.model(number, name="other").layout.slices) for number in made.nodes} == {2, 1}
        worker.open()
        worker.train(1)
        worker.end()


def test_open_streams_end_when_the_slices_have_moved():
    with job(spec_of(), HERE) as made:
        worker = Worker(made)
        worker.train(1)
        made.move(THERE)
        for stream in worker.streams.values():
            with refused_as(ModelMoved, "expected: shard map of epoch 2; actual: epoch 1"):
                stream.result()


def test_a_push_that_came_at_the_wrong_moment_is_repeated_and_made_once():
    with job(spec_of("RMSprop"), HERE) as made:
        worker = Worker(made)
        worker.train(2)
        wanted = made.next_map(THERE)
        made.begin_move()
        made.reach()
        worker.send()  # waits at the gates
        for number in made.nodes:
            made.prepare(number, wanted)
        values = made.values()
        assert_same(values, undisturbed(spec_of("RMSprop"), 2)[0])
        made.commit(wanted)
        with refused_as(ModelMoved):
            worker.results()
        worker.open()
        worker.repeat()
        assert worker.results() == [pb.OUTCOME_APPLIED] * 3
        worker.train(1)
        assert_same(made.values(), undisturbed(spec_of("RMSprop"), 4)[0])
        assert made.nodes[0].storage.log.number == 0
        worker.end()


def test_a_push_that_was_applied_but_not_answered_is_known_on_the_shards_that_never_saw_it():
    with job(spec_of("RMSprop"), HERE) as made:
        worker = Worker(made)
        worker.send()
        wait_until(lambda: all(made.model(number).tracker.version == 1 for number in made.holders))
        made.move(THERE)
        worker.open()
        worker.repeat()
        assert worker.results() == [pb.OUTCOME_DUPLICATE] * 3
        assert_same(made.values(), undisturbed(spec_of("RMSprop"), 1)[0])
        worker.end()


def test_in_sync_a_push_held_for_its_step_comes_again_and_its_step_is_made_once():
    live = {0: 1, 1: 2}
    with job(spec_of("RMSprop"), HERE, live=live, consistency=Consistency(Mode.SYNC)) as made:
        workers = [Worker(made, rank) for rank in live]
        workers[0].send()
        wait_until(lambda: all(len(made.model(number)._held) == 1 for number in made.holders))
        values = made.values()
        made.move(THERE)
        with refused_as(ModelMoved):
            workers[0].results()
        assert_same(made.values(), values)
        for worker in workers:
            worker.open()
        workers[0].repeat()
        workers[1].send()
        for worker in workers:
            assert worker.results() == [pb.OUTCOME_APPLIED] * 3
            worker.end()
        assert {made.model(number).tracker.version for number in made.holders} == {1}
        assert {made.model(number).pool.in_use for number in made.holders} == {0}


def test_a_push_held_in_sync_comes_again_though_the_mode_changes_while_slices_move():
    live = {0: 1, 1: 2}
    with job(spec_of("RMSprop"), HERE, live=live, consistency=Consistency(Mode.SYNC)) as made:
        workers = [Worker(made, rank) for rank in live]
        workers[0].send()
        wait_until(lambda: all(len(made.model(number)._held) == 1 for number in made.holders))
        made.begin_move()
        reached = made.reach()
        assert [each.sequence for model in reached[0].models for each in model.open] == [1]
        wanted = made.next_map(THERE)
        for number in made.nodes:
            made.prepare(number, wanted)
        made.consistency = Consistency(Mode.ASYNC)
        made.show()
        made.commit(wanted)
        for worker in workers:
            worker.open()
        assert {stream.opened.last_sequence for stream in workers[0].streams.values()} == {0}
        workers[0].repeat()
        assert workers[0].results() == [pb.OUTCOME_APPLIED] * 3
        assert_same(made.values(), undisturbed(spec_of("RMSprop"), 1)[0])
        for worker in workers:
            worker.end()


def test_in_sync_a_push_that_came_too_late_is_known_after_a_move():
    live = {0: 1, 1: 2, 2: 3}
    consistency = Consistency(Mode.SYNC, backup=1)
    with job(spec_of("RMSprop"), HERE, live=live, consistency=consistency) as made:
        workers = [Worker(made, rank) for rank in live]
        for worker in workers[:2]:
            worker.send()
        for worker in workers[:2]:
            assert worker.results() == [pb.OUTCOME_APPLIED] * 2
        workers[2].send()  # and the answer is lost
        wait_until(lambda: all(made.model(n).tracker.counts.outcomes["late"] for n in made.holders))
        values = made.values()
        wanted = made.next_map(THERE)
        made.prepare_all(wanted)
        made.consistency = Consistency(Mode.ASYNC)
        made.commit(wanted)
        for worker in workers:
            worker.open()
        workers[2].repeat()
        assert workers[2].results() == [pb.OUTCOME_DUPLICATE] * 3
        assert_same(made.values(), values)
        for worker in workers:
            worker.end()


def test_no_step_is_made_while_slices_move_though_the_worker_it_waited_for_is_lost():
    live = {0: 1, 1: 2}
    with job(spec_of(), HERE, live=live, consistency=Consistency(Mode.SYNC)) as made:
        workers = [Worker(made, rank) for rank in live]
        workers[0].send()
        wait_until(lambda: all(len(made.model(number)._held) == 1 for number in made.holders))
        made.begin_move()
        made.reach()
        values = made.values()
        made.live = {0: 1}
        made.show()
        assert_same(made.values(), values)
        made.abort()
        assert workers[0].results() == [pb.OUTCOME_APPLIED] * 2
        assert {made.model(number).tracker.version for number in made.holders} == {1}
        for worker in workers:
            for stream in worker.streams.values():
                stream.cancel()


def test_a_stream_with_an_old_shard_map_is_refused_and_one_with_a_newer_waits():
    with job(spec_of(), HERE) as made:
        wanted = made.next_map(THERE)
        made.prepare_all(wanted)
        opened = []
        early = threading.Thread(target=lambda: opened.append(StubStream(made.nodes[2], epoch=2)))
        early.start()
        made.commit(wanted)
        early.join(60)
        assert opened[0].opened.initialised
        with refused_as(ModelMoved):
            StubStream(made.nodes[0], epoch=1)
        opened[0].cancel()


def test_values_that_are_loaded_while_slices_move_come_before_or_after_all_of_it():
    with job(spec_of("RMSprop"), HERE) as made:
        made.begin_move()
        made.reach()
        values, model = made.values(), made.model(1)
        # Of this shard map, also where the move is over before the shard gets them.
        payload, epoch = bytes(model.layout.region_bytes), model.layout.shard_map.epoch
        loaded = []

        def write():
            try:
                load(made.nodes[1], model, payload, epoch=epoch)
                loaded.append(None)
            except grpc.RpcError as error:
                loaded.append(error_of(error))

        writing = threading.Thread(target=write)
        writing.start()
        wanted = made.next_map(THERE)
        for number in made.nodes:
            made.prepare(number, wanted)
        made.commit(wanted)
        writing.join(60)
        assert isinstance(loaded[0], ModelMoved)
        assert_same(made.values(), values)


def test_slices_are_saved_one_by_one_and_only_those_that_are_there():
    with job(spec_of(momentum=0.9), HERE) as made:
        worker = Worker(made)
        worker.train(1)
        replies = list(made.nodes[0].stub.Save(pb.SaveRequest(model="model", epoch=1, slices=[2, 0])))
        header, payload = replies[0].header, b"".join(reply.chunk.payload for reply in replies[1:])
        values, state = made.values(), made.state()
        # In the layout of shard 0: two slices of the matrix, then the buffer.
        parts = [values[2, 0], values[0, 0]]
        parts += [state[0, 0, tensor.name] for tensor in header.state]
        assert [tensor.slice for tensor in header.state] == [0]
        assert payload == b"".join(part.numpy().tobytes() for part in parts)
        assert header.HasField("pushes")
        for slices in ([3], [0, 0]):
            with refused_as(InvalidRequest):
                list(made.nodes[0].stub.Save(pb.SaveRequest(model="model", slices=slices)))
        worker.end()


def test_the_memory_of_what_was_there_before_is_given_back():
    with job(spec_of(momentum=0.9), HERE) as made:
        worker = Worker(made)
        worker.train(2)

        async def regions():
            return [
                weakref.ref(made.nodes[number].registry.models[0]._applier.newest.region) for number in made.holders
            ]

        before = made.loop.run(regions())
        enabled = gc.isenabled()
        gc.disable()
        try:
            made.move(THERE)
            wait_until(lambda: not any(region() for region in before))
        finally:
            if enabled:
                gc.enable()


def test_a_shard_that_came_after_the_move_is_placed_by_the_map_in_force():
    """One without slices is not asked, and need not be."""
    with job(spec_of(), HERE) as made:
        made.move([0, 1, 1, 1, 0])
        late = made.start(3)
        assert made.model(3).initialised
        wanted = made.next_map([0, 1, 1, 0, 0])
        made.begin_move()
        made.reach()
        for number in range(3):
            made.prepare(number, wanted)
        made.commit(wanted)
        wait_until(lambda: late.registry.models[0].layout.shard_map.epoch == 3)
