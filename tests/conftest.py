"""Loaded before any test: the SDK first, for it tells gRPC about forks before gRPC is loaded."""

import gc
import os
import signal
import sys
from binascii import crc32

import pytest

# Several files run at a time: more threads of torch in each would only wait for each other, which they do by spinning.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import ps_worker  # noqa: F401, I001 -- first, for it tells gRPC about forks
import torch
from tests.recovery.zygote import NURSERY, nursery, shared
from tests.support import length

length.load_profile()

# Garbage is collected here, between tests: gRPC's finalizers take locks, and one that ran in the middle of a call of
# another thread could stop all collections, or wait for a lock that an interrupted call has left behind.
gc.disable()

# A shell that runs this in the background, or nohup, ignores signals that tests send to themselves and to programs.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_configure(config):
    """What starts several test processes gives them one nursery."""
    if getattr(config.option, "numprocesses", None) and not hasattr(config, "workerinput"):
        os.environ[NURSERY] = nursery().address


def pytest_collection_modifyitems(config, items):
    """Tests marked ``long`` belong to ``make test-long`` only. Several processes take the files in a mixed order."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        # By folder, those that wait for leases would all come last, beside each other, and nobody would compute.
        items.sort(key=lambda item: crc32(item.location[0].encode()))
    if length.FULL:
        return
    left_out = [item for item in items if item.get_closest_marker("long")]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


def pytest_collection_finish():
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _garbage_goes():
    modules = len(sys.modules)
    yield
    if gc.get_count()[0] > 20_000:  # objects made since the last time
        gc.collect()
        if len(sys.modules) > modules + 100:  # as an optimizer's first step imports; all of it stays
            gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def _libraries_go():
    """A process takes twice as long to fork with large libraries, which few files need."""
    yield
    if shared.cache_info().currsize:
        shared().unload()


@pytest.fixture(autouse=True)
def _gradients_stay_enabled():
    """A test that interrupts a call at any moment may interrupt the end of its ``no_grad``."""
    yield
    torch.set_grad_enabled(True)


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
