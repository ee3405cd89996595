"""The commands psctl weights: what is published, and readers that follow directories."""

from __future__ import annotations

import json
import logging
import sys
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ps_protocol.client.coordinator import CoordinatorClient
from ps_protocol.cluster.address import parse_metrics_port, split_address
from ps_protocol.cluster.job_state import time_text
from ps_protocol.cluster.weights import NAME, WeightsReader, WeightsState, WeightsVersion
from ps_protocol.errors import ConfigError, InvalidRequest, UnknownVersion
from ps_protocol.logs import LogEvent
from ps_protocol.model.spec import DType
from ps_protocol.security.roles import AccessRole
from ps_protocol.security.security import Security
from ps_protocol.security.settings import SecuritySettings
from ps_server.cli.options.common import check_ready_file, clean_errors
from ps_server.cli.options.security import listener_security_options
from ps_server.cli.psctl.connection import connected, coordinator_option
from ps_server.cli.psctl.output import note, output_option, print_result
from ps_server.serving.metrics import MetricsConfig, metrics_option
from ps_server.settings import PortOption

if TYPE_CHECKING:
    from ps_protocol.weights.pieces import Received
    from ps_protocol.weights.reader import VersionReader
    from ps_protocol.weights.version import WholeVersion
    from ps_server.checkpoint.weight_directory import WeightDirectory
    from ps_server.relay.held import RelayedVersion

_INTERRUPTED = 130
"""Exit code of a command that Ctrl-C ended, as shells report it."""

RELAY_PORT = 7010

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


