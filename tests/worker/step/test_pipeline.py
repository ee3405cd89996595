"""A model's steps over several shards: positions, options, in-band errors, the end."""

from __future__ import annotations

import os
import signal
import threading

import pytest
import torch

from ps_protocol.errors import (
    Fenced,
    InvalidRequest,
    UnsupportedOptimizer,
)
from ps_protocol.model.spec import Options
from ps_protocol.wire.convert.options import options_from_pb
from ps_worker import Outcome
from tests.support.shards import wait_until
from tests.worker.fakes import FakeSession
from tests.worker.step.stepping import started


def test_a_step_goes_to_every_shard_with_the_same_sequence_and_position(session: FakeSession) -> None:
    worker = started(session)
    summaries = [worker.step(), worker.step()]
    assert worker.moved() == 2.0
    for shard in session.shards:
        assert [(p.sequence, p.phase, p.clock, p.pulled_version) for p in shard.pushes] == [(1, 0, 1, 0), (2, 0, 2, 1)]
    assert summaries[-1].versions == (2, 2)
    assert summaries[-1].outcome is Outcome.APPLIED
    assert session.steps == [(None, 0, 2 * worker.region_bytes)] * 2


def test_options_are_sent_only_when_they_change(session: FakeSession) -> None:
    declared: Options = {}
    worker = started(session)
    for options in (declared, declared, {"lr": 0.5}, {"lr": 0.5}, declared):
        worker.step(options=(options,))
    sent = [list(map(options_from_pb, push.groups)) for push in session.shards[0].pushes]
    assert sent == [[], [], [{"lr": 0.5}], [], [declared]]
    assert worker.moved() == 4.0


def test_changed_options_are_sent_again_on_a_new_stream(session: FakeSession) -> None:
    worker = started(session)
    worker.step(options=({"lr": 0.5},))
    session.shards[0].faults.lose_push = 1
    worker.step(options=({"lr": 0.5},))
    sent = [list(map(options_from_pb, push.groups)) for push in session.shards[0].pushes]
    assert sent == [[{"lr": 0.5}], [], [{"lr": 0.5}]]
    assert worker.moved() == 1.0


def test_options_that_no_message_holds_are_refused_before_anything_is_sent(session: FakeSession) -> None:
    worker = started(session)
    with pytest.raises(InvalidRequest, match="'lr' cannot be sent"):
        worker.step(options=({"lr": 1 << 70},))
    assert [len(shard.pushes) for shard in session.shards] == [0, 0]
    assert worker.step().outcome is Outcome.APPLIED
    assert worker.moved() == 1.0


def test_a_late_worker_jumps_to_the_highest_clock_of_its_shards(session: FakeSession) -> None:
    worker = started(session)
    session.shards[0].faults.late = [5]
    session.shards[1].faults.late = [6]
    summary = worker.step()
    assert (summary.outcome, summary.clock) == (Outcome.LATE, 6)
    assert worker.step().clock == 7
    assert worker.moved() == 1.0


def test_the_clock_starts_again_after_a_barrier(session: FakeSession) -> None:
    worker = started(session)
    worker.step()
    worker.pipeline.arrive(0)
    worker.pipeline.arrive(0)
    session.phase = 1
    worker.step()
    for shard in session.shards:
        assert shard.arrivals == [0, 0]
        assert [(p.phase, p.clock) for p in shard.pushes] == [(0, 1), (1, 1)]


def test_an_arrival_reaches_a_shard_whose_stream_broke(session: FakeSession) -> None:
    worker = started(session)
    worker.step()
    session.shards[0].stop()
    session.shards[0].serve()
    wait_until(lambda: not worker.pipeline.streams[0].is_open)
    worker.pipeline.arrive(0)
    worker.pipeline.close()
    assert session.shards[0].opens[-1].phase == 0
    assert len(session.shards[0].opens) == 2


def test_a_worker_that_joins_late_starts_where_the_shards_say(session: FakeSession) -> None:
    first = started(session)
    for _ in range(3):
        first.step()
    session.shards[1].stand = (0, 4)
    late = session.join(rank=1)
    second = started(late, seed=1)
    assert second.pipeline.joined_running
    assert not first.pipeline.joined_running
    torch.testing.assert_close(second.parameters[1], first.parameters[1])
    assert second.step().clock == 5
    late.close()


