"""Loaded before any test: the SDK first, for it tells gRPC about forks before gRPC is loaded."""

import gc
import logging
import os
import shutil
import signal
import sys
import tempfile
from binascii import crc32
from pathlib import Path

import pytest

# Several files run at a time: more threads of torch in each would only wait for each other, which they do by spinning.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import ps_worker  # noqa: I001 -- first, for it tells gRPC about forks
import torch
from ps_protocol import logs, times
from tests.recovery.zygote import NURSERY, nursery, shared
from tests.support import length

length.load_profile()

# Tests say over which transport a worker goes: on a busy machine its side channel may take its time. So may shards
# whose state is shown.
ps_worker.times.SIDE_CHANNEL_SECONDS = 60.0
times.STATUS_CALL_SECONDS = 60.0

MEMORY_DISK, ITS_FREE_BYTES = Path("/dev/shm"), 4 << 30

# A file that must survive a crash is written through to its disk, which tests do thousands of times: in memory it takes
# no time, and the death of a process loses nothing there either. In full length the disk is a real one.
if (
    not length.FULL
    and "TMPDIR" not in os.environ
    and os.access(MEMORY_DISK, os.W_OK)
    and shutil.disk_usage(MEMORY_DISK).free >= ITS_FREE_BYTES
):
    folder = MEMORY_DISK / f"tests-{os.getuid()}"
    folder.mkdir(exist_ok=True)
    folder.chmod(0o1777)
    os.environ["TMPDIR"] = tempfile.tempdir = str(folder)

# Garbage is collected here, between tests: gRPC's finalizers take locks, and one that ran in the middle of a call of
# another thread could stop all collections, or wait for a lock that an interrupted call has left behind.
gc.disable()

# pytest adds its handlers, six times a test, to each logger that does not propagate: torch has forty.
for each in logging.root.manager.loggerDict.values():
    if isinstance(each, logging.Logger) and each.name.startswith("torch"):
        each.propagate = True

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
    if not length.FULL:
        left_out = [item for item in items if item.get_closest_marker("long")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]
    if processes := int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "0")):
        # By folder, those that wait for leases would all come last, beside each other, and nobody would compute.
        items.sort(key=lambda item: crc32(item.location[0].encode()))
        items[:] = _early_ones_first(items, processes)


def _early_ones_first(items, processes):
    """Each process is given a part of ``items`` as long as those of the others: tests marked ``early`` begin them."""
    early = [item for item in items if item.get_closest_marker("early")]
    rest = [item for item in items if not item.get_closest_marker("early")]
    ordered = []
    for left in range(processes, 0, -1):
        begin, early = early[::left], [item for n, item in enumerate(early) if n % left]
        size = max(0, (len(begin) + len(early) + len(rest)) // left - len(begin))
        ordered += begin + rest[:size]
        rest = rest[size:]
    return ordered


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
def _log_stays():
    """A program that a test calls in this process sets up its log: later tests would see more records, and handlers
    that write to what is closed.
    """
    root = logging.getLogger()
    handlers, level, facts = root.handlers[:], root.level, dict(logs._process)
    yield
    for handler in root.handlers[:]:
        if handler not in handlers:
            root.removeHandler(handler)
    root.setLevel(level)
    logs._process.update(facts)


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
