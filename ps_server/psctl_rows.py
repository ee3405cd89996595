"""The command psctl import-rows: rows from files into a table of a running job."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import click

from ps_server.psctl_options import connected, coordinator_option

_HELP = """Write the rows in FILE... to a table of the running job, while it trains.

A file has int64 ids [n], float32 rows [n, dim], and, if it likes, float32 state [n, width of the optimizer's state]; as
safetensors, or as Parquet where its name ends in .parquet and pyarrow is installed. psctl export writes such files.
Rows without state begin with none. All files are read and checked before anything is written. When it is interrupted,
what was written stays, and the same command may be given again.

\b
    psctl export /shared/run7/checkpoint-00000012 old/
    psctl import-rows --table ads old/tables/ads.safetensors
"""


@click.command("import-rows", help=_HELP)
@click.argument("files", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--model", default="model", show_default=True, help="Which of the job's models.")
@click.option("--table", required=True, help="Which of its tables.")
@click.option("--only-new", is_flag=True, help="Leave rows alone that are there.")
@click.option("--values-only", is_flag=True, help="Pass over state in the files, as of another optimizer.")
@coordinator_option
def import_rows(
    coordinator: str, files: tuple[Path, ...], model: str, table: str, only_new: bool, values_only: bool
) -> None:
    """Write rows from files."""
    from ps_server.checkpoint.row_files import RowFile
    from ps_server.row_loader import RowLoader  # Compiled code: not for other commands.

    with connected(coordinator) as client, ExitStack() as channels:
        loader = RowLoader(client, model, table, channels)
        opened = [RowFile(path, loader.spec, with_state=not values_only) for path in files]
        total = sum(file.count for file in opened)
        with click.progressbar(length=total, label="rows", show_pos=True) as bar:
            written = loader.load(opened, bar.update, only_new=only_new)
    state = sum(file.with_state for file in opened)
    how = "with state" if state == len(opened) else "without state" if not state else "some with state"
    click.echo(f"table {table}: {written} rows from {len(opened)} file{'s' if len(opened) > 1 else ''}, {how}")
