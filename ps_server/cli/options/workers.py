"""The option --workers: a fixed number of workers, a range, or 0 for any number."""

from __future__ import annotations

from typing import Any

import click

from ps_protocol.cluster.scaling import WorkerRange
from ps_protocol.errors import ConfigError


class WorkersType(click.ParamType[Any, Any]):
    """A number, or MIN:MAX; the value is a WorkerRange."""

    name = "N|MIN:MAX"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> WorkerRange:
        """As in click."""
        try:
            return WorkerRange.of(value)
        except ConfigError as error:
            self.fail(f"{error.actual}: expected {error.expected}", param, ctx)


WORKERS = WorkersType()
