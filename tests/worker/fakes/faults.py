"""What a fake shard does wrong."""

from __future__ import annotations

import queue
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ps_protocol.errors import PsError


@dataclass
class Faults:
    """What to do to the next pushes; each entry is used up by one push."""

    #: Applied, but the stream breaks before the answer.
    lose_reply: int = 0
    #: The stream breaks before the push is applied.
    lose_push: int = 0
    #: Say these while the pull is parked.
    waiting: list[str] = field(default_factory=list)
    refuse: list[PsError] = field(default_factory=list)
    #: Its step raises with this, and is skipped: the version and the clock move, nothing else.
    step_raises: list[PsError] = field(default_factory=list)
    #: Answer LATE with this clock.
    late: list[int] = field(default_factory=list)
    #: Called when a push has arrived; the answer waits until ``release`` is put.
    on_push: list[Callable[[], None]] = field(default_factory=list)
    release: queue.SimpleQueue[None] = field(default_factory=queue.SimpleQueue)
    #: Called before a push is answered, once ``waiting`` has been said.
    on_answer: list[Callable[[], Any]] = field(default_factory=list)
    #: Called when a lookup has arrived, before it is answered; an error returned is the answer.
    on_lookup: list[Callable[[], PsError | None]] = field(default_factory=list)
    #: The stream breaks before the lookup is answered.
    lose_lookup: int = 0
    #: As in sync: a lookup for a push behind the next one waits, and what comes behind it.
    hold_ahead: bool = False
    #: Called whenever a stream is opened.
    on_open: Callable[[], None] = lambda: None
    #: Answers to the next streams, the last one first, in the place of opening them.
    refuse_open: list[PsError] = field(default_factory=list)
