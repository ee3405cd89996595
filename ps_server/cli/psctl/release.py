"""The command psctl release."""

from __future__ import annotations

import click
from rich.filesize import decimal

from ps_server.cli.psctl.connection import connected, coordinator_option
from ps_server.cli.psctl.output import output_option, print_result

_HELP = """Drop MODEL on all shards: its values, optimizer state and tables.

Every worker has to have closed its optimizer; the error names those that have not. Checkpoints made later lack the
model, those made before keep it. Workers may declare another model under the name.
"""


@click.command(help=_HELP)
@click.argument("model")
@coordinator_option
@output_option()
def release(coordinator: str, model: str, as_json: bool) -> None:
    """Drop a model that no worker uses."""
    with connected(coordinator) as job:
        size = job.release(model)
    facts: dict[str, object] = {"model": model, "released_bytes": size}
    print_result(facts, f"model '{model}' is released: {decimal(size)} of values", as_json)
