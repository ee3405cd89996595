"""The command psctl divergence: what has grown far above its own history, and that this was meant."""

from __future__ import annotations

import click

from ps_protocol.cluster.job_state import growth, time_text
from ps_protocol.cluster.view import Divergence
from ps_server.cli.psctl.connection import connected, coordinator_option
from ps_server.cli.psctl.output import output_option, print_result

_HELP = """Show the numbers that have grown far above their own history: the norms of gradients, losses, refused steps.

With --acknowledge the growth was meant, as with a harder task or layers that are trained from now on: what has grown is
usual from now on, and the alert is over. It comes back when these numbers grow far above what they are then.
"""


@click.command(help=_HELP)
@click.option("--acknowledge", is_flag=True, help="Take them for usual, and end the alert.")
@coordinator_option
@output_option()
def divergence(coordinator: str, acknowledge: bool, as_json: bool) -> None:
    """Show or acknowledge what has grown."""
    with connected(coordinator) as job:
        found = job.acknowledge_divergence() if acknowledge else job.status().divergences
    text = "\n".join(map(_line, found)) or "no number is far above its history"
    if acknowledge and found:
        text += "\nacknowledged: usual from now on"
    print_result({"divergences": found, "acknowledged": acknowledge and bool(found)}, text, as_json)


def _line(grown: Divergence) -> str:
    return f"{growth(grown)}, since {time_text(grown.since_seconds)}"
