"""A model's steps over several shards: positions, repeats over broken streams, in-band errors, initial values."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from ps_protocol.errors import (
    Fenced,
    InvalidRequest,
    NotReady,
    StateLost,
    StorageFull,
    Unavailable,
    UnsupportedOptimizer,
)
from ps_protocol.model.spec import Options
from ps_protocol.wire.convert_options import options_from_pb
from ps_worker.memory.flat import FlatModel
from ps_worker.model.declare import build_spec
from ps_worker.step.gradients import GradientBuffers
from ps_worker.step.pipeline import StepPipeline
from ps_worker.step.summary import Outcome, StepPush, StepSummary
from tests.support.shards import wait_until
from tests.worker.fakes import FakeSession, job


class Worker:
    """A flat model and its pipeline; every gradient is one, the learning rate is 1."""

    def __init__(self, session: FakeSession, *, seed: int = 0, **timeouts: float) -> None:
        torch.manual_seed(seed)
        self.parameters = [nn.Parameter(torch.randn(3)), nn.Parameter(torch.randn(12, 5)), nn.Parameter(torch.randn(4))]
        declaration = build_spec(torch.optim.SGD, self.parameters, {"lr": 1.0}, name="model")
        self.initial = [p.detach().clone() for p in self.parameters]
        shard_map = session.declare(declaration.spec)
        self.flat = FlatModel(declaration.bindings, shard_map)
        self.gradients = GradientBuffers(self.flat.plan, declaration.bindings)
        self.pipeline = StepPipeline(session, shard_map, self.flat, self.gradients, **timeouts)

    @property
    def region_bytes(self) -> int:
        """Of all shards together."""
        return sum(layout.region_bytes for layout in self.flat.plan.layouts)

    def step(self, *, skipped: bool = False, options: tuple[Options, ...] = ({},)) -> StepSummary:
        for parameter in self.parameters:
            parameter.grad = torch.ones_like(parameter)
        return self.pipeline.exchange(StepPush(self.gradients.collect(), options, skipped=skipped))

    def moved(self) -> float:
        """How far every parameter is below its initial value; the same for all, or the test fails."""
        distances = torch.cat([(i - p.detach()).view(-1) for i, p in zip(self.initial, self.parameters, strict=True)])
        torch.testing.assert_close(distances, distances[:1].expand_as(distances))
        return round(distances[0].item(), 4)


@pytest.fixture
def session() -> Iterator[FakeSession]:
    with job(shards=2) as session:
        yield session


def started(session: FakeSession, **arguments: float) -> Worker:
    worker = Worker(session, **arguments)
    worker.pipeline.start()
    return worker


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


def test_a_push_whose_reply_was_lost_is_repeated_and_applied_once(session: FakeSession) -> None:
    worker = started(session)
    session.shards[1].faults.lose_reply = 1
    summary = worker.step()
    assert summary.outcomes == (Outcome.APPLIED, Outcome.DUPLICATE)
    assert [p.sequence for p in session.shards[1].pushes] == [1, 1]
    assert worker.moved() == 1.0
    assert "trying again" in session.hints[0]


def test_a_worker_tells_a_shard_which_of_its_pushes_that_one_said_to_have_applied(session: FakeSession) -> None:
    worker, (first, second) = started(session), session.shards
    assert [shard.opens[-1].acknowledged for shard in (first, second)] == [0, 0]
    worker.step()
    second.faults.lose_reply = 1
    worker.step()
    # The second had applied it, and what it said of it was lost.
    assert second.opens[-1].acknowledged == 1
    second.faults.lose_push = 1
    worker.step()
    assert second.opens[-1].acknowledged == 1
    first.faults.lose_push = 1
    worker.step()
    assert first.opens[-1].acknowledged == 3


def test_another_torch_on_a_shard_is_warned_of_once_naming_both_versions(session: FakeSession, caplog) -> None:
    worker = started(session)
    session.shards[0].torch_version = "9.9.9"
    session.shards[0].faults.lose_push = 2
    worker.step()
    said = [record.getMessage() for record in caplog.records if "torch 9.9.9" in record.getMessage()]
    assert len(said) == 1
    assert f"this worker computes gradients with torch {torch.__version__}" in said[0]
    assert "shard 0" in said[0]


def test_a_push_that_was_lost_is_repeated_and_applied(session: FakeSession) -> None:
    worker = started(session)
    session.shards[0].faults.lose_push = 2
    assert worker.step().outcome is Outcome.APPLIED
    assert [p.sequence for p in session.shards[0].pushes] == [1, 1, 1]
    assert worker.moved() == 1.0


def test_a_shard_that_comes_back_is_found_again_between_steps_and_goes_on(session: FakeSession) -> None:
    worker = started(session)
    worker.step()
    session.shards[1].stop()
    # It comes back as soon as the worker has noticed.
    session.on_hint = lambda: session.shards[1].serve() if session.shards[1]._server is None else None
    worker.step()
    assert worker.moved() == 2.0
    assert [p.sequence for p in session.shards[1].pushes] == [1, 2]


def test_a_shard_that_stays_away_is_named_with_its_address(session: FakeSession) -> None:
    worker = started(session, reconnect_timeout_seconds=0.3)
    session.shards[1].stop()
    with pytest.raises(
        Unavailable, match=f"gave up after 0.3 seconds: shard 1 at {session.shards[1].address}"
    ) as caught:
        worker.step()
    assert caught.value.shard == "1"


def placing(progress: int) -> NotReady:
    return NotReady(f"model 'model' is being placed: {progress} MB read", shard="1", progress=progress)


def test_a_model_that_is_being_placed_is_waited_for_as_long_as_it_advances(session: FakeSession) -> None:
    worker = Worker(session, reconnect_timeout_seconds=0.25)
    session.shards[1].faults.refuse_open = [placing(done) for done in (5, 4, 3, 2, 1)]
    worker.pipeline.start()  # Five pauses of 0.1 s and more.
    worker.step()
    assert worker.moved() == 1.0
    assert "model 'model' is being placed: 5 MB read; waiting for it" in session.hints


def test_a_model_whose_placing_does_not_advance_is_given_up_with_what_was_said(session: FakeSession) -> None:
    worker = Worker(session, reconnect_timeout_seconds=0.25)
    session.shards[1].faults.refuse_open = [placing(7)] * 20
    with pytest.raises(Unavailable, match=r"gave up after 0\.25 seconds: .*being placed: 7 MB read") as caught:
        worker.pipeline.start()
    assert caught.value.shard == "1"


def test_a_shard_that_comes_back_and_places_its_model_is_waited_for_between_steps(session: FakeSession) -> None:
    worker = started(session)
    worker.step()
    session.shards[1].stop()
    session.shards[1].faults.refuse_open = [placing(2), placing(1)]
    session.shards[1].serve()
    worker.step()
    assert worker.moved() == 2.0
    assert [p.sequence for p in session.shards[1].pushes] == [1, 2]


def test_a_shard_that_comes_back_empty_is_a_loss_of_state(session: FakeSession) -> None:
    worker = started(session)
    worker.step()
    session.shards[1].stop()
    session.shards[1].forget()
    session.shards[1].serve()
    with pytest.raises(StateLost, match="came back without the parameters of model 'model'") as caught:
        worker.step()
    assert caught.value.shard == "1"


def test_a_stream_opened_again_says_how_far_the_worker_has_come_and_its_push_is_repeated_as_it_was(
    session: FakeSession,
) -> None:
    worker = started(session)
    worker.step()
    shard = session.shards[0]
    shard.faults.lose_push = 1
    worker.step()
    assert [(p.sequence, p.clock) for p in shard.pushes] == [(1, 1), (2, 2), (2, 2)]
    clocks = [opened.clock if opened.HasField("clock") else None for opened in shard.opens]
    assert clocks == [None, 1]
    session.phase = 1
    shard.faults.lose_push = 1
    worker.step()
    assert [opened.clock for opened in shard.opens][2:] == [0]


def test_a_shard_that_waits_does_not_hide_a_push_that_another_has_lost(session: FakeSession) -> None:
    worker = started(session)
    waits, loses = session.shards
    heard = threading.Event()
    # The first shard answers only when the second has got the push, which at first is lost.
    waits.faults.waiting = ["for the other shard"]
    waits.faults.on_answer = [heard.wait]
    loses.faults.lose_push = 1
    loses.faults.on_open = heard.set
    worker.step()
    assert [p.sequence for p in loses.pushes] == [1, 1]
    assert worker.moved() == 1.0


def test_a_shard_restarted_after_it_answered_is_told_where_the_worker_stands_while_another_waits(
    session: FakeSession,
) -> None:
    worker = started(session)
    answered, waits = session.shards
    told = threading.Event()

    def restart() -> None:
        wait_until(lambda: bool(answered.last_sequence))
        answered.stop()
        answered.faults.on_open = told.set
        answered.serve()

    waits.faults.on_push = [restart]
    waits.faults.release.put(None)
    waits.faults.waiting = ["for somebody whose clock the other shard has forgotten"]
    waits.faults.on_answer = [told.wait]
    worker.step()
    assert answered.opens[-1].clock in (0, 1)  # 0: its answer was lost, and the push is repeated
    assert worker.moved() == 1.0


def test_a_shard_that_waits_does_not_hide_that_another_has_no_room(session: FakeSession) -> None:
    worker = started(session)
    waits, full = session.shards
    heard = threading.Event()
    waits.faults.waiting = ["for the other shard"]
    waits.faults.on_answer = [heard.wait]
    full.faults.refuse = [StorageFull("no room")]
    full.faults.on_push = [lambda: full.faults.on_push.append(heard.set)]
    for _ in range(2):
        full.faults.release.put(None)
    worker.step()
    assert [p.sequence for p in full.pushes] == [1, 1]
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
    assert session.shards[1].version == 1
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
        shard.faults.refuse = [InvalidRequest("no", shard=str(shard.layout.shard))]
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
        if "ThreadPoolExecutor" not in thread.name:
            thread.join(10)
            assert not thread.is_alive()


def test_the_lowest_rank_uploads_its_values_and_all_start_equal(session: FakeSession) -> None:
    first = started(session, seed=1)
    other = session.join(rank=1)
    second = started(other, seed=2)
    for mine, theirs in zip(first.parameters, second.parameters, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0)
    assert [s.loads for s in session.shards] == [1, 1]
    other.close()


def test_the_first_values_win_over_a_lowest_rank_that_comes_back(session: FakeSession) -> None:
    first = started(session, seed=1)
    first.step()
    again = session.join(rank=0, incarnation=2)
    second = started(again, seed=2)
    torch.testing.assert_close(second.parameters[0], first.parameters[0], rtol=0, atol=0)
    assert [s.loads for s in session.shards] == [1, 1]
    again.close()


def test_another_rank_waits_for_the_values_and_says_so(session: FakeSession) -> None:
    first = Worker(session, seed=1)
    other = session.join(rank=1)
    other.on_hint = lambda: (
        first.pipeline.start() if first.pipeline.version == 0 and not first.pipeline.streams.started else None
    )
    second = started(other, seed=2)
    assert "waiting for the initial values of model 'model'" in other.hints[0]
    torch.testing.assert_close(second.parameters[0], first.parameters[0], rtol=0, atol=0)
    other.close()


def test_a_rank_that_becomes_the_lowest_while_waiting_uploads_its_own_values(session: FakeSession) -> None:
    session.lowest = False

    def promote() -> None:
        session.lowest = True

    session.on_hint = promote
    worker = started(session)
    assert worker.moved() == 0.0
    assert [s.loads for s in session.shards] == [1, 1]


def test_waiting_for_initial_values_ends(session: FakeSession) -> None:
    session.lowest = False
    with pytest.raises(NotReady, match="no worker uploaded the initial values"):
        started(session, initial_timeout_seconds=0.0)


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
