"""The option of the coordinator's page, shared by ps-coordinator and ps-run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from ps_server.settings import PortOption

PAGE_PORT_VARIABLE = "PS_PAGE_PORT"

page_port_option: Callable[[Any], Any] = click.option(
    "--page-port",
    cls=PortOption,
    type=click.IntRange(0, 65535),
    envvar=PAGE_PORT_VARIABLE,
    show_envvar=True,
    show_default="no page",
    help="Port of a web page that shows the job: curves, workers, shards, events. 0: any free port, which the log "
    "names. Needs torch-ps[page].",
)