def test_a_refusal_is_raised_after_all_shards_answered_and_the_streams_go_on(session: FakeSession) -> None:
    worker = started(session)
    session.shards[0].faults.refuse = [InvalidRequest("no", variable="v", shard="0")]
    with pytest.raises(InvalidRequest, match="no") as caught:
        worker.step()
    assert caught.value.variable == "v"
    assert session.shards[1].model.version == 1
    assert worker.step().versions == (1, 2)
    assert [len(s.opens) for s in session.shards] == [1, 1]


def test_a_step_that_raised_is_told_and_the_worker_goes_on_from_its_version(session: FakeSession) -> None:
    worker = started(session)
    session.shards[0].faults.step_raises = [UnsupportedOptimizer("a step failed and was skipped", shard="0")]
    with pytest.raises(UnsupportedOptimizer, match="was skipped"):
        worker.step()
    assert worker.step().versions == (2, 2)
    assert [len(s.opens) for s in session.shards] == [1, 1]
    assert session.shards[0].pushes[-1].pulled_version == 1


def test_refusals_of_several_shards_are_told_together(session: FakeSession) -> None:
    worker = started(session)
    for shard in session.shards:
        shard.faults.refuse = [InvalidRequest("no", shard=str(shard.model.layout.shard))]
    with pytest.raises(InvalidRequest) as caught:
        worker.step()
    assert caught.value.__notes__ == ["and from another shard: no; shard: 1"]


def test_a_parked_pull_tells_the_user_why(session: FakeSession) -> None:
    worker = started(session)
    session.shards[0].faults.waiting = ["waiting for worker 3 at step 17"]
    worker.step()
    assert session.hints == ["waiting for worker 3 at step 17"]


def test_a_skipped_step_moves_the_clock_and_carries_no_gradient(session: FakeSession) -> None:
    worker = started(session)
    assert worker.step(skipped=True).outcome is Outcome.SKIPPED
    assert worker.moved() == 0.0
    assert session.steps == [(None, 0, worker.region_bytes)]
    assert [s.stand for s in session.shards] == [(0, 1), (0, 1)]


def test_a_worker_that_lost_its_place_sends_nothing(session: FakeSession) -> None:
    worker = started(session)
    session.fenced = Fenced("gone")
    with pytest.raises(Fenced):
        worker.step()
    assert session.shards[0].pushes == []


def test_a_worker_that_loses_its_place_while_a_shard_is_away_stops_waiting(session: FakeSession) -> None:
    worker = started(session)
    session.shards[0].stop()

    def fence() -> None:
        session.fenced = Fenced("gone")

    session.on_hint = fence
    with pytest.raises(Fenced):
        worker.step()


def test_ctrl_c_gets_through_and_the_next_step_goes_on(session: FakeSession) -> None:
    before = set(threading.enumerate())
    worker = started(session)
    shard = session.shards[0]
    shard.faults.on_push = [lambda: os.kill(os.getpid(), signal.SIGINT)]
    with pytest.raises(KeyboardInterrupt):
        worker.step()
    shard.faults.release.put(None)
    summary = worker.step()
    assert summary.outcome is Outcome.APPLIED
    assert [s.pushes[-1].sequence for s in session.shards] == [2, 2]
    worker.pipeline.close()
    session.close()
    for shard in session.shards:
        shard.stop()
    for thread in set(threading.enumerate()) - before:
        # Python goes on naming threads that it did not start, and that have ended, as "Dummy".
        if not thread.name.startswith(("ThreadPoolExecutor", "Dummy")):
            thread.join(60)
            assert not thread.is_alive()


def test_a_pull_brings_what_others_pushed(session: FakeSession) -> None:
    first = started(session)
    other = session.join(rank=1)
    second = started(other)
    second.step()
    assert first.moved() == 0.0
    first.pipeline.pull()
    assert first.moved() == 1.0
    assert first.pipeline.version == 1
    other.close()


def test_closing_in_a_forked_child_leaves_the_parents_streams_alone(session: FakeSession) -> None:
    worker = started(session)
    worker.step()
    child = os.fork()
    if child == 0:
        worker.pipeline.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    worker.step()
    assert [len(s.opens) for s in session.shards] == [1, 1]
    assert worker.moved() == 2.0


def test_closing_twice_is_harmless(session: FakeSession) -> None:
    worker = started(session)
    worker.pipeline.close()
    worker.pipeline.close()
