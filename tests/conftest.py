"""Loaded before any test: the SDK first, for it tells gRPC about forks before gRPC is loaded."""

import gc
import signal

import pytest

import ps_worker  # noqa: F401

# Garbage is collected here, between tests: gRPC's finalizers take locks, and one that ran in the middle of a call of
# another thread could stop all collections, or wait for a lock that an interrupted call has left behind.
gc.disable()

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell that runs this in the background ignores Ctrl-C for it; tests of Ctrl-C send it to themselves.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish():
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _garbage_goes():
    yield
    if gc.get_count()[0] > 20_000:  # objects made since the last time
        gc.collect()


@pytest.fixture(autouse=True)
def _signal_handlers_stay():
    """A handler that is left behind would swallow the Ctrl-C of a later test."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.getsignal(number) for number in numbers]
    yield
    after = [signal.getsignal(number) for number in numbers]
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler if handler is not None else signal.SIG_DFL)
    assert after == before
