"""The commands as programs. Their modules are imported here, so that Ctrl-C meanwhile ends them without a traceback."""

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
"""Where the command of each program is: ``main`` for callers with arguments, ``program`` for the process."""


def ps_coordinator() -> NoReturn:
    """The process of ps-coordinator."""
    _run(MODULES["ps-coordinator"])


def ps_server() -> NoReturn:
    """The process of ps-server."""
    _run(MODULES["ps-server"])


def ps_run() -> NoReturn:
    """The process of ps-run."""
    _run(MODULES["ps-run"])


def psctl() -> NoReturn:
    """The process of psctl."""
    _run(MODULES["psctl"])


@contextmanager
def ended_by_ctrl_c() -> Iterator[None]:
    """SIGINT ends this process at once, as SIGTERM does: for imports, which leave nothing to be closed.

    Where it is ignored, or handled by somebody else, nothing changes. Used in the main thread.
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
