"""The command psctl: inspect and change a running job, and manage its checkpoints."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

import click

from ps_protocol.cluster.job_state import time_text
from ps_protocol.logs import LEVELS, LogFormat
from ps_protocol.security.settings import VARIABLES, SecuritySettings
from ps_server.checkpoint.checkpoint import Checkpoint
from ps_server.checkpoint.directory import Listed, listed
from ps_server.checkpoint.export import RowFormat
from ps_server.checkpoint.export import export as export_model
from ps_server.cli.options.checkpoint import step_in
from ps_server.cli.options.common import LEVEL_VARIABLE, clean_errors, format_option, run_program, version_option
from ps_server.cli.options.mode import MODES, ModeOptions
from ps_server.cli.options.security import security_options
from ps_server.cli.psctl.certs import certs
from ps_server.cli.psctl.connection import connected, coordinator_option, patiently
from ps_server.cli.psctl.divergence import divergence
from ps_server.cli.psctl.feed import feed
from ps_server.cli.psctl.learning_rates import learning_rates
from ps_server.cli.psctl.moves import drain, move
from ps_server.cli.psctl.output import log_as, output_option, print_result
from ps_server.cli.psctl.release import release
from ps_server.cli.psctl.rows import import_rows
from ps_server.cli.psctl.scale import scale
from ps_server.cli.psctl.status import status
from ps_server.cli.psctl.tables import tables
from ps_server.cli.psctl.top import report, top
from ps_server.cli.psctl.trace import trace
from ps_server.cli.psctl.wait import wait
from ps_server.cli.psctl.weights import weights
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
    between its shards, release models, load rows of tables, and tell ahead what tables take.
    """
    log_as(log_level, LogFormat(log_format), os.environ.get(VARIABLES["job"]))
    context.obj = security


main.add_command(status)
main.add_command(certs)
main.add_command(move)
main.add_command(drain)
main.add_command(scale)
main.add_command(feed)
main.add_command(release)
main.add_command(import_rows)
main.add_command(tables)
main.add_command(wait)
main.add_command(learning_rates)
main.add_command(divergence)
main.add_command(trace)
main.add_command(weights)
main.add_command(top)
main.add_command(report)


@main.command()
@click.argument("mode", type=MODES)
@coordinator_option
@output_option()
@options(ModeOptions)
def mode(coordinator: str, as_json: bool, mode: str, **bounds: Any) -> None:
    """Change the consistency mode of the whole job while it runs.

    It begins at one point of all shards: each push is decided by the same mode on all of them.
    """
    wanted = configured(ModeOptions, bounds).consistency(mode)
    with connected(coordinator) as job:
        consistency = patiently("changing the mode", lambda: job.set_consistency(wanted))
    print_result({"consistency": consistency}, f"mode is now {consistency}", as_json)


@main.command()
@coordinator_option
@output_option()
def checkpoint(coordinator: str, as_json: bool) -> None:
    """Write a checkpoint of the whole job while it trains, and print its folder when it is complete."""
    with connected(coordinator) as job:
        made = patiently("writing the checkpoint", job.checkpoint)
    print_result(asdict(made), f"{made.folder}: {made.size_bytes / 1e6:.1f} MB in {made.seconds:.1f} s", as_json)


@main.command()
@click.argument("directory", type=click.Path(exists=True, file_okay=False, path_type=Path))
@output_option()
def checkpoints(directory: Path, as_json: bool) -> None:
    """List the complete checkpoints in DIRECTORY, the folder of --checkpoint-dir, oldest first.

    A checkpoint that is kept beside the newest ones says why: a model diverged after it. Remove its file kept.json, and
    it will be removed like others.
    """
    with clean_errors():
        found = listed(directory)
    print_result({"checkpoints": found}, "\n".join(map(_line, found)) or "no complete checkpoint", as_json)


def _line(each: Listed) -> str:
    parts = [each.folder.name, "its manifest is damaged" if each.step is None else f"step {each.step}"]
    parts += [] if each.size_bytes is None else [f"{each.size_bytes / 1e6:.1f} MB"]
    parts += [] if each.at_seconds is None else [time_text(each.at_seconds)]
    return ", ".join(parts) + (f"; kept: {each.kept}" if each.kept else "")


@main.command()
@click.argument("folder", default="")
@coordinator_option
@output_option()
def restore(coordinator: str, folder: str, as_json: bool) -> None:
    """Restore the checkpoint in FOLDER (default: the newest one) into the running job, while it trains. step=N in place
    of FOLDER: the one of that step in the coordinator's directory.

    The values and the optimizer state of its models are replaced on all shards at once. Versions and clocks do not go
    back. A push that arrives meanwhile is applied to the restored values. To start a job from a checkpoint, also with
    another number of shards, use ps-coordinator --restore.
    """
    with connected(coordinator) as job:
        step = step_in(folder)
        found = patiently("restoring", lambda: job.restore("" if step is not None else folder, step))
    print_result(asdict(found), f"restored {', '.join(found.models) or 'nothing'} from {found.folder}", as_json)


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
    print_result(
        {"folder": target, "files": files}, f"{target}: {len(files)} file{'s' if len(files) > 1 else ''}", as_json
    )


@main.command()
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@output_option()
def verify(folder: Path, as_json: bool) -> None:
    """Read the whole checkpoint in FOLDER and compare it with its checksums."""
    with clean_errors():
        found = Checkpoint.open(folder)
        found.verify()
    models = sorted(found.manifest.models)
    print_result({"folder": folder, "models": models}, f"{folder}: whole, with {', '.join(models)}", as_json)


def program() -> NoReturn:
    """The process of psctl."""
    run_program(main)


if __name__ == "__main__":
    program()
