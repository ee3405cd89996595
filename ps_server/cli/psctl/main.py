"""The command psctl: inspect and change a running job, and manage its checkpoints."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

import click
from rich.console import Console
from rich.live import Live

from ps_protocol.client.admin import AdminClient
from ps_protocol.client.model_status import TableTotals
from ps_protocol.cluster.job_state import ailments, expiring, has_expired, time_text
from ps_protocol.cluster.view import ClusterStatus
from ps_protocol.logs import LEVELS, LogFormat
from ps_protocol.security.settings import VARIABLES, SecuritySettings
from ps_server.checkpoint.export.models import export as export_model
from ps_server.checkpoint.export.tables import RowFormat
from ps_server.checkpoint.read.checkpoint import Checkpoint
from ps_server.cli.options.common import LEVEL_VARIABLE, clean_errors, format_option, run_program, version_option
from ps_server.cli.options.mode import MODES, ModeOptions
from ps_server.cli.options.security import security_options
from ps_server.cli.psctl.certs import certs
from ps_server.cli.psctl.connection import connected, coordinator_option, patiently
from ps_server.cli.psctl.feed import feed
from ps_server.cli.psctl.learning_rates import learning_rates
from ps_server.cli.psctl.moves import drain, move
from ps_server.cli.psctl.output.facts import output_option, say, tell
from ps_server.cli.psctl.output.notes import log_as, note
from ps_server.cli.psctl.output.status_json import status_json
from ps_server.cli.psctl.release import release
from ps_server.cli.psctl.rows import import_rows
from ps_server.cli.psctl.scale import scale
from ps_server.cli.psctl.top.command import report, top
from ps_server.cli.psctl.trace import trace
from ps_server.cli.psctl.wait import UNHEALTHY, wait
from ps_server.cli.status.text import status_line, status_tables
from ps_server.settings import configured, options


@click.group()
@click.option(
    "--coordinator",
    envvar="PS_COORDINATOR",
    show_envvar=True,
    metavar="HOST:PORT",
    help="Address of the job's coordinator.",
)
@security_options
@click.option(
    "--log-level",
    type=click.Choice(LEVELS, case_sensitive=False),
    envvar=LEVEL_VARIABLE,
    help="Lowest level that is logged to stderr. PS_LOG_LEVEL.  [default: warning]",
)
@format_option("PSCTL", " In JSON, errors and progress are records, too. PS_LOG_FORMAT.")
@version_option
@click.pass_context
def main(
    context: click.Context,
    /,
    coordinator: str | None,
    security: SecuritySettings,
    log_level: str | None,
    log_format: str,
) -> None:
    """Inspect a running torch-ps job, change its consistency mode, make and restore checkpoints, scale it, move slices
    between its shards, release models, and load rows of tables.
    """
    log_as(log_level, LogFormat(log_format), os.environ.get(VARIABLES["job"]))
    context.obj = security


main.add_command(certs)
main.add_command(move)
main.add_command(drain)
main.add_command(scale)
main.add_command(feed)
main.add_command(release)
main.add_command(import_rows)
main.add_command(wait)
main.add_command(learning_rates)
main.add_command(trace)
main.add_command(top)
main.add_command(report)


@main.command()
@coordinator_option
@click.option("--watch", is_flag=True, help="Repeat until Ctrl-C or the end of the job.")
@output_option("one JSON object (docs/psctl.md); with --watch, one per line")
@click.option(
    "--check",
    is_flag=True,
    help=f"Exit with code {UNHEALTHY} if the job is stalled, members are missing, failed or lost, or certificates have "
    "expired.",
)
def status(coordinator: str, watch: bool, as_json: bool, check: bool) -> None:
    """Show members, their speed, models and mode, and the rows and bytes of tables."""
    console = Console(highlight=False, markup=False, emoji=False)
    with connected(coordinator) as job:
        pause = 2.0 if watch and not as_json and not console.is_terminal else 1.0
        looks = _looks(job, pause if watch else None)
        if as_json:
            for seen, tables in looks:
                say(status_json(seen, tables))
        elif watch and console.is_terminal:
            with Live(console=console, auto_refresh=False) as live:
                for seen, tables in looks:
                    live.update(status_tables(seen, console.width, tables=tables), refresh=True)
        elif watch:
            for seen, tables in looks:
                say(f"{time_text(time.time())} {status_line(seen, tables)}")
        else:
            for seen, tables in looks:
                console.print(status_tables(seen, console.width, tables=tables))
    if check and (soon := expiring(seen)) and not has_expired(seen):
        note(soon, logging.WARNING)
    if check and (found := ailments(seen)):
        note("not healthy: " + "; ".join(found), logging.WARNING)
        sys.exit(UNHEALTHY)


def _looks(job: AdminClient, pause_seconds: float | None) -> Iterator[tuple[ClusterStatus, tuple[TableTotals, ...]]]:
    """The job as it is now; with a pause again and again until it is finished."""
    while True:
        seen = job.status()
        yield seen, job.tables(seen)
        if pause_seconds is None or seen.view.finished:
            return
        time.sleep(pause_seconds)


@main.command()
@click.argument("mode", type=MODES)
@coordinator_option
@output_option()
@options(ModeOptions)
def mode(coordinator: str, as_json: bool, mode: str, **bounds: Any) -> None:
    """Change the consistency mode of the whole job while it runs."""
    wanted = configured(ModeOptions, bounds).consistency(mode)
    with connected(coordinator) as job:
        consistency = job.set_consistency(wanted)
    tell({"consistency": consistency}, f"mode is now {consistency}", as_json)


@main.command()
@coordinator_option
@output_option()
def checkpoint(coordinator: str, as_json: bool) -> None:
    """Write a checkpoint of the whole job while it trains, and print its folder when it is complete."""
    with connected(coordinator) as job:
        made = patiently("writing the checkpoint", job.checkpoint)
    tell(asdict(made), f"{made.folder}: {made.size_bytes / 1e6:.1f} MB in {made.seconds:.1f} s", as_json)


@main.command()
@click.argument("folder", default="")
@coordinator_option
@output_option()
def restore(coordinator: str, folder: str, as_json: bool) -> None:
    """Restore the checkpoint in FOLDER (default: the newest one) into the running job, while it trains.

    The values and the optimizer state of its models are replaced on all shards at once. Versions and clocks do not go
    back. A push that arrives meanwhile is applied to the restored values. To start a job from a checkpoint, also with
    another number of shards, use ps-coordinator --restore.
    """
    with connected(coordinator) as job:
        chosen = str(Path(folder).absolute()) if folder else ""
        found = patiently("restoring", lambda: job.restore(chosen))
    tell(asdict(found), f"restored {', '.join(found.models) or 'nothing'} from {found.folder}", as_json)


@main.command()
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("target", type=click.Path(path_type=Path))
@click.option("--model", default="model", show_default=True, help="Name of the model.")
@click.option(
    "--max-file-mb",
    type=click.IntRange(1),
    default=5000,
    show_default=True,
    help="Largest size of a file; a larger model is split.",
)
@click.option(
    "--format",
    "rows",
    type=click.Choice([each.value for each in RowFormat]),
    default=RowFormat.SAFETENSORS.value,
    show_default=True,
    help="Format of table rows; parquet needs torch-ps[parquet].",
)
@output_option()
def export(folder: Path, target: Path, model: str, max_file_mb: int, rows: str, as_json: bool) -> None:
    """Export one model of the checkpoint in FOLDER to TARGET, as plain safetensors files.

    Each table becomes one or more files in TARGET/tables with ids, rows and optimizer state, which psctl import-rows
    reads. No running job is needed. TARGET must not exist.
    """
    with clean_errors():
        files = export_model(Checkpoint.open(folder), target, model, max_file_mb * 1_000_000, RowFormat(rows))
    tell({"folder": target, "files": files}, f"{target}: {len(files)} file{'s' if len(files) > 1 else ''}", as_json)


@main.command()
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@output_option()
def verify(folder: Path, as_json: bool) -> None:
    """Read the whole checkpoint in FOLDER and compare it with its checksums."""
    with clean_errors():
        found = Checkpoint.open(folder)
        found.verify()
    models = sorted(found.manifest.models)
    tell({"folder": folder, "models": models}, f"{folder}: whole, with {', '.join(models)}", as_json)


def program() -> NoReturn:
    """The process of psctl."""
    run_program(main)


if __name__ == "__main__":
    program()
