"""The first values of a model: who uploads them, and who waits."""

from __future__ import annotations

import pytest
import torch

from ps_protocol.errors import (
    NotReady,
)
from tests.worker.fakes import FakeSession
from tests.worker.step.stepping import Worker, started


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
        first.pipeline.start() if first.pipeline.version == 0 and not first.pipeline.started else None
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
