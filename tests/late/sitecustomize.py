"""Holds threads up at random, for ``make test-late``: a test, or a program, must not count on being quick.

Python imports this when it starts, where this folder is in PYTHONPATH: so do all processes of a test. A thread that
calls a function, or returns from one, may stand still for up to 0.3 s then, for up to three tenths of its time. What
LATE_SEED draws is the same each time; which threads meet it is not.
"""

from __future__ import annotations

import os
import random
import sys
import threading
import time
from types import FrameType

RATE = 0.0015
"""The chance that a call, or a return, holds its thread up."""
LONGEST_SECONDS = 0.3
SHARE = 0.3

MODULES = ("ps_", "tests", "simulation", "asyncio", "concurrent", "grpc", "selectors", "socket", "threading")

_thread = threading.local()


def begin(seed: str) -> None:
    draw = random.Random(f"{seed} {os.getpid()}").random

    def hold_up(frame: FrameType, event: str, argument: object) -> None:
        if draw() >= RATE or not frame.f_globals.get("__name__", "").startswith(MODULES):
            return
        now = time.monotonic()
        if now < getattr(_thread, "spared_until", 0.0):
            return
        seconds = draw() ** 2 * LONGEST_SECONDS
        _thread.spared_until = now + seconds / SHARE
        time.sleep(seconds)

    threading.setprofile(hold_up)
    sys.setprofile(hold_up)


if seed := os.environ.get("LATE_SEED"):
    begin(seed)
