"""The commands psctl weights: published weights, for readers that follow directories."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ps_protocol.client.coordinator import CoordinatorClient
from ps_protocol.errors import InvalidRequest
from ps_protocol.model.spec import DType
from ps_protocol.security.roles import AccessRole
from ps_protocol.security.security import Security
from ps_protocol.security.settings import SecuritySettings
from ps_server.cli.options.common import clean_errors
from ps_server.cli.psctl.connection import coordinator_option
from ps_server.cli.psctl.output import note, output_option, print_result

if TYPE_CHECKING:
    from ps_protocol.weights.reader import VersionReader
    from ps_protocol.weights.version import WholeVersion
    from ps_server.checkpoint.weight_directory import WeightDirectory

_INTERRUPTED = 130
"""Exit code of a command that Ctrl-C ended, as shells report it."""

_DTYPES = [each.value for each in (DType.BFLOAT16, DType.FLOAT16, DType.FLOAT32, DType.FLOAT64)]

_FOLLOW = """Write each new version of NAME to a directory that SGLang, slime and miles follow.

A version is a folder weight_v000007 with safetensors files and their index: a full Hugging Face checkpoint, or what has
changed since the version before. The file "latest" has the name of the newest one. Each appears when it is whole. The
command runs until the job is finished, also across restarts of servers; it may be killed and started again at any time.
Versions that are published faster than they are written are skipped; the one behind a gap is full.

It needs the token of a reader.

\b
    psctl weights follow policy --dir /shared/policy --dtype bfloat16 --config-from Qwen/
"""


@click.group()
def weights() -> None:
    """Follow published weights."""


@weights.command(help=_FOLLOW)
@click.argument("name")
@click.option("--dir", "folder", required=True, type=click.Path(file_okay=False, path_type=Path), help="The directory.")
@click.option(
    "--anchor-every",
    type=click.IntRange(1),
    default=20,
    show_default=True,
    metavar="N",
    help="Of N versions one is full at least.",
)
@click.option(
    "--keep",
    type=click.IntRange(1),
    default=50,
    show_default=True,
    metavar="N",
    help="Keep the newest N versions, and those that they build on.",
)
@click.option("--dtype", type=click.Choice(_DTYPES), help="Dtype of floating-point values.  [default: as trained]")
@click.option(
    "--config-from",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Hugging Face checkpoint whose configuration and tokenizer go into each full version.",
)
@click.option("--once", is_flag=True, help="End with the newest version.")
@coordinator_option
@output_option("one object per version, one per line")
@click.pass_obj
def follow(
    security: SecuritySettings | None,
    coordinator: str,
    name: str,
    folder: Path,
    anchor_every: int,
    keep: int,
    dtype: str | None,
    config_from: Path | None,
    once: bool,
    as_json: bool,
) -> None:
    """Write each new version to a directory."""
    from ps_protocol.weights.reader import Reading, VersionReader
    from ps_server.checkpoint.file_plan import TensorForm
    from ps_server.checkpoint.weight_directory import WeightDirectory, files_beside

    what = Reading(name, DType(dtype) if dtype else None, follow=not once)
    with clean_errors():
        beside = files_beside(config_from) if config_from else {}
        with (
            WeightDirectory(folder, anchor_every=anchor_every, keep=keep, beside=beside) as directory,
            CoordinatorClient(coordinator, Security(security or SecuritySettings(), AccessRole.READER)) as client,
        ):
            reader = VersionReader(client, what, have=directory.newest, say=note)
            try:
                while version := _next(reader, directory):
                    forms = [TensorForm(each.name, each.dtype, each.shape) for each in version.variables]
                    written = directory.write(version.number, forms, version.values)
                    facts = {"name": name, "step": version.step, **asdict(written)}
                    kind = "full" if written.base is None else f"delta of {written.base}"
                    size = f"{written.file_bytes / 1e6:.1f} of {written.full_bytes / 1e6:.1f} MB"
                    print_result(facts, f"version {version.number}, step {version.step}: {kind}, {size}", as_json)
            except KeyboardInterrupt:
                sys.exit(_INTERRUPTED)
            finally:
                reader.close()


def _next(reader: VersionReader, directory: WeightDirectory) -> WholeVersion | None:
    """Raises InvalidRequest where the directory is of another job, and as ``VersionReader.next``."""
    try:
        return reader.next()
    except InvalidRequest as error:
        if not directory.newest:
            raise
        raise InvalidRequest(
            f"{directory.path} does not go on with this job: {error.message}",
            expected=error.expected,
            actual=error.actual,
            remedy="give a new directory to a new job",
        ) from error
