"""The command psctl wait."""

from __future__ import annotations

import logging
import math
import sys
import time

import click

from ps_protocol.client.admin import AwaitedState
from ps_protocol.errors import InvalidRequest, NotReady
from ps_server.cli.psctl.connection import client_of, coordinator_option
from ps_server.cli.psctl.output import note
from ps_server.settings import Finite

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


def _state(context: click.Context, parameter: click.Parameter, text: str) -> str:
    try:
        return AwaitedState(text).name
    except InvalidRequest as error:
        raise click.BadParameter(error.message) from error


@click.command("wait", help=_HELP)
@click.option("--for", "state", required=True, callback=_state, metavar="finished|training|N-workers")
@click.option("--timeout", type=Finite(0), metavar="SECONDS", help="Longest time to wait.  [default: no limit]")
@coordinator_option
def wait(coordinator: str, state: str, timeout: float | None) -> None:
    """Wait until the job is in a state."""
    said_at = -math.inf

    def say(text: str) -> None:
        nonlocal said_at
        if (now := time.monotonic()) - said_at >= 60.0:
            said_at = now
            note(text)

    with client_of(coordinator) as job:
        try:
            job.wait(state, timeout, say)
        except NotReady as error:
            note(error.message, logging.WARNING)
            sys.exit(TIMED_OUT)
