"""SIGTERM ends a with block as an exception would, unless the script has a handler of its own."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from ps_worker.session.terminate import TerminationGuard


@pytest.fixture(autouse=True)
def default_handler() -> Iterator[None]:
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGTERM, before)


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def test_sigterm_raises_an_exit_with_code_143_and_the_default_comes_back() -> None:
    guard = TerminationGuard(3.0)
    guard.install()
    with pytest.raises(SystemExit) as caught:
        terminate()
    guard.remove()
    assert caught.value.code == 143
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_handler_of_the_script_is_left_alone() -> None:
    seen: list[int] = []

    def own(number: int, frame: object) -> None:
        seen.append(number)

    signal.signal(signal.SIGTERM, own)
    guard = TerminationGuard(3.0)
    guard.install()
    terminate()
    guard.remove()
    assert seen == [signal.SIGTERM]
    assert signal.getsignal(signal.SIGTERM) is own


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_just_ends() -> None:
    guard = TerminationGuard(3.0)
    guard.install()
    child = os.fork()
    if child == 0:
        try:
            terminate()
        finally:
            os._exit(7)
    _, status = os.waitpid(child, 0)
    guard.remove()
    assert os.WTERMSIG(status) == signal.SIGTERM
