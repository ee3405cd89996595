"""The command psctl trace: joins the trace files of several processes."""

from __future__ import annotations

from pathlib import Path

import click

from ps_protocol.errors import ConfigError
from ps_protocol.tracing.merge import MERGED, files_in, merge
from ps_server.cli.options.common import clean_errors
from ps_server.cli.psctl.output import output_option, print_result

_HELP = """Join the trace files in FOLDER to FOLDER/trace.json, with the times of all processes on one axis.

Programs that are started with PS_TRACE=FOLDER write such files; copy those of several hosts into one folder. ps-run
--trace does all this by itself. Perfetto (https://ui.perfetto.dev) and chrome://tracing open the result.
"""


@click.command("trace", help=_HELP)
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@output_option()
def trace(folder: Path, as_json: bool) -> None:
    """Join trace files."""
    target = folder / MERGED
    files = files_in(folder)
    with clean_errors():
        try:
            clocks = merge(files, target)
        except OSError as error:
            raise ConfigError(f"{target} cannot be written: {error.strerror}") from error
    facts = {"file": target, "processes": len(files), "clocks": clocks}
    print_result(facts, "\n".join([f"{target}: {len(files)} processes", *clocks]), as_json)
