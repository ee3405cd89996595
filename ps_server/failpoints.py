"""Named points where a test can make a shard fail; empty, and free, in every real process."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Mapping
from types import MappingProxyType

from ps_protocol.errors import ConfigError, InternalError
from ps_protocol.text import whole_number

#: Every point there is: in the order a push passes them, then in the order a move of slices does, and a release.
POINTS = (
    "after_round_norm",
    "before_log",
    "after_log_before_apply",
    "after_apply_before_reply",
    "before_prepare_log",
    "after_prepare_log",
    "before_switch_log",
    "after_switch_log",
    "before_release_log",
    "after_release_log",
)

ENVIRONMENT = "PS_FAILPOINTS"
"""For tests: what the entry point of a shard arms, such as ``before_log=kill@3,after_apply_before_reply=stop@1``."""


class Failpoints:
    """Armed by tests before or while the shard runs; hit from the shard's event loop and its executor."""

    def __init__(self) -> None:
        #: What is done at which point; empty in every real process.
        self.armed: dict[str, Callable[[], None]] = {}

    @classmethod
    def parse(cls, text: str) -> Failpoints:
        """Parse ``text``: ``point=action@count`` parts, separated by commas. Raises ConfigError.

        The action (kill, stop, hang or raise) is taken when the point is passed for the ``count``-th time, and only
        then.
        """
        failpoints = cls()
        for part in filter(None, text.split(",")):
            point, _, rest = part.partition("=")
            action, _, count = rest.partition("@")
            if point not in POINTS or action not in _ACTIONS or not whole_number(count):
                raise ConfigError(
                    f"{ENVIRONMENT} holds no failpoint",
                    expected=f"point=action@count of {', '.join(POINTS)} and {', '.join(_ACTIONS)}",
                    actual=part,
                    remedy=f"unset {ENVIRONMENT}: it is for tests",
                )
            failpoints.arm(point, _Once(_ACTIONS[action], int(count)))
        return failpoints

    def arm(self, point: str, action: Callable[[], None]) -> None:
        """Run ``action`` (which may raise, or end the process) whenever ``point`` is passed."""
        if point not in POINTS:
            raise ValueError(f"no failpoint {point!r}; there are {', '.join(POINTS)}")
        self.armed[point] = action

    def disarm(self, point: str) -> None:
        """Pass ``point`` unharmed again."""
        self.armed.pop(point, None)

    def hit(self, point: str) -> None:
        """Called by the code at ``point``."""
        if action := self.armed.get(point):
            action()


class _Once:
    """Called from one thread at each passage; takes ``action`` at passage ``count``."""

    def __init__(self, action: Callable[[], None], count: int) -> None:
        self._action = action
        self._left = count

    def __call__(self) -> None:
        self._left -= 1
        if self._left == 0:
            self._action()


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _stop() -> None:
    # To this thread: sent to the process, it might come when this thread has gone on.
    signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)


def _hang() -> None:
    threading.Event().wait()


def _raise() -> None:
    raise InternalError("a failpoint raised")


_ACTIONS: Mapping[str, Callable[[], None]] = MappingProxyType(
    {"kill": _kill, "stop": _stop, "hang": _hang, "raise": _raise}
)
