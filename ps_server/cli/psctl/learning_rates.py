"""The command psctl lr: the learning rates of the last steps of a running job."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import click

from ps_protocol.cluster.model_status import ModelStatus
from ps_protocol.errors import Unavailable, UnknownModel
from ps_server.cli.psctl.connection import connected, coordinator_option
from ps_server.cli.psctl.model_status import shard_maps, statuses_of
from ps_server.cli.psctl.output.facts import output_option, tell

CALL_SECONDS = 5.0

_HELP = """Show the learning rates of the last step, for each parameter group and each table.

The optimizer of the training script sends them with each push, so they follow its schedulers. In mode sync, those of
the worker with the lowest rank apply. To change them, change the param_groups of the optimizer in the script.
"""


@dataclass(frozen=True, slots=True)
class ModelRates:
    """The learning rates of one model; None where no step has sent one."""

    model: str
    version: int
    groups: tuple[float | None, ...]
    tables: dict[str, float | None]

    @property
    def lines(self) -> list[str]:
        """As text."""
        if not self.groups:
            return [f"{self.model}: no step since its shards began"]
        alone = len(self.groups) == 1
        named = [("" if alone else f" group {number}", rate) for number, rate in enumerate(self.groups)]
        named += [(f" table {table}", rate) for table, rate in self.tables.items()]
        return [f"{self.model}{name}: {'-' if rate is None else f'{rate:g}'}" for name, rate in named]


@click.command("lr", help=_HELP)
@click.option("--model", help="Show only this model.")
@coordinator_option
@output_option()
def learning_rates(coordinator: str, model: str | None, as_json: bool) -> None:
    """Show learning rates."""
    with connected(coordinator) as client:
        view = client.get_status(CALL_SECONDS).view
        maps = [each for each in shard_maps(client, view, CALL_SECONDS) if model in (None, each.spec.name)]
        if model is not None and not maps:
            raise UnknownModel(f"the job has no model '{model}'", expected=", ".join(sorted(view.models)), actual=model)
        told = statuses_of(client, maps, view)
        silent = [each.spec.name for each in maps if each.spec.name not in told]
        if silent:
            raise Unavailable(f"no shard of model '{silent[0]}' answers", remedy="see psctl status")
    rates = [_rates(name, statuses) for name, statuses in sorted(told.items())]
    text = "\n".join(line for each in rates for line in each.lines) or "no model has been declared"
    tell({"models": rates}, text, as_json)


def _rates(model: str, statuses: Sequence[ModelStatus]) -> ModelRates:
    """By the shard that is furthest; rows of a table may be pushed to some of the shards only."""
    newest = max(statuses, key=lambda status: (bool(status.learning_rates), status.version))
    tables: dict[str, float | None] = {table.name: None for status in statuses for table in status.tables}
    for status in sorted(statuses, key=lambda status: status.version):
        tables |= {t.name: _known(t.learning_rate) for t in status.tables if t.learning_rate is not None}
    return ModelRates(model, newest.version, tuple(_all_known(newest.learning_rates)), tables)


def _all_known(rates: Iterable[float]) -> Iterable[float | None]:
    return map(_known, rates)


def _known(rate: float) -> float | None:
    return None if math.isnan(rate) else rate
