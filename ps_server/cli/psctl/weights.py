"""The commands psctl weights: what is published, and readers that follow directories."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ps_protocol.client.coordinator import CoordinatorClient
from ps_protocol.cluster.job_state import time_text
from ps_protocol.cluster.weights import WeightsState, WeightsVersion
from ps_protocol.errors import ConfigError, InvalidRequest
from ps_protocol.model.spec import DType
from ps_protocol.security.roles import AccessRole
from ps_protocol.security.security import Security
from ps_protocol.security.settings import SecuritySettings
from ps_server.cli.options.common import clean_errors
from ps_server.cli.psctl.connection import connected, coordinator_option
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
    """Show, keep and follow published weights."""


@weights.command("list")
@coordinator_option
@output_option()
def list_weights(coordinator: str, as_json: bool) -> None:
    """Show what a job publishes: versions, readers and how far each is behind, pins."""
    with connected(coordinator) as job:
        names = job.weights()
    plain = [
        asdict(state)
        | {"versions": [_version(version) for version in state.versions]}
        | {"readers": [asdict(reader) | {"behind": state.newest - reader.have} for reader in state.readers]}
        for state in names
    ]
    print_result({"names": plain}, "\n".join(map(_shown, names)) or "nothing is published", as_json)


@weights.command()
@click.argument("name")
@click.argument("number", type=click.IntRange(1))
@click.option(
    "--seconds",
    type=click.FloatRange(0),
    default=3600.0,
    show_default=True,
    help="For how long, from now: 30 days at most. 0: no longer.",
)
@click.option("--holder", default="operator", show_default=True, help="Who wants it.")
@coordinator_option
@output_option()
def pin(coordinator: str, name: str, number: int, seconds: float, holder: str, as_json: bool) -> None:
    """Keep version NUMBER of NAME although newer ones come."""
    with connected(coordinator) as job:
        job.pin_weights(name, number, seconds=seconds, holder=holder)
    text = f"version {number} of '{name}' is kept for {seconds:g} s" if seconds else f"version {number} is not pinned"
    print_result({"name": name, "number": number, "seconds": seconds, "holder": holder}, text, as_json)


def _version(version: WeightsVersion) -> dict[str, object]:
    """As JSON's types; the pieces are of interest to shards alone."""
    shards = [piece.shard for piece in version.pieces]
    facts = asdict(version) | {"metadata": json.loads(version.metadata or "{}"), "size_bytes": version.size_bytes}
    del facts["pieces"]
    return facts | {"shards": shards}


def _shown(state: WeightsState) -> str:
    lines = [f"{state.name}: version {state.newest} of model '{state.model}', {len(state.readers)} readers"]
    for version in state.versions:
        marks = ["gone"] * (version.number in state.gone)
        marks += [f"pinned by {pin.holder}" for pin in state.pins if pin.number == version.number]
        told = f", {', '.join(marks)}" if marks else ""
        size = f"{version.size_bytes / 1e6:.1f} MB"
        lines.append(f"  version {version.number}: step {version.step}, {size}, {time_text(version.at_seconds)}{told}")
    for reader in state.readers:
        received = f"{reader.delta_bytes / 1e6:.1f} MB as deltas, {reader.full_bytes / 1e6:.1f} MB whole"
        behind = f"version {reader.have}, {state.newest - reader.have} behind"
        lines.append(f"  reader {reader.host} process {reader.pid}: {behind}, {received}")
    return "\n".join(lines)


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
        _check_libraries()
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


def _check_libraries() -> None:
    """Load what applies deltas, which may be compiled now. Raises ConfigError where it is not installed."""
    try:
        import_module("ps_protocol.wire.deltas")
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"psctl weights follow needs {error.name}", remedy="pip install 'torch-ps[server]' or 'torch-ps[worker]'"
        ) from error


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
