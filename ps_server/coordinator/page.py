"""The coordinator's page: started where it was asked for, fed with the recorder's history."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from ps_protocol.cluster.history import JobHistory
from ps_protocol.logs import EventLogger
from ps_protocol.security.security import Security
from ps_server.coordinator.history.recorder import JobRecorder
from ps_server.page.needs import check_libraries

if TYPE_CHECKING:
    from ps_server.page.server import PageServer

logger = EventLogger(__name__)


def serve_page(bind: str, port: int | None, recorder: JobRecorder, security: Security) -> PageServer | None:
    """Serve the page of this job; None where ``port`` is None. Called on the coordinator's loop.

    Raises ConfigError when its libraries are not installed, or it cannot listen there.
    """
    if port is None:
        return None
    check_libraries("the page (--page-port)")
    # What serves it is an extra of the package, and takes its time to import.
    from ps_server.page.server import PageServer

    loop = asyncio.get_running_loop()

    async def told() -> JobHistory:
        return recorder.history()

    async def source() -> JobHistory:
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(told(), loop))

    page = PageServer(bind, port, source, security)
    recorder.configuration["page"] = page.url
    logger.info("server.started", "page at %s", page.url)
    return page
