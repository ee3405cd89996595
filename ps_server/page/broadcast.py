"""Polls the history of the job while there are viewers, and sends each state to all of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

from ps_protocol import times
from ps_protocol.cluster.history import JobHistory
from ps_protocol.logs import EventLogger
from ps_server.page.messages import PageState, Viewer
from ps_server.tasks import Conditions

logger = EventLogger(__name__)


VIEWERS = 64
"""The most viewers at a time."""


class TooManyViewers(Exception):
    """VIEWERS browsers are connected already."""


class Broadcast:
    """Polls for all viewers, on the page's event loop. Without viewers it does nothing."""

    def __init__(self, source: Callable[[], Awaitable[JobHistory]]) -> None:
        self._source = source
        self._state: PageState | None = None
        self._polling: asyncio.Task[None] | None = None
        self._viewers = 0
        self._news = Conditions()
        self._closing = False

    async def messages(self) -> AsyncIterator[str]:
        """JSON messages for one viewer: the whole state, then its changes, until ``close``. Raises TooManyViewers."""
        if self._viewers >= VIEWERS:
            raise TooManyViewers
        self._viewers += 1
        if self._polling is None:
            self._polling = asyncio.create_task(self._poll(), name="page-poll")
        viewer, sent = Viewer(), None
        try:
            while not self._closing:
                if self._state is not None and self._state is not sent:
                    sent = self._state
                    yield viewer.message(sent)
                else:
                    await self._news.changed()
        finally:
            self._viewers -= 1
            if not self._viewers and self._polling is not None:
                self._polling.cancel()
                self._polling = self._state = None

    @property
    def is_full(self) -> bool:
        """Whether another viewer would be refused."""
        return self._viewers >= VIEWERS

    def close(self) -> None:
        """End every viewer's messages."""
        self._closing = True
        self._news.wake()

    async def _poll(self) -> None:
        answers = True
        while True:
            try:
                async with asyncio.timeout(times.REPEATED_CALL_SECONDS):
                    history = await self._source()
            except TimeoutError:
                if answers:
                    logger.warning("coordinator.silent", "the coordinator does not answer its page")
                answers = False
            else:
                answers = True
                self._state = PageState.of(history)
                self._news.wake()
            await asyncio.sleep(0.5)
