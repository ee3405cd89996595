"""Decides when the standby allows a push to be acknowledged, and reports the standby's state to the coordinator."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from ps_protocol.cluster.view import StandbyReport
from ps_protocol.errors import PsError, Unavailable
from ps_protocol.logs import EventLogger
from ps_server.log.entries import UpdateLog
from ps_server.shard import times
from ps_server.shard.config import Acknowledge

logger = EventLogger(__name__)


Tell = Callable[[StandbyReport], None]
"""Reports to the coordinator and blocks until it answers. Raises Fenced, Unavailable."""


class Replication:
    """Tracks how much of the log the standby has. Used on the shard's event loop.

    With "after" a push is acknowledged once the standby has it, or once the coordinator knows that no standby is
    complete and so none can take over. Neither a lost standby nor a lost shard loses a push, and a shard that was
    fenced without noticing acknowledges nothing.
    """

    def __init__(self, log: UpdateLog, acknowledge: Acknowledge = Acknowledge.BEFORE) -> None:
        self._log = log
        self._after = acknowledge is Acknowledge.AFTER
        self._tell: Tell | None = None
        #: The last record the standby has.
        self.acknowledged = 0
        #: Directory of the standby whose stream is open.
        self._follower = ""
        #: The end of the log at its last acknowledgement: an active standby is one round trip behind.
        self._end = 0
        #: Not None once the standby is close enough that pushes wait for it; at this record it has all earlier ones.
        self._goal: int | None = None
        #: The report for the coordinator, and the one it has; None: it may have the old or the new one.
        self._wanted = ""
        self._told: str | None = ""
        self._words = 0
        self._telling: asyncio.Task[None] | None = None
        self._waiting: dict[asyncio.Future[None], tuple[int, bool]] = {}
        self._closed: PsError | None = None
        #: Whether ``covers`` must be called: a standby has followed, or this is closed.
        self.engaged = False

    def begin(self, tell: Tell) -> None:
        """Begin: the shard has joined, and the coordinator knows of no standby."""
        self._tell = tell

    @property
    def begun(self) -> bool:
        """Whether this shard may be followed."""
        return self._tell is not None and self._closed is None

    def close(self, error: PsError) -> None:
        """Stop acknowledging."""
        self._closed = error
        self.engaged = True
        if self._telling:
            self._telling.cancel()
        for waiting in self._waiting:
            if not waiting.done():
                waiting.set_exception(error)

    # -- pushes

    def covers(self, number: int, *, always: bool = False) -> bool:
        """Whether updates up to ``number`` may be acknowledged. ``always``: as with "after" in any case."""
        waits = (self._after or always) and self._counts
        return self._closed is None and (not waits or number <= self.acknowledged)

    async def covered(self, number: int, *, always: bool = False) -> None:
        """Returns when updates up to ``number`` may be acknowledged. Raises what ``close`` was given."""
        while not self.covers(number, always=always):
            if self._closed:
                raise self._closed
            waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting[waiting] = number, always
            try:
                await waiting
            finally:
                del self._waiting[waiting]

    @property
    def _counts(self) -> bool:
        """Whether a standby might take over."""
        return not (self._told == "" == self._wanted and self._goal is None)

    def _release(self) -> None:
        for waiting, (number, always) in self._waiting.items():
            if self.covers(number, always=always) and not waiting.done():
                waiting.set_result(None)

    # -- the standby

    def follows(self, directory: str) -> None:
        """Note that a standby starts to read the log."""
        self._follower, self._goal, self._end, self.acknowledged = directory, None, 1 << 62, 0
        self.engaged = True

    def acknowledge(self, number: int) -> None:
        """Note that the standby has the records up to ``number``."""
        near = number >= min(self._end, self._log.number)
        self.acknowledged, self._end = number, self._log.number
        if near and self._goal is None:
            self._goal = self._log.number
        if self._goal is not None and number >= self._goal and self._wanted != self._follower:
            self._want(self._follower)
        self._release()

    def lost(self) -> None:
        """Note that the standby has stopped reading."""
        self._follower, self._goal = "", None
        self._want("")
        self._release()

    def _want(self, directory: str) -> None:
        self._wanted = directory
        if self._closed is None and (self._telling is None or self._telling.done()):
            self._telling = asyncio.create_task(self._keep_told(), name="sync-word")

    async def _keep_told(self) -> None:
        while self._told != self._wanted and self._tell:
            self._words, word = self._words + 1, StandbyReport(self._words + 1, self._wanted)
            self._told = None
            try:
                await asyncio.to_thread(self._tell, word)
            except Unavailable as error:
                logger.warning("standby.failed", "the coordinator cannot be told of the standby yet: %s", error.message)
                await asyncio.sleep(times.RETRY_SECONDS)
            except PsError as error:
                logger.error("standby.failed", "the coordinator was not told of the standby: %s", error)
                return
            else:
                self._told = word.directory
                logger.info(
                    "standby", "the standby %s", "has everything" if word.directory else "does not have everything"
                )
        self._release()

    async def ended(self) -> None:
        """Wait until the last report has reached the coordinator, or reporting has ended."""
        if self._telling:
            await asyncio.wait([self._telling])
