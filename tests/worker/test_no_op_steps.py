"""While a worker has no data its models make empty steps, each at its own pace, and none outlives the wait."""

from __future__ import annotations

import threading

import pytest

from ps_protocol.errors import NotReady, Retryable, StateLost, StorageFull, Unavailable
from ps_worker.deadlock_avoidance import no_op_steps
from tests.support.shards import wait_until


class Model:
    """Counts empty steps; from step ``blocks_at`` on a step waits for others, who never come."""

    def __init__(
        self,
        blocks_at: int = 1 << 30,
        error: Exception | None = None,
        interrupted: type[Retryable] = Unavailable,
    ) -> None:
        self.steps = self.pulls = 0
        self._blocks_at, self._error, self._interrupted_error = blocks_at, error, interrupted
        self._interrupted = threading.Event()

    def begin_waiting(self) -> None:
        assert not self.steps

    def no_op_step(self) -> None:
        self.steps += 1
        if self._error is not None:
            raise self._error
        if self.steps >= self._blocks_at:
            self._interrupted.wait()
            raise self._interrupted_error("interrupted")

    def interrupt(self) -> None:
        self._interrupted.set()

    def resume(self) -> None:
        self._interrupted.clear()

    def catch_up(self) -> None:
        self.pulls += 1


@pytest.mark.parametrize("waits_for", [Unavailable, StorageFull, NotReady])
def test_models_step_at_their_own_pace_and_take_the_newest_parameters_at_the_end(waits_for: type[Retryable]) -> None:
    stuck, free = Model(blocks_at=2, interrupted=waits_for), Model()
    with no_op_steps([stuck, free], lambda: True):
        wait_until(lambda: free.steps > 5 and stuck.steps == 2)
    steps = stuck.steps, free.steps
    assert (stuck.pulls, free.pulls) == (1, 1)
    assert (stuck.steps, free.steps) == steps
    assert not stuck._interrupted.is_set()


def test_where_nobody_waits_no_step_is_made() -> None:
    model = Model()
    asked = threading.Event()

    def others_wait() -> bool:
        asked.set()
        return False

    with no_op_steps([model], others_wait):
        assert asked.wait(60)
    assert (model.steps, model.pulls) == (0, 1)


def test_an_error_of_a_step_is_raised_and_the_others_end() -> None:
    failing, stuck = Model(error=StateLost("gone")), Model(blocks_at=1)
    with pytest.raises(StateLost), no_op_steps([failing, stuck], lambda: True):
        wait_until(lambda: failing.steps == stuck.steps == 1)


def test_what_ends_the_wait_is_not_hidden_by_an_error_of_a_step() -> None:
    failing = Model(error=StateLost("gone"))
    with pytest.raises(KeyboardInterrupt), no_op_steps([failing], lambda: True):
        raise KeyboardInterrupt
    assert failing.pulls == 0


def test_without_models_nothing_happens() -> None:
    with no_op_steps([], lambda: True):
        pass
