"""What stands for calls that a script with virtual workers cannot make, or that mean something else there."""

from __future__ import annotations

import multiprocessing.process
import os
import sys
import time
from collections.abc import Callable
from functools import wraps
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader

from ps_protocol.errors import ConfigError

_OURS = ("ps_worker", "ps_protocol")

_FROM_PROCESSES = ("num_workers", "prefetch_factor", "persistent_workers", "timeout", "multiprocessing_context")
"""Arguments of a DataLoader about processes of its own."""


class Passing(Protocol):
    """What substitutes need of the virtual worker that calls them."""

    def ask_later(self, reason: str) -> None:
        """Pass the turn."""

    def note(self, text: str) -> None:
        """Tell the user once."""


def install(current: Callable[[], Passing | None], is_script: Callable[[str], bool]) -> None:
    """Replace them in this process. ``current``: the virtual worker of the thread; ``is_script``: whether a file is of
    the user's own code.
    """
    really_sleep = time.sleep

    def sleep(seconds: float) -> None:
        worker, caller = current(), sys._getframe(1)
        if worker is None:
            really_sleep(seconds)
        elif caller.f_globals.get("__name__", "").partition(".")[0] in _OURS:
            worker.ask_later("waiting for others")
        elif is_script(caller.f_code.co_filename):
            raise ConfigError(
                "a rehearsal cannot run a script that sleeps: its workers live on a virtual clock",
                actual=f"time.sleep({seconds!r}) in {caller.f_code.co_filename}, line {caller.f_lineno}",
                remedy="leave it out; --speeds says how long workers compute",
            )
        else:
            really_sleep(seconds)

    time.sleep = sleep  # type: ignore[assignment]

    def refuse(owner: Any, name: str, what: str, remedy: str) -> None:
        original = getattr(owner, name)

        @wraps(original)
        def refused(*arguments: Any, **named: Any) -> Any:
            if current() is None:
                return original(*arguments, **named)
            raise ConfigError(f"a rehearsal cannot run a script that {what}: its workers are threads", remedy=remedy)

        setattr(owner, name, refused)

    processes = "starts processes of its own", "load data in the script itself, or try it with ps-run --workers"
    refuse(os, "fork", *processes)
    refuse(multiprocessing.process.BaseProcess, "start", *processes)
    if torch.distributed.is_available():
        refuse(torch.distributed, "init_process_group", "makes a process group", "rehearse the loop without it")
    refuse(sys.modules["ps_worker"], "strategy", "calls strategy()", "rehearse a loop that calls connect()")

    made = DataLoader.__init__

    @wraps(made)
    def init(self: DataLoader[Any], *arguments: Any, **named: Any) -> None:
        worker = current()
        if worker is not None and named.get("num_workers"):
            named = {name: value for name, value in named.items() if name not in _FROM_PROCESSES}
            worker.note("a DataLoader loads its data in the script itself, not in processes (num_workers)")
        made(self, *arguments, **named)

    DataLoader.__init__ = init  # type: ignore[method-assign]
