"""SIGTERM ends a with block as an exception would: after the step under way, not for long, and not a second time."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import pytest

from ps_protocol.errors import Unavailable
from ps_worker.session.terminate import Terminated, TerminationGuard

LONG = 60.0
SHORT = 0.05


@pytest.fixture(autouse=True)
def default_handler() -> Iterator[None]:
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture
def guarded() -> Iterator[list[TerminationGuard]]:
    """Put a guard in; it is installed and removed."""
    guards: list[TerminationGuard] = []
    yield guards
    for guard in guards:
        guard.remove()


def installed(guards: list[TerminationGuard], patience_seconds: float) -> TerminationGuard:
    guard = TerminationGuard(patience_seconds)
    guard.install()
    guards.append(guard)
    return guard


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def wait_for_signals(seconds: float = LONG) -> None:
    """Until a signal's handler raises; fails after a time in which it should have."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(0.01)
    raise AssertionError("nothing was raised")


def test_sigterm_raises_an_exit_with_code_143_and_the_default_comes_back(guarded) -> None:
    guard = installed(guarded, LONG)
    with pytest.raises(SystemExit) as caught:
        terminate()
    guard.remove()
    assert caught.value.code == 143
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_handler_of_the_script_is_left_alone(guarded) -> None:
    seen: list[int] = []

    def own(number: int, frame: object) -> None:
        seen.append(number)

    signal.signal(signal.SIGTERM, own)
    guard = installed(guarded, LONG)
    terminate()
    guard.remove()
    assert seen == [signal.SIGTERM]
    assert signal.getsignal(signal.SIGTERM) is own


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_just_ends(guarded) -> None:
    guard = installed(guarded, LONG)
    child = os.fork()
    if child == 0:
        try:
            terminate()
        finally:
            os._exit(7)
    _, status = os.waitpid(child, 0)
    guard.remove()
    assert os.WTERMSIG(status) == signal.SIGTERM


def test_a_section_is_not_cut_in_two(guarded):
    guard = installed(guarded, LONG)
    parts = []

    def section() -> None:
        with guard.section():
            parts.append(1)
            terminate()
            with guard.section():
                parts.append(2)
            parts.append(3)

    with pytest.raises(Terminated):
        section()
    assert parts == [1, 2, 3]


def test_a_second_sigterm_ends_the_section_at_once(guarded):
    guard = installed(guarded, LONG)
    parts = []

    def section() -> None:
        with guard.section():
            terminate()
            parts.append(1)
            terminate()
            parts.append(2)

    with pytest.raises(Terminated):
        section()
    assert parts == [1]
    assert not guard.waits


def test_a_section_that_takes_too_long_is_ended(guarded, caplog):
    guard = installed(guarded, SHORT)

    def section() -> None:
        with guard.section():
            terminate()
            wait_for_signals()

    with pytest.raises(Terminated):
        section()
    assert "leaves in the middle of a step" in caplog.text


def test_an_error_of_the_section_does_not_hide_the_signal(guarded):
    guard = installed(guarded, LONG)

    def section() -> None:
        with guard.section():
            terminate()
            raise Unavailable("shard 0 does not answer")

    with pytest.raises(Terminated) as caught:
        section()
    assert isinstance(caught.value.__context__, Unavailable)


def test_after_a_section_without_a_signal_the_next_one_raises_at_once(guarded):
    guard = installed(guarded, LONG)
    with guard.section():
        pass
    with pytest.raises(Terminated):
        terminate()


def test_the_last_steps_are_waited_for_and_their_errors_are_said(guarded, caplog):
    guard = installed(guarded, LONG)
    done = []
    guard.finish(lambda: done.append(1))
    assert done == [1]

    def fail() -> None:
        raise Unavailable("shard 0 does not answer")

    guard.finish(fail)
    assert "leaves without the end of its last step: shard 0 does not answer" in caplog.text


def test_the_last_steps_do_not_take_longer_than_the_time(guarded):
    guard = installed(guarded, SHORT)
    with pytest.raises(Terminated):
        guard.finish(wait_for_signals)


def section(guard: TerminationGuard) -> None:
    with guard.section():
        terminate()


def test_a_timer_that_is_late_ends_nothing(guarded):
    guard = installed(guarded, LONG)
    with pytest.raises(Terminated):
        section(guard)
    # As if it had run out while the section ended.
    guard._expire()
    guard._expires = True
    terminate()
    with pytest.raises(Terminated):
        terminate()
