"""Follows a table of a running job from outside: an iterator of changes with a cursor, and a copy that applies them."""

from __future__ import annotations

import os
from collections.abc import Iterator

from ps_protocol.client.coordinator import CoordinatorClient
from ps_protocol.feed.cursor import Cursor, load_cursor, save_cursor
from ps_protocol.feed.reader import Change, Following, TableFeed
from ps_protocol.security.roles import AccessRole
from ps_protocol.security.security import Security
from ps_worker.session.config import WorkerConfig
from ps_worker.session.reporting import log
from ps_worker.table_feed.table_copy import TableCopy

__all__ = ["Change", "Cursor", "TableCopy", "follow_table", "load_cursor", "save_cursor"]


def follow_table(
    coordinator: str | None,
    table: str,
    model: str = "model",
    cursor: Cursor | None = None,
    *,
    with_state: bool = False,
    follow: bool = True,
    reconnect_timeout_seconds: float | None = None,
) -> Iterator[Change]:
    """The changes of one table on all its shards: first all its rows, then rows as they are used or removed.

    The rows of each shard come in the order of their last use, with their values at the time of sending; each row comes
    at least once. A reader that applies every change (as ``TableCopy.apply`` does) and keeps the cursor of the last one
    can continue from there later. After a shard restarts or buckets move, their rows come again from the beginning:
    ``reset_buckets`` names these buckets.

    ``coordinator`` is host:port, None: PS_COORDINATOR. The reader is no member of the job, and the job never waits for
    it. It ends with the job; without ``follow``, once all present rows have come. ``with_state``: the state of its
    optimizer follows the values of each row. The reader waits up to ``reconnect_timeout_seconds`` (default 60) for
    shards and a coordinator that do not answer.

    Raises UnknownModel, InvalidRequest for an unknown table or a cursor of another one, Unavailable.
    """
    config = WorkerConfig.from_environment(
        os.environ, coordinator=coordinator, reconnect_timeout_seconds=reconnect_timeout_seconds
    )
    what = Following(table, model, with_state, follow, config.reconnect_timeout_seconds)
    security = Security(config.security, AccessRole.READER)
    with CoordinatorClient(config.coordinator, security) as client:
        yield from TableFeed(client, what, cursor, log.warning)
