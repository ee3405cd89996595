"""The command psctl lr: the learning rates of the last steps of a running job."""

from __future__ import annotations

import click

from ps_protocol.client.model_status import ModelRates
from ps_server.cli.psctl.connection import connected, coordinator_option
from ps_server.cli.psctl.output import output_option, print_result

_HELP = """Show the learning rates of the last step, for each parameter group and each table.

The optimizer of the training script sends them with each push, so they follow its schedulers. In mode sync, those of
the worker with the lowest rank apply. To change them, change the param_groups of the optimizer in the script.
"""


@click.command("lr", help=_HELP)
@click.option("--model", help="Show only this model.")
@coordinator_option
@output_option()
def learning_rates(coordinator: str, model: str | None, as_json: bool) -> None:
    """Show learning rates."""
    with connected(coordinator) as job:
        rates = job.learning_rates(model)
    text = "\n".join(line for each in rates for line in _lines(each)) or "no model has been declared"
    print_result({"models": rates}, text, as_json)


def _lines(rates: ModelRates) -> list[str]:
    if not rates.groups:
        return [f"{rates.model}: no step since its shards began"]
    alone = len(rates.groups) == 1
    named = [("" if alone else f" group {number}", rate) for number, rate in enumerate(rates.groups)]
    named += [(f" table {table}", rate) for table, rate in rates.tables.items()]
    return [f"{rates.model}{name}: {'-' if rate is None else f'{rate:g}'}" for name, rate in named]