_RELAY = """Follow each NAME of a job, and serve other readers from what was received.

The job's network carries one copy of a version, whatever the number of readers behind the relay. They read from it as
from the job: ps_worker.subscribe(NAME, coordinator="RELAY:PORT"), psctl weights follow, another relay. It has whole and
checked versions only, in memory. While the job is away it serves what it has, and then goes on by itself. It ends when
the job is finished and nobody reads any more.

It needs the token of a reader, and shows its certificate to readers; they need a token that is in its file.

\b
    psctl --coordinator trainer:7000 weights relay policy --bind 0.0.0.0 --advertise host3:7010
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
        | {"readers": [asdict(reader) | {"behind": state.behind(reader)} for reader in state.readers]}
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
    lines = [f"{state.name}: version {state.newest} of model '{state.model}', {_readers(state)}"]
    for version in state.versions:
        marks = ["gone"] * (version.number in state.gone)
        marks += [f"pinned by {pin.holder}" for pin in state.pins if pin.number == version.number]
        told = f", {', '.join(marks)}" if marks else ""
        size = f"{version.size_bytes / 1e6:.1f} MB"
        lines.append(f"  version {version.number}: step {version.step}, {size}, {time_text(version.at_seconds)}{told}")
    for reader in state.readers:
        behind = f"version {reader.have}, {state.behind(reader)} behind"
        served = f", serves {reader.readers} readers" if reader.readers else ""
        lines.append(f"  reader {reader.host} process {reader.pid}: {behind}, {_received(reader)}{served}")
    if more := state.reader_count - len(state.readers):
        lines.append(f"  and {more} more readers")
    return "\n".join(lines)


def _readers(state: WeightsState) -> str:
    if not state.reader_count:
        return "no readers"
    count = f"{state.reader_count} reader{'s' if state.reader_count > 1 else ''}"
    count += f" and {state.relayed_readers} by relays" if state.relayed_readers else ""
    return f"{count}, up to {state.most_behind} behind, {_received(state)}"


def _received(of: WeightsState | WeightsReader) -> str:
    whole = f"{of.delta_bytes / 1e6:.1f} MB as deltas, {of.full_bytes / 1e6:.1f} MB whole"
    return f"{whole}, {of.saved_bytes / 1e6:.1f} MB saved"


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
@click.option("--once", is_flag=True, help="End after the version that is the newest now.")
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
    from ps_server.checkpoint.weight_directory import Origin, WeightDirectory, files_beside

    what = Reading(name, DType(dtype) if dtype else None, follow=not once)
    with clean_errors():
        _check_libraries("follow")
        beside = files_beside(config_from) if config_from else {}
        with (
            WeightDirectory(folder, anchor_every=anchor_every, keep=keep, beside=beside) as directory,
            CoordinatorClient(coordinator, Security(security or SecuritySettings(), AccessRole.READER)) as client,
        ):
            if (origin := directory.origin) and origin.name != name:
                raise InvalidRequest(
                    f"{folder} has the versions of another name",
                    expected=f"'{origin.name}'",
                    actual=f"'{name}'",
                    remedy="give each name its own directory",
                )
            job_id = origin.job_id if origin else ""
            reader = VersionReader(client, what, have=directory.newest, job_id=job_id, say=note)
            try:
                while version := _next(reader, directory):
                    if directory.origin != (now := Origin(name, version.job_id)):
                        directory.begin(now)
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


def _check_libraries(command: str) -> None:
    """Load what applies deltas, which may be compiled now. Raises ConfigError where it is not installed."""
    try:
        import_module("ps_protocol.wire.deltas")
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"psctl weights {command} needs {error.name}", remedy="pip install 'torch-ps[server]' or 'torch-ps[worker]'"
        ) from error


def _next(reader: VersionReader, directory: WeightDirectory) -> WholeVersion | None:
    """Raises UnknownVersion where the directory is of another job, and as ``VersionReader.next``."""
    try:
        return reader.next()
    except UnknownVersion as error:
        if not directory.newest:
            raise
        raise UnknownVersion(
            f"{directory.path} does not go on with this job: {error.message}",
            expected=error.expected,
            actual=error.actual,
            remedy="give a new directory to a new job",
        ) from error


@weights.command(help=_RELAY)
@click.argument("names", nargs=-1, metavar="NAME...")
@click.option("--all", "everything", is_flag=True, help="Everything that the job publishes.")
@click.option(
    "--keep",
    type=click.IntRange(1),
    default=2,
    show_default=True,
    metavar="N",
    help="Keep the newest N versions of a name in memory. What changed can be sent to a reader that has one of them.",
)
@click.option(
    "--dtype",
    type=click.Choice(_DTYPES),
    help="Dtype of floating-point values: shards convert, and readers get this one alone.  [default: as trained]",
)
@click.option("--bind", default="127.0.0.1", show_default=True, help="Address to listen on; 0.0.0.0: all interfaces.")
@click.option(
    "--port",
    cls=PortOption,
    type=click.IntRange(0, 65535),
    default=RELAY_PORT,
    show_default=True,
    help="Port to listen on; 0: any free port.",
)
@click.option("--advertise", default="", help="host:port at which readers reach this relay, if they need another one.")
@click.option(
    "--bulk-ports",
    default="0",
    show_default=True,
    metavar="PORT|FIRST-LAST|off",
    help="TCP port for large payloads. In a range, the first free port is used. 0: any free port. off: all data goes "
    "over gRPC.",
)
@click.option(
    "--ready-file",
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    help="File to which the relay writes its host:port once it serves.",
)
@metrics_option("PS_RELAY_METRICS_PORT", what="the relay")
@coordinator_option
@listener_security_options
@output_option("one object per version, one per line")
def relay(
    security: SecuritySettings,
    coordinator: str,
    names: tuple[str, ...],
    everything: bool,
    keep: int,
    dtype: str | None,
    bind: str,
    port: int,
    advertise: str,
    bulk_ports: str,
    ready_file: Path | None,
    metrics_port: str,
    as_json: bool,
) -> None:
    """Serve readers from what was received."""
    if bool(names) == everything:
        raise click.UsageError("give names, or --all")
    if odd := [name for name in names if not NAME.fullmatch(name)]:
        raise click.UsageError(f"{odd[0][:100]!r} is no name of what is published")
    with clean_errors():
        if advertise:
            split_address(advertise, "this relay", "--advertise")
        check_ready_file(ready_file)
        _check_libraries("relay")
        from ps_server.relay.process import RelayConfig, serve
        from ps_server.serving import grpc_server
        from ps_server.shard.config import SideChannelConfig, parse_ports

        config = RelayConfig(
            coordinator=coordinator,
            names=names,
            dtype=DType(dtype) if dtype else None,
            keep=keep,
            bind=bind,
            port=port,
            advertise=advertise,
            ready_file=ready_file,
            side_channels=SideChannelConfig(bind, parse_ports(bulk_ports)),
            security=security,
            metrics=MetricsConfig(bind, parse_metrics_port(metrics_port), advertise.rpartition(":")[0].strip("[]")),
        )

        def say(event: LogEvent, text: str) -> None:
            note(text, logging.INFO if event == "relay" else logging.WARNING, event)

        def show(name: str, relayed: RelayedVersion, received: Received) -> None:
            version = relayed.version
            facts = {
                "name": name,
                "number": version.number,
                "step": version.step,
                "size_bytes": version.size_bytes,
                **asdict(received),
            }
            size = f"{version.size_bytes / 1e6:.1f} MB"
            came = f"{received.delta_bytes / 1e6:.1f} MB as deltas, {received.full_bytes / 1e6:.1f} MB whole"
            print_result(facts, f"{name} version {version.number}, step {version.step}: {size}, {came}", as_json)

        grpc_server.run(lambda stop: serve(config, stop, show, say))
