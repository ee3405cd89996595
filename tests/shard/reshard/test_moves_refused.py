"""Moves of slices that are refused, given up, or wait for their decision: nothing is changed meanwhile."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from pathlib import Path

import grpc
import pytest

from ps_protocol.errors import InvalidRequest, ModelMismatch, PsError, StateLost, StorageFull, Unavailable
from ps_protocol.v1 import shard_pb2 as pb
from tests.shard.reshard.moving import MOVE, job, map_of, spec_of
from tests.shard.reshard.moving_worker import Worker, assert_same, undisturbed
from tests.support.shards import error_of, refused_as, wait_until

pytestmark = pytest.mark.usefixtures("small_blocks")

HERE, THERE = [0, 0, 1, 1, 0], [0, 1, 2, 0, 2]


@pytest.mark.parametrize("way", ["view", "resume", "expiry"])
def test_a_move_that_is_given_up_leaves_everything_as_it_was(way):
    with job(spec_of("RMSprop"), HERE) as made:
        worker = Worker(made)
        worker.train(2)
        wanted = made.next_map(THERE)
        made.begin_move()
        if way == "expiry":
            for node in made.nodes.values():
                node.stub.Pause(pb.PauseRequest(quiesce=MOVE, seconds=60))
                node.stub.CatchUp(pb.CatchUpRequest(quiesce=MOVE, seconds=0.01))
        else:
            made.reach()
            assert [made.prepare(number, wanted).received_bytes > 0 for number in made.nodes] == [True] * 3
        worker.send()
        if way == "view":
            made.moving = ""
            made.show()
        elif way == "resume":
            for node in made.nodes.values():
                node.stub.Resume(pb.ResumeRequest(quiesce=MOVE))
        assert worker.results() == [pb.OUTCOME_APPLIED] * 2
        assert not any(made.model(number).is_pending for number in made.nodes)
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
            node.stub.Pause(pb.PauseRequest(quiesce=MOVE, seconds=60))
            node.stub.CatchUp(pb.CatchUpRequest(quiesce=MOVE, seconds=60, models=[pb.ModelCut(model="model")]))
        made.prepare(0, wanted)
        made.loop.advance(61)
        # Those that have not are not bound.
        wait_until(lambda: not made.model(1).gate.paused)
        assert made.model(0).gate.paused
        with refused_as(PsError, "has resumed"):
            made.prepare(1, wanted)
        made.abort()
        assert not made.model(0).gate.paused


def test_another_cut_waits_for_the_decision(monkeypatch):
    with job(spec_of(), HERE) as made:
        wanted = made.next_map(THERE)
        made.prepare_all(wanted)
        monkeypatch.setattr("ps_server.shard.times.OUTCOME_SECONDS", 0.1)
        with refused_as(Unavailable):
            made.nodes[0].stub.Pause(pb.PauseRequest(quiesce="other", seconds=60))
        monkeypatch.setattr("ps_server.shard.times.OUTCOME_SECONDS", 30)
        replies = []
        freezing = threading.Thread(
            target=lambda: replies.append(made.nodes[0].stub.Pause(pb.PauseRequest(quiesce="other", seconds=60)))
        )
        freezing.start()
        made.commit(wanted)
        freezing.join(60)
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
        with refused_as(PsError, "the move is over"):
            made.prepare(1, made.next_map(THERE))


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
    monkeypatch.setattr("ps_server.shard.times.UNKNOWN_SECONDS", 0.1)
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
        with refused_as(StateLost):
            made.prepare(0, map_of(other, THERE, epoch=2))


def test_a_source_that_does_not_answer_undoes_the_move():
    with job(spec_of(), HERE) as made:
        worker = Worker(made)
        made.begin_move()
        made.reach()
        real = made.nodes[1].address
        made.nodes[1].address = "127.0.0.1:1"
        made.show()
        with refused_as(Unavailable):
            made.prepare(2, made.next_map(THERE))
        made.nodes[1].address = real
        made.abort()
        worker.train(1)
        worker.end()


def test_a_full_disk_refuses_the_move_and_loses_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr("ps_server.log.segments.SEGMENT_BYTES", 1 << 18)
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
            limited.setattr(type(made.nodes[2].storage.log), "_wanting", lambda log, size: True)
            with refused_as(StorageFull):
                made.prepare(2, made.next_map(THERE))
            # Who comes next would wait for a file that is being made, and get its error.
            making = made.nodes[2].storage.log
            wait_until(lambda: making._preparing is None or making._preparing.done())
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
        parts, node = made.nodes[2].registry.context, made.nodes[2]
        keep = parts.keep

        async def overtaken(logs):
            await keep(logs)
            await asyncio.to_thread(node.stub.Resume, pb.ResumeRequest(quiesce=MOVE))

        object.__setattr__(parts, "keep", overtaken)
        with refused_as(PsError, "the move is over"):
            made.prepare(2, made.next_map(THERE))
        assert not made.model(2).is_pending
        object.__setattr__(parts, "keep", keep)
        made.abort()
        made.move(THERE)
        worker.open()
        worker.train(1)
        worker.end()
