"""Slices move between shards: their bytes stay the same, and nothing is lost whatever happens meanwhile."""

from __future__ import annotations

import asyncio
import errno
import gc
import os
import threading
import weakref
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from ps_protocol.errors import InvalidRequest, ModelMismatch, ModelMoved, StateLost, StorageFull, Unavailable
from ps_protocol.model import Consistency, Mode
from ps_protocol.v1 import shard_pb2 as pb
from tests.shard.moving import (
    MOVE,
    Worker,
    assert_same,
    job,
    map_of,
    spec_of,
    undisturbed,
)
from tests.shard.test_replay import OPTIMIZERS
from tests.support.shards import StubStream, error_of, load, wait_until

FUSED = frozenset({"SGD", "Adam", "AdamW", "Adagrad"})
"""Their kernels round by where in a segment an element lies."""

HERE, THERE = [0, 0, 1, 1, 0], [0, 1, 2, 0, 2]


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Several blocks, also of a model of some bytes."""
    monkeypatch.setattr("ps_server.optimizers.blocks.BLOCK_BYTES", 40)


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
        made.begin_move()
        made.reach()
        for number in made.nodes:
            made.prepare(number, *both)
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
            with pytest.raises(grpc.RpcError) as ended:
                stream.result()
            assert isinstance(error_of(ended.value), ModelMoved)
            assert "expected: shard map of epoch 2; actual: epoch 1" in str(error_of(ended.value))


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
        with pytest.raises(grpc.RpcError) as ended:
            worker.results()
        assert isinstance(error_of(ended.value), ModelMoved)
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
        with pytest.raises(grpc.RpcError) as ended:
            workers[0].results()
        assert isinstance(error_of(ended.value), ModelMoved)
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
        made.begin_move()
        made.reach()
        for number in made.nodes:
            made.prepare(number, wanted)
        opened = []
        early = threading.Thread(target=lambda: opened.append(StubStream(made.nodes[2], epoch=2)))
        early.start()
        made.commit(wanted)
        early.join(10)
        assert opened[0].opened.initialised
        with pytest.raises(grpc.RpcError) as refused:
            StubStream(made.nodes[0], epoch=1)
        assert isinstance(error_of(refused.value), ModelMoved)
        opened[0].cancel()


@pytest.mark.parametrize("way", ["view", "thaw", "expiry"])
def test_a_move_that_is_given_up_leaves_everything_as_it_was(way):
    with job(spec_of("RMSprop"), HERE) as made:
        worker = Worker(made)
        worker.train(2)
        wanted = made.next_map(THERE)
        made.begin_move()
        if way == "expiry":
            for node in made.nodes.values():
                node.stub.Freeze(pb.FreezeRequest(cut=MOVE, seconds=60))
                node.stub.Reach(pb.ReachRequest(cut=MOVE, seconds=0.01))
        else:
            made.reach()
            assert [made.prepare(number, wanted).received_bytes > 0 for number in made.nodes] == [True] * 3
        worker.send()
        if way == "view":
            made.moving = ""
            made.show()
        elif way == "thaw":
            for node in made.nodes.values():
                node.stub.Thaw(pb.ThawRequest(cut=MOVE))
        assert worker.results() == [pb.OUTCOME_APPLIED] * 2
        assert not any(made.model(number).bound for number in made.nodes)
        worker.train(1)
        assert_same(made.values(), undisturbed(spec_of("RMSprop"), 4)[0])
        # The next one finds nothing in its way.
        made.abort()
        made.move(THERE)
        worker.open()
        worker.train(1)
        assert_same(made.values(), undisturbed(spec_of("RMSprop"), 5)[0])
        worker.end()


def test_a_shard_that_has_prepared_waits_for_the_decision_however_long():
    with job(spec_of(), HERE) as made:
        wanted = made.next_map(THERE)
        made.begin_move()
        for node in made.nodes.values():
            node.stub.Freeze(pb.FreezeRequest(cut=MOVE, seconds=60))
            node.stub.Reach(pb.ReachRequest(cut=MOVE, seconds=0.5, models=[pb.ModelCut(model="model")]))
        made.prepare(0, wanted)
        # Those that have not are not bound.
        wait_until(lambda: not made.model(1).gate.still)
        assert made.model(0).gate.still
        with pytest.raises(grpc.RpcError) as refused:
            made.prepare(1, wanted)
        assert "has gone on" in str(error_of(refused.value))
        made.abort()
        assert not made.model(0).gate.still


def test_another_cut_waits_for_the_decision(monkeypatch):
    with job(spec_of(), HERE) as made:
        wanted = made.next_map(THERE)
        made.begin_move()
        made.reach()
        for number in made.nodes:
            made.prepare(number, wanted)
        monkeypatch.setattr("ps_server.shard.moves.SETTLE_SECONDS", 0.1)
        with pytest.raises(grpc.RpcError) as refused:
            made.nodes[0].stub.Freeze(pb.FreezeRequest(cut="other", seconds=60))
        assert isinstance(error_of(refused.value), Unavailable)
        monkeypatch.setattr("ps_server.shard.moves.SETTLE_SECONDS", 30)
        replies = []
        freezing = threading.Thread(
            target=lambda: replies.append(made.nodes[0].stub.Freeze(pb.FreezeRequest(cut="other", seconds=60)))
        )
        freezing.start()
        made.commit(wanted)
        freezing.join(10)
        assert [model.model for model in replies[0].models] == ["model"]
        assert made.model(0).layout.shard_map.epoch == 2


def test_a_move_that_is_over_is_not_prepared_for():
    with job(spec_of(), HERE) as made:
        made.begin_move()
        made.reach()
        made.moving = ""
        made.revision += 1
        # Only the others know.
        for number in (1, 2):
            made.nodes[number].show(made.view)
        with pytest.raises(grpc.RpcError) as refused:
            made.prepare(1, made.next_map(THERE))
        assert "the move is over" in str(error_of(refused.value))


@pytest.mark.parametrize(
    ("wanted", "kind", "words"),
    [
        (lambda held: map_of(held.spec, THERE, epoch=4), Unavailable, "newest shard map"),
        (lambda held: map_of(spec_of("Adam"), THERE, epoch=2), ModelMismatch, "optimizer"),
        (
            lambda held: type(held)(2, held.spec, 3, tuple(type(p)(p.variable, 0, 1, 2) for p in held.slices)),
            InvalidRequest,
            "slices only move",
        ),
    ],
    ids=["epoch", "optimizer", "rows"],
)
def test_a_shard_map_that_does_not_follow_is_refused_and_nothing_is_changed(wanted, kind, words, monkeypatch):
    monkeypatch.setattr("ps_server.shard.registry.PATIENCE_SECONDS", 0.1)
    with job(spec_of(), HERE) as made:
        worker = Worker(made)
        made.begin_move()
        made.reach()
        with pytest.raises(grpc.RpcError) as refused:
            made.prepare(2, wanted(made.maps["model"]))
        assert isinstance(error_of(refused.value), kind)
        assert words in str(error_of(refused.value))
        made.abort()
        worker.train(1)
        worker.end()


def test_a_model_without_values_is_not_moved():
    with job(spec_of(), HERE) as made:
        made.maps["model"] = map_of(spec_of(), HERE)
        other = spec_of()
        other = type(other)("other", other.optimizer, other.variables, other.group_options)
        made.maps["other"] = map_of(other, HERE)
        made.show()
        made.model(0, name="other")
        made.begin_move()
        made.reach()
        with pytest.raises(grpc.RpcError) as refused:
            made.prepare(0, map_of(other, THERE, epoch=2))
        assert isinstance(error_of(refused.value), StateLost)


def test_a_source_that_does_not_answer_undoes_the_move():
    with job(spec_of(), HERE) as made:
        worker = Worker(made)
        made.begin_move()
        made.reach()
        real = made.nodes[1].address
        made.nodes[1].address = "127.0.0.1:1"
        made.show()
        with pytest.raises(grpc.RpcError) as refused:
            made.prepare(2, made.next_map(THERE))
        assert isinstance(error_of(refused.value), Unavailable)
        made.nodes[1].address = real
        made.abort()
        worker.train(1)
        worker.end()


def test_values_that_are_loaded_while_slices_move_come_before_or_after_all_of_it():
    with job(spec_of("RMSprop"), HERE) as made:
        made.begin_move()
        made.reach()
        values, model = made.values(), made.model(1)
        loaded = []

        def write():
            try:
                load(made.nodes[1], model, bytes(model.layout.region_bytes))
                loaded.append(None)
            except grpc.RpcError as error:
                loaded.append(error_of(error))

        writing = threading.Thread(target=write)
        writing.start()
        wanted = made.next_map(THERE)
        for number in made.nodes:
            made.prepare(number, wanted)
        made.commit(wanted)
        writing.join(10)
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
        assert header.tracker
        for slices in ([3], [0, 0]):
            with pytest.raises(grpc.RpcError) as refused:
                list(made.nodes[0].stub.Save(pb.SaveRequest(model="model", slices=slices)))
            assert isinstance(error_of(refused.value), InvalidRequest)
        worker.end()


def test_the_memory_of_what_was_there_before_is_given_back():
    with job(spec_of(momentum=0.9), HERE) as made:
        worker = Worker(made)
        worker.train(2)

        async def regions():
            return [weakref.ref(made.nodes[number].registry.models[0]._live.newest.region) for number in made.holders]

        before = made.loop.run(regions())
        enabled = gc.isenabled()
        gc.disable()
        try:
            made.move(THERE)
            wait_until(lambda: not any(region() for region in before))
        finally:
            if enabled:
                gc.enable()


def test_a_shard_that_came_after_the_move_lies_by_the_map_in_force():
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


def test_a_full_disk_refuses_the_move_and_loses_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr("ps_server.log.durable.SEGMENT_BYTES", 1 << 18)
    fallocate = os.posix_fallocate
    with job(spec_of("RMSprop"), HERE, path=tmp_path) as made:
        worker = Worker(made)
        worker.train(2)
        made.begin_move()
        made.reach()

        def full(descriptor, offset, size):
            if "of-2" in str(Path(f"/proc/self/fd/{descriptor}").readlink()):
                raise OSError(errno.ENOSPC, "No space left on device")
            fallocate(descriptor, offset, size)

        with monkeypatch.context() as limited:
            limited.setattr(os, "posix_fallocate", full)
            limited.setattr(type(made.nodes[2].storage.log), "_wanting", lambda log: True)
            with pytest.raises(grpc.RpcError) as refused:
                made.prepare(2, made.next_map(THERE))
            assert isinstance(error_of(refused.value), StorageFull)
        assert made.nodes[2].storage.log._reserved == {}
        made.abort()
        worker.train(1)
        made.move(THERE)
        worker.open()
        worker.train(1)
        assert_same(made.values(), undisturbed(spec_of("RMSprop"), 4)[0])
        assert all(node.storage.log._reserved == {} for node in made.nodes.values())
        worker.end()


def test_a_cut_that_is_undone_while_the_log_is_written_leaves_nothing_prepared():
    with job(spec_of("RMSprop"), HERE) as made:
        worker = Worker(made)
        worker.train(1)
        made.begin_move()
        made.reach()
        parts, node = made.nodes[2].registry.parts, made.nodes[2]
        keep = parts.keep

        async def overtaken(logs):
            await keep(logs)
            await asyncio.to_thread(node.stub.Thaw, pb.ThawRequest(cut=MOVE))

        object.__setattr__(parts, "keep", overtaken)
        with pytest.raises(grpc.RpcError) as late:
            made.prepare(2, made.next_map(THERE))
        assert "the move is over" in str(error_of(late.value))
        assert not made.model(2).bound
        object.__setattr__(parts, "keep", keep)
        made.abort()
        made.move(THERE)
        worker.open()
        worker.train(1)
        worker.end()
