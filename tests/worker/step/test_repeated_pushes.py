"""A push whose stream broke is repeated; a shard that is away is waited for, and one that lost its state is told."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest
import torch

from ps_protocol.errors import (
    NotReady,
    StateLost,
    StorageFull,
    Unavailable,
)
from ps_worker import Outcome
from tests.support.shards import wait_until
from tests.worker.fakes import FakeSession
from tests.worker.step.stepping import Worker, started


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
    worker = started(session)
    worker.pipeline.reconnect_timeout_seconds = 0.3
    session.shards[1].stop()
    with pytest.raises(
        Unavailable, match=f"gave up after 0.3 seconds: shard 1 at {session.shards[1].address}"
    ) as caught:
        worker.step()
    assert caught.value.shard == "1"


def placing(progress: int) -> NotReady:
    return NotReady(f"model 'model' is being placed: {progress} MB read", shard="1", progress=progress)


def test_a_model_that_is_being_placed_is_waited_for_as_long_as_it_advances(
    session: FakeSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = Worker(session, reconnect_timeout_seconds=60.0)
    refusals = session.shards[1].faults.refuse_open = [placing(done) for done in (5, 4, 3, 2, 1)]
    # Each takes 40 s.
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + 40.0 * (5 - len(refusals)), sleep=lambda _: None)
    monkeypatch.setattr("ps_protocol.retry.time", clock)
    worker.pipeline.start()
    worker.step()
    assert worker.moved() == 1.0
    assert "model 'model' is being placed: 5 MB read; waiting for it" in session.hints


def test_a_model_whose_placing_does_not_advance_is_given_up_with_what_was_said(
    session: FakeSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = Worker(session, reconnect_timeout_seconds=60.0)
    refusals = session.shards[1].faults.refuse_open = [placing(7)] * 20
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + 40.0 * (20 - len(refusals)), sleep=lambda _: None)
    monkeypatch.setattr("ps_protocol.retry.time", clock)
    with pytest.raises(Unavailable, match=r"gave up after 60 seconds: .*being placed: 7 MB read") as caught:
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
    session.shards[1].model.forget()
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


def test_a_worker_that_joins_tells_a_shard_that_has_it_behind_the_others(session: FakeSession) -> None:
    first = started(session)
    first.step()
    first.step()
    ahead, behind = session.shards
    # What a restart forgets: the shard would wait for pushes that the new process of this rank never makes.
    behind.stand = (0, 0)
    opens = len(ahead.opens), len(behind.opens)
    again = started(session.join(0, incarnation=2))
    assert [opened.HasField("clock") for opened in ahead.opens[opens[0] :]] == [False]
    told = [opened.clock if opened.HasField("clock") else None for opened in behind.opens[opens[1] :]]
    assert told == [None, 2]
    assert again.step().clock == 3


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
        wait_until(lambda: bool(answered.model.last_sequence))
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
