"""The command psctl: look at a running job, change its mode, handle its checkpoints, move slices between its shards."""

from __future__ import annotations

import enum
import json
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path

import click
from rich.console import Console
from rich.live import Live

from ps_protocol.client.coordinator import CoordinatorClient
from ps_protocol.view import ClusterStatus
from ps_server.checkpoint import Checkpoint
from ps_server.checkpoint.export import export as export_model
from ps_server.checkpoint.table_export import RowFormat
from ps_server.cli import clean_errors, version_option
from ps_server.launcher.status_text import TableTotals, status_line, status_tables, time_text
from ps_server.mode_options import MODES, bound_options, consistency_of
from ps_server.psctl_feed import feed
from ps_server.psctl_moves import drain, move
from ps_server.psctl_options import connected, coordinator_option, patiently
from ps_server.psctl_rows import import_rows
from ps_server.psctl_tables import table_totals
from ps_server.psctl_wait import UNHEALTHY, ailments, wait

CALL_SECONDS = 5.0
WATCH_SECONDS = 1.0
LOG_SECONDS = 2.0


def to_json(value: object) -> object:
    """Dataclasses, enums, bytes and mappings as JSON's types."""
    if is_dataclass(value):
        values = {field.name: getattr(value, field.name) for field in fields(value)}
        # Bytes are marks that only the coordinator can read.
        return {name: to_json(each) for name, each in values.items() if not isinstance(each, bytes)}
    if isinstance(value, enum.Enum):
        return to_json(value.value)
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(item) for item in value]
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, frozenset):
        return sorted(value)
    return value


@click.group()
@click.option(
    "--coordinator", envvar="PS_COORDINATOR", show_envvar=True, metavar="HOST:PORT", help="The job's coordinator."
)
@version_option
def main(coordinator: str | None) -> None:
    """Look at a running torch-ps job, change its consistency mode, make and use its checkpoints, move its slices, load
    rows of its tables.
    """


main.add_command(move)
main.add_command(drain)
main.add_command(feed)
main.add_command(import_rows)
main.add_command(wait)

json_option = click.option("--json", "as_json", is_flag=True, help="One JSON object, for programs.")


def _tell(facts: Mapping[str, object], text: str, as_json: bool) -> None:
    """What a command found or did."""
    click.echo(json.dumps(to_json(facts)) if as_json else text)


@main.command()
@coordinator_option
@click.option("--watch", is_flag=True, help="Show it again and again, until Ctrl-C or the end of the job.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object, for programs; with --watch one per line.")
@click.option("--check", is_flag=True, help=f"Exit code {UNHEALTHY} when members are missing, failed or were lost.")
def status(coordinator: str, watch: bool, as_json: bool, check: bool) -> None:
    """Members, their speed, models and mode; rows and bytes of tables, as their shards tell."""
    console = Console(highlight=False, markup=False, emoji=False)
    with connected(coordinator) as client:
        pause = LOG_SECONDS if watch and not as_json and not console.is_terminal else WATCH_SECONDS
        looks = _looks(client, pause if watch else None)
        if as_json:
            for seen, tables in looks:
                click.echo(json.dumps(to_json({"view": seen.view, "members": seen.members, "tables": tables})))
        elif watch and console.is_terminal:
            with Live(console=console, auto_refresh=False) as live:
                for seen, tables in looks:
                    live.update(status_tables(seen, console.width, tables=tables), refresh=True)
        elif watch:
            for seen, tables in looks:
                click.echo(f"{time_text(time.time())} {status_line(seen, tables)}")
        else:
            for seen, tables in looks:
                console.print(status_tables(seen, console.width, tables=tables))
    if check and (found := ailments(seen)):
        click.echo("not healthy: " + "; ".join(found), err=True)
        sys.exit(UNHEALTHY)


