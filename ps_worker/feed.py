"""Follows a table of a running job from outside: an iterator of changes with a cursor, and a copy that applies them."""

from __future__ import annotations

import os
from collections.abc import Iterator

from ps_protocol.client.coordinator import CoordinatorClient
from ps_protocol.client.feed import Change, Cursor, Following, TableFeed, load_cursor, save_cursor
from ps_worker.config import WorkerConfig
from ps_worker.progress import log
from ps_worker.table_copy import TableCopy

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
    """The changes of one table on all its shards: everything that is there, then rows as they are used or go.

    Of each shard rows come in the order of their last use, as they are when they are sent; each at least once. Whoever
    applies every change (as ``TableCopy.apply`` does) and keeps the cursor of the last one goes on from there at any
    later time. Shards that restart, and buckets that move, begin anew by themselves: ``reset_buckets`` name them.

    ``coordinator`` is host:port, None: PS_COORDINATOR. The reader is no member of the job, and the job never waits for
    it. It ends with the job, without ``follow`` once everything there is has come. ``with_state``: rows come with their
    optimizer's state behind their values. Shards and coordinator that are away are waited for, for
    ``reconnect_timeout_seconds`` (default 60).

    Raises UnknownModel, InvalidRequest for an unknown table or a cursor of another one, Unavailable.
    """
    config = WorkerConfig.from_environment(
        os.environ, coordinator=coordinator, reconnect_timeout_seconds=reconnect_timeout_seconds
    )
    what = Following(table, model, with_state, follow, config.reconnect_timeout_seconds)
    with CoordinatorClient(config.coordinator) as client:
        yield from TableFeed(client, what, cursor, log.warning)
