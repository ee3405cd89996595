"""Ends streams whose caller could not open them again, because its token was removed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from ps_protocol.errors import Unauthenticated, Unavailable
from ps_protocol.logs import EventLogger
from ps_protocol.security.identity import Caller
from ps_server.serving.log_limit import LogLimit

logger = EventLogger(__name__)
logging.getLogger(__name__).addFilter(LogLimit())

LOOK_SECONDS = 1.0

#: Raises Unauthenticated for a caller whose proof is not valid any more.
Check = Callable[[Caller], None]


@dataclass(eq=False)
class _OpenStream:
    caller: Caller
    scope: asyncio.Timeout
    why: Unauthenticated | None = None


class OpenStreams:
    """The open streams of one server, on its event loop."""

    def __init__(self, check: Check) -> None:
        self._check = check
        self._open: set[_OpenStream] = set()

    @asynccontextmanager
    async def opened(self, caller: Caller) -> AsyncIterator[None]:
        """List a stream of ``caller`` within the block. Raises Unavailable there when it has to be opened again."""
        stream: _OpenStream | None = None
        try:
            async with asyncio.timeout(None) as scope:
                stream = _OpenStream(caller, scope)
                self._open.add(stream)
                try:
                    yield
                finally:
                    self._open.discard(stream)
        except TimeoutError:
            if stream is None or stream.why is None:
                raise
            raise ended(stream.why) from None

    def check(self, caller: Caller) -> None:
        """Raises Unavailable when a stream of ``caller`` has to be opened again."""
        try:
            self._check(caller)
        except Unauthenticated as error:
            raise ended(error) from error

    async def run(self) -> None:
        """Check all streams periodically, until cancelled."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            self.check_all()

    def check_all(self) -> None:
        """End the streams whose caller is no longer admitted."""
        for stream in list(self._open):
            try:
                self._check(stream.caller)
            except Unauthenticated as error:
                if stream.why is None:
                    stream.why = error
                    logger.info("caller.refused", "ended a stream of %s: %s", stream.caller.name, error.message)
                    stream.scope.reschedule(asyncio.get_running_loop().time())


def ended(why: Unauthenticated) -> Unavailable:
    """The error of a stream that was ended. Its client opens another with the present files."""
    return Unavailable(
        f"the stream was ended: {why.message}",
        remedy="open it again with a valid certificate and token; clients do so by themselves once their files are new",
    )
