"""The command psctl import-rows: writes rows from files to a table of a running job."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from ps_server.cli.psctl.connection import connected, coordinator_option
from ps_server.cli.psctl.output import output_option, print_result

_HELP = """Write the rows in FILES to a table of the running job, while it trains.

A file holds int64 ids [n], float32 rows [n, dim], and optionally float32 state [n, width of the optimizer state]. The
format is safetensors, or Parquet if the name ends in .parquet and torch-ps[parquet] is installed. psctl export writes
such files. Rows without state get initial state. All files are read and checked before the first row is written. If the
command is interrupted, rows that were written remain; run the same command again.

\b
    psctl export /shared/run7/checkpoint-00000012 old/
    psctl import-rows --table ads old/tables/ads.safetensors
"""


@click.command("import-rows", help=_HELP)
@click.argument("files", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--model", default="model", show_default=True, help="Name of the model.")
@click.option("--table", required=True, help="Name of the table.")
@click.option("--only-new", is_flag=True, help="Do not change rows that exist.")
@click.option("--values-only", is_flag=True, help="Ignore state in the files, for example state of another optimizer.")
@coordinator_option
@output_option()
def import_rows(
    coordinator: str,
    files: tuple[Path, ...],
    model: str,
    table: str,
    only_new: bool,
    values_only: bool,
    as_json: bool,
) -> None:
    """Write rows from files."""
    from ps_server.checkpoint.row_files import RowFile

    with connected(coordinator) as job, job.row_loader(table, model) as loader:
        opened = [RowFile(path, loader.spec, with_state=not values_only) for path in files]
        total = sum(file.count for file in opened)
        with click.progressbar(length=total, label="rows", show_pos=True, file=sys.stderr if as_json else None) as bar:
            for file in opened:
                file.check_values()
            for piece in (piece for file in opened for piece in file.pieces(loader.piece_rows)):
                loader.write(piece.ids, piece.values, only_new=only_new)
                bar.update(piece.ids.size)
    state = sum(file.with_state for file in opened)
    how = "with state" if state == len(opened) else "without state" if not state else "some with state"
    print_result(
        {"model": model, "table": table, "rows": total, "files": files, "files_with_state": state},
        f"table {table}: {total} rows from {len(opened)} file{'s' if len(opened) > 1 else ''}, {how}",
        as_json,
    )