def _looks(
    client: CoordinatorClient, pause_seconds: float | None
) -> Iterator[tuple[ClusterStatus, tuple[TableTotals, ...]]]:
    """The job as it is now; with a pause again and again until it is finished."""
    while True:
        seen = client.get_status(CALL_SECONDS)
        yield seen, table_totals(client, seen.view, CALL_SECONDS)
        if pause_seconds is None or seen.view.finished:
            return
        time.sleep(pause_seconds)


@main.command()
@click.argument("mode", type=MODES)
@coordinator_option
@json_option
@bound_options
def mode(
    coordinator: str,
    as_json: bool,
    mode: str,
    staleness: int | None,
    backup: int | None,
    grace_seconds: float | None,
    stale_policy: str | None,
    stale_threshold: int | None,
) -> None:
    """Change the consistency mode of the whole job while it runs."""
    wanted = consistency_of(mode, staleness, backup, grace_seconds, stale_policy, stale_threshold)
    with connected(coordinator) as client:
        view = client.set_consistency(wanted, CALL_SECONDS)
    _tell({"consistency": view.consistency}, f"mode is now {view.consistency}", as_json)


@main.command()
@coordinator_option
@json_option
def checkpoint(coordinator: str, as_json: bool) -> None:
    """Write a checkpoint of the whole job now, while it trains; prints its folder when it is complete."""
    with connected(coordinator) as client:
        folder, size, seconds = patiently("writing the checkpoint", client.checkpoint)
    facts = {"folder": folder, "size_bytes": size, "seconds": seconds}
    _tell(facts, f"{folder}: {size / 1e6:.1f} MB in {seconds:.1f} s", as_json)


@main.command()
@click.argument("folder", default="")
@coordinator_option
@json_option
def restore(coordinator: str, folder: str, as_json: bool) -> None:
    """Put the checkpoint in FOLDER (default: the newest) into the running job, while it trains.

    Values and optimizer state of its models are replaced on all shards at once. Versions and clocks go on; a push that
    is under way is applied to the restored values. To begin a job from a checkpoint, also with another number of
    shards, use ps-coordinator --restore.
    """
    with connected(coordinator) as client:
        chosen = str(Path(folder).absolute()) if folder else ""
        found, models = patiently("restoring", lambda: client.restore_checkpoint(chosen))
    _tell({"folder": found, "models": models}, f"restored {', '.join(models) or 'nothing'} from {found}", as_json)


@main.command()
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("target", type=click.Path(path_type=Path))
@click.option("--model", default="model", show_default=True, help="Which of the job's models.")
@click.option(
    "--max-file-mb", type=click.IntRange(1), default=5000, show_default=True, help="A larger model gets several files."
)
@click.option(
    "--format",
    "rows",
    type=click.Choice([each.value for each in RowFormat]),
    default=RowFormat.SAFETENSORS.value,
    show_default=True,
    help="Of the rows of tables; parquet needs pyarrow.",
)
def export(folder: Path, target: Path, model: str, max_file_mb: int, rows: str) -> None:
    """Write one model of the checkpoint in FOLDER to TARGET as plain safetensors files, for any loader.

    Each table becomes a file (of a large one several) in TARGET/tables with ids, rows and state, the optimizer's; psctl
    import-rows reads it. No job needs to run. TARGET is a new folder; nothing is overwritten.
    """
    with clean_errors():
        files = export_model(Checkpoint.open(folder), target, model, max_file_mb * 1_000_000, RowFormat(rows))
    click.echo(f"{target}: {len(files)} file{'s' if len(files) > 1 else ''}")


@main.command()
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@json_option
def verify(folder: Path, as_json: bool) -> None:
    """Read every byte of the checkpoint in FOLDER and compare it with its checksums."""
    with clean_errors():
        found = Checkpoint.open(folder)
        found.verify()
    models = sorted(found.manifest.models)
    _tell({"folder": str(folder), "models": models}, f"{folder}: whole, with {', '.join(models)}", as_json)


if __name__ == "__main__":
    main()
