"""The command psctl feed: prints what changes in a table, for people or as JSON, and keeps how far it has come."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click

from ps_protocol.client.feed import Change, Following, TableFeed, load_cursor, save_cursor
from ps_server.psctl_options import connected, coordinator_option

_INTERRUPTED = 130
"""What a shell says of a command that Ctrl-C ended."""

_HELP = """Print what changes in a table: first all its rows, then those that are used, and those that go.

It goes on until the job ends, through restarts of shards and moves of buckets; --once ends it when everything that is
there has come. With --cursor FILE it goes on where it was; FILE is renewed after each change that was printed, so every
change comes at least once. The job never waits for it.

With --json each change is one line: an object with the shard, the "reset_buckets" (of so many "buckets") whose rows are
told anew: drop what you have of them; the ids "deleted"; and "ids" with their "rows". Apply them in this order, and you
have what the shards have; "whole" says that everything that was there has come.

\b
    psctl feed --table ads --json --cursor ads.cursor | into-my-store
"""


@click.command(help=_HELP)
@click.option("--model", default="model", show_default=True, help="Which of the job's models.")
@click.option("--table", required=True, help="Name of the table.")
@click.option(
    "--cursor", type=click.Path(dir_okay=False, path_type=Path), help="File that keeps how far this has come."
)
@click.option("--once", is_flag=True, help="End when everything that is there has come.")
@click.option("--with-state", is_flag=True, help="Rows with their optimizer's state behind their values.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object per line, with ids and rows.")
@coordinator_option
def feed(
    coordinator: str, model: str, table: str, cursor: Path | None, once: bool, with_state: bool, as_json: bool
) -> None:
    """Print what changes in a table."""
    what = Following(table, model, with_state, follow=not once)
    show = to_line if as_json else to_text
    with connected(coordinator) as client:
        changes = TableFeed(client, what, load_cursor(cursor) if cursor else None, _say)
        try:
            for change in changes:
                click.echo(show(change))
                if cursor:
                    save_cursor(cursor, change.cursor)
        except KeyboardInterrupt:
            sys.exit(_INTERRUPTED)


def _say(text: str) -> None:
    click.echo(text, err=True)


def to_line(change: Change) -> str:
    """One change for programs."""
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
    """One change for people."""
    parts = [
        f"{count} {what}{'' if count == 1 else 's'}{more}"
        for count, what, more in (
            (len(change.reset_buckets), "bucket", " anew"),
            (change.deleted.size, "row", " gone"),
            (change.ids.size, "row", ""),
        )
        if count
    ]
    updates = change.cursor["shards"].get(str(change.shard), {}).get("updates")
    reached = f"; up to update {updates}" if updates else ""
    return f"shard {change.shard}: {', '.join(parts) or 'nothing'}{reached}{'; everything' if change.whole else ''}"
