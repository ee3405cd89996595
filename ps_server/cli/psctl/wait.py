"""The command psctl wait, and the health of a job: whether its members are present."""

from __future__ import annotations

import logging
import re
import sys
import time
from collections.abc import Callable

import click

from ps_protocol.cluster.view import ClusterStatus, ClusterView, Role
from ps_server.cli.psctl.connection import connected, coordinator_option
from ps_server.cli.psctl.output.notes import note
from ps_server.cli.status.columns import note_of
from ps_server.cli.status.text import current_members, headline

LOOK_SECONDS = 0.5
CALL_SECONDS = 5.0

TIMED_OUT = 1
UNHEALTHY = 3
"""Exit codes of psctl wait and of psctl status --check."""

_HELP = """Wait until the job is in a given state. For scripts.

\b
    psctl wait --for training             every expected member has joined
    psctl wait --for 4-workers            at least 4 live workers
    psctl wait --for finished --timeout 3600

The exit code is 0 in that state; 1 after --timeout, or when the job has finished in another state.
"""

_WORKERS = re.compile(r"(\d+)-workers?")

Awaited = Callable[[ClusterView], bool]


def _awaited(context: click.Context, parameter: click.Parameter, text: str) -> tuple[str, Awaited]:
    """The name of a state, and whether a view is in it."""
    if text == "finished":
        return text, lambda view: view.finished
    if text == "training":
        return text, lambda view: view.started and not view.finished
    found = _WORKERS.fullmatch(text)
    if not found:
        raise click.BadParameter(
            f"{text!r} is not a state: use finished, training, or a number of workers such as 4-workers"
        )
    wanted = int(found[1])
    return text, lambda view: len(view.live(Role.WORKER)) >= wanted


@click.command("wait", help=_HELP)
@click.option("--for", "state", required=True, callback=_awaited, metavar="finished|training|N-workers")
@click.option(
    "--timeout", type=click.FloatRange(0), metavar="SECONDS", help="Longest time to wait.  [default: no limit]"
)
@coordinator_option
def wait(coordinator: str, state: tuple[str, Awaited], timeout: float | None) -> None:
    """Wait until the job is in a state."""
    name, reached = state
    begin = time.monotonic()
    with connected(coordinator) as client:
        while True:
            seen = client.get_status(CALL_SECONDS)
            if reached(seen.view):
                return
            over = timeout is not None and time.monotonic() - begin >= timeout
            if over or seen.view.finished:
                why = f"after {timeout:g} s" if over else "and the job has finished"
                note(f"not '{name}' {why}: {headline(seen)}", logging.WARNING)
                sys.exit(TIMED_OUT)
            time.sleep(LOOK_SECONDS)


def ailments(status: ClusterStatus) -> list[str]:
    """The missing, failed and lost members of a job that is not finished. Empty for a healthy job."""
    view = status.view
    if view.finished:
        return []
    missing = [f"shard {number} is missing" for number in view.used_shards if number not in view.live(Role.SHARD)]
    workers = len(view.live(Role.WORKER))
    left = {each.member.index for each in current_members(status, Role.WORKER) if each.gone == "left"}
    if view.expected_workers > workers + len(left):
        missing.append(f"{workers} of {view.expected_workers} workers live")
    notes = [
        f"{entry.member} {note}" for role in Role for entry in current_members(status, role) if (note := note_of(entry))
    ]
    return missing + notes
