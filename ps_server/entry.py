"""The entry points of the programs. They import the modules of a command, during which Ctrl-C ends the process without
a traceback.
"""

from __future__ import annotations

import importlib
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import MappingProxyType
from typing import NoReturn

MODULES = MappingProxyType(
    {
        "ps-coordinator": "ps_server.coordinator.main",
        "ps-server": "ps_server.shard.main",
        "ps-run": "ps_server.cli.launcher.main",
        "psctl": "ps_server.cli.psctl.main",
    }
)
"""The module of each program: its ``main`` is the click command, its ``program`` runs the process."""


def ps_coordinator() -> NoReturn:
    """Run ps-coordinator."""
    _run(MODULES["ps-coordinator"])


def ps_server() -> NoReturn:
    """Run ps-server."""
    _run(MODULES["ps-server"])


def ps_run() -> NoReturn:
    """Run ps-run."""
    _run(MODULES["ps-run"])


def psctl() -> NoReturn:
    """Run psctl."""
    _run(MODULES["psctl"])


@contextmanager
def ended_by_ctrl_c() -> Iterator[None]:
    """Within the block SIGINT ends this process at once, as SIGTERM does: imports leave nothing to be closed.

    A signal that is ignored, or has another handler, keeps it. Used in the main thread.
    """
    handler = signal.getsignal(signal.SIGINT)
    if handler is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)


def _run(module: str) -> NoReturn:
    with ended_by_ctrl_c():
        program = importlib.import_module(module).program
    program()
    raise AssertionError(f"{module}.program has returned")
