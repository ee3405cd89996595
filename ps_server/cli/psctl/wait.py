"""The command psctl wait."""

from __future__ import annotations

import logging
import math
import re
import sys
import time
from collections.abc import Callable

import click

from ps_protocol.client.coordinator import CoordinatorClient
from ps_protocol.cluster.job_state import FINISHED, TRAINING, headline, job_state
from ps_protocol.cluster.view import ClusterStatus, Role
from ps_protocol.errors import Unavailable
from ps_server.cli.psctl.connection import client_of, coordinator_option
from ps_server.cli.psctl.output.notes import note

LOOK_SECONDS = 0.5
CALL_SECONDS = 5.0

SAY_SECONDS = 60.0
"""Interval of messages while the coordinator does not answer."""

TIMED_OUT = 1
UNHEALTHY = 3
"""Exit codes of psctl wait and of psctl status --check."""

_HELP = """Wait until the job is in a given state. For scripts.

\b
    psctl wait --for training             every expected member has joined, and none that training needs is lost
    psctl wait --for 4-workers            at least 4 live workers
    psctl wait --for finished --timeout 3600

A coordinator that does not answer yet, or is being started again, is waited for, too. The exit code is 0 in that state;
1 after --timeout, or when the job has finished in another state.
"""

_WORKERS = re.compile(r"(\d+)-workers?")

Awaited = Callable[[ClusterStatus], bool]


def _awaited(context: click.Context, parameter: click.Parameter, text: str) -> tuple[str, Awaited]:
    """The name of a state, and whether a job is in it."""
    if text in (FINISHED, TRAINING):
        return text, lambda status: job_state(status).name == text
    found = _WORKERS.fullmatch(text)
    if not found:
        raise click.BadParameter(
            f"{text!r} is not a state: use finished, training, or a number of workers such as 4-workers"
        )
    wanted = int(found[1])
    return text, lambda status: len(status.view.live(Role.WORKER)) >= wanted


def _look(client: CoordinatorClient, deadline: float) -> ClusterStatus:
    """The status of the job, once its coordinator answers. Raises Unavailable after ``deadline``."""
    said_at = -math.inf

    def say(text: str) -> None:
        nonlocal said_at
        if (now := time.monotonic()) - said_at >= SAY_SECONDS:
            said_at = now
            note(text)

    while True:
        try:
            return client.get_status(CALL_SECONDS, once=True)
        except Unavailable:
            left = deadline - time.monotonic()
        if left > 0:
            client.wait_until_reachable(left, say)
        else:
            client.connect()  # which raises the reason


@click.command("wait", help=_HELP)
@click.option("--for", "state", required=True, callback=_awaited, metavar="finished|training|N-workers")
@click.option(
    "--timeout", type=click.FloatRange(0), metavar="SECONDS", help="Longest time to wait.  [default: no limit]"
)
@coordinator_option
def wait(coordinator: str, state: tuple[str, Awaited], timeout: float | None) -> None:
    """Wait until the job is in a state."""
    name, reached = state
    deadline = math.inf if timeout is None else time.monotonic() + timeout
    with client_of(coordinator) as client:
        while True:
            seen = _look(client, deadline)
            if reached(seen):
                return
            over = time.monotonic() >= deadline
            if over or seen.view.finished:
                why = f"after {timeout:g} s" if over else "and the job has finished"
                note(f"not '{name}' {why}: {headline(seen)}", logging.WARNING)
                sys.exit(TIMED_OUT)
            time.sleep(LOOK_SECONDS)
