"""The command psctl feed: prints the changes of a table as text or JSON, and saves its position in a cursor file."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click

from ps_protocol.feed.cursor import load_cursor, save_cursor
from ps_protocol.feed.reader import Change
from ps_server.cli.psctl.connection import connected, coordinator_option
from ps_server.cli.psctl.output import echo, note, output_option

_INTERRUPTED = 130
"""Exit code of a command that Ctrl-C ended, as shells report it."""

_HELP = """Print the changes of a table: first all its rows, then each row that is updated or removed.

The command runs until the job ends, also across restarts of shards and moves of buckets. With --once it ends as soon as
all rows have been printed. With --cursor FILE it saves its position in FILE after each change, and continues from
there; every change is printed at least once. The job never waits for this command.

With -o json each change is one line with an object. "reset_buckets" lists the buckets (of "buckets" in all) whose rows
are sent again from the start: remove the rows you have of them. "deleted" lists the ids of removed rows. "ids" and
"rows" are new values. Apply the three in this order to get a copy of the table on that "shard". "whole" is true once
all rows have been sent.

\b
    psctl feed --table ads -o json --cursor ads.cursor | into-my-store
"""


@click.command(help=_HELP)
@click.option("--model", default="model", show_default=True, help="Name of the model.")
@click.option("--table", required=True, help="Name of the table.")
@click.option("--cursor", type=click.Path(dir_okay=False, path_type=Path), help="File in which the position is saved.")
@click.option("--once", is_flag=True, help="End when all rows have been printed.")
@click.option("--with-state", is_flag=True, help="Print the optimizer state of a row after its values.")
@output_option("one JSON object per line, with ids and rows")
@coordinator_option
def feed(
    coordinator: str, model: str, table: str, cursor: Path | None, once: bool, with_state: bool, as_json: bool
) -> None:
    """Print the changes of a table."""
    show = to_line if as_json else to_text
    with connected(coordinator) as job:
        position = load_cursor(cursor) if cursor else None
        changes = job.feed(table, model, position, with_state=with_state, follow=not once, on_wait=note)
        try:
            for change in changes:
                echo(show(change))
                if cursor:
                    save_cursor(cursor, change.cursor)
        except KeyboardInterrupt:
            sys.exit(_INTERRUPTED)


def to_line(change: Change) -> str:
    """One change as JSON."""
    return json.dumps(
        {
            "shard": change.shard,
            "buckets": change.table.buckets,
            "reset_buckets": change.reset_buckets,
            "deleted": change.deleted.tolist(),
            "ids": change.ids.tolist(),
            "rows": change.rows.tolist(),
            "whole": change.whole,
        }
    )


def to_text(change: Change) -> str:
    """One change as text."""
    parts = [
        f"{count} {what}{'' if count == 1 else 's'}{more}"
        for count, what, more in (
            (len(change.reset_buckets), "bucket", " reset"),
            (change.deleted.size, "row", " removed"),
            (change.ids.size, "row", ""),
        )
        if count
    ]
    updates = change.cursor["shards"].get(str(change.shard), {}).get("updates")
    reached = f"; up to update {updates}" if updates else ""
    return f"shard {change.shard}: {', '.join(parts) or 'nothing'}{reached}{'; everything' if change.whole else ''}"
