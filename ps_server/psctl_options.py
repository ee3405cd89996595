"""The option that every psctl command to a running job has."""

from __future__ import annotations

import click


def _address(context: click.Context, parameter: click.Parameter, value: str | None) -> str:
    """The option as given after the command, before it, or in the environment."""
    address = value or context.find_root().params.get("coordinator")
    if not address:
        raise click.UsageError("where is the coordinator? Give --coordinator HOST:PORT or set PS_COORDINATOR", context)
    return str(address)


coordinator_option = click.option(
    "--coordinator", metavar="HOST:PORT", callback=_address, help="Where the job's coordinator serves."
)
