"""The command line of several programs: address, logging, ready file, config file, and the display of errors."""

from __future__ import annotations

import errno
import logging
import os
import resource
import sys
import tempfile
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

import click

from ps_protocol.cluster.scaling import WorkerRange
from ps_protocol.errors import ConfigError, PsError, Unavailable
from ps_protocol.logs import LEVELS, EventLogger, LogFormat, logs_json
from ps_protocol.text import printable
from ps_server.settings import PortOption

logger = EventLogger(__name__)

FORMAT_VARIABLE = "PS_LOG_FORMAT"
LEVEL_VARIABLE = "PS_LOG_LEVEL"


def _read_config(context: click.Context, parameter: click.Parameter, path: Path | None) -> None:
    """Use the file's values as defaults: flags and environment take precedence."""
    if path is None:
        return
    try:
        table = tomllib.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise click.BadParameter(f"cannot read {path}: {error}", context, parameter) from error
    values = {key.replace("-", "_"): value for key, value in table.items()}
    known = {p.name for p in context.command.params if p.name and p.name not in ("config", "help")}
    if unknown := sorted(set(values) - known):
        names = ", ".join(sorted(name.replace("_", "-") for name in known))
        raise click.BadParameter(f"{path} has unknown keys: {', '.join(unknown)}; known: {names}", context, parameter)
    context.default_map = {**(context.default_map or {}), **values}


config_option = click.option(
    "--config",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    is_eager=True,
    expose_value=False,
    callback=_read_config,
    help="TOML file with lines option = value. Flags and environment variables take precedence.",
)


def log_options(prefix: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add --log-level (``log_level``, str) and --log-format (``log_format``, str).

    ``prefix`` is that of the program's own environment variables, which take precedence over those of all programs.
    """

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        level = click.option(
            "--log-level",
            type=click.Choice(LEVELS, case_sensitive=False),
            default="info",
            show_default=True,
            envvar=[f"{prefix}_LOG_LEVEL", LEVEL_VARIABLE],
            help="Lowest level that is logged to stderr.",
        )
        return level(format_option(prefix)(command))

    return decorate


def format_option(prefix: str, note: str = "") -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add --log-format."""
    return click.option(
        "--log-format",
        type=click.Choice([each.value for each in LogFormat], case_sensitive=False),
        default=LogFormat.TEXT.value,
        show_default=True,
        envvar=[f"{prefix}_LOG_FORMAT", FORMAT_VARIABLE],
        help=f"Form of log lines: text, or one JSON object per line.{note}",
    )


def server_options(default_port: int, prefix: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add --bind, --port, --log-level, --log-format, --ready-file and --config.

    The command gets ``bind`` (str), ``port`` (int), ``log_level``, ``log_format`` (str) and ``ready_file`` (Path or
    None). Give the command ``context_settings={"auto_envvar_prefix": prefix}`` and every option can come from the
    environment too.
    """
    options = (
        click.option(
            "--bind", default="127.0.0.1", show_default=True, help="Address to listen on; 0.0.0.0: all interfaces."
        ),
        click.option(
            "--port",
            cls=PortOption,
            type=click.IntRange(0, 65535),
            default=default_port,
            show_default=True,
            help="Port to listen on; 0: any free port.",
        ),
        log_options(prefix),
        click.option(
            "--ready-file",
            type=click.Path(dir_okay=False, writable=True, path_type=Path),
            help="File to which this server writes its host:port once it serves.",
        ),
        config_option,
    )

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed(options):
            command = option(command)
        versioned: Callable[..., Any] = version_option(command)
        return versioned

    return decorate


version_option: Callable[[Any], Any] = click.version_option(
    package_name="torch-ps", message="%(prog)s of torch-ps %(version)s"
)

page_port_option: Callable[[Any], Any] = click.option(
    "--page-port",
    cls=PortOption,
    type=click.IntRange(0, 65535),
    envvar="PS_PAGE_PORT",
    show_envvar=True,
    show_default="no page",
    help="Port of a web page that shows the job: curves, workers, shards, events. 0: any free port, which the log "
    "names. Needs torch-ps[page].",
)


class WorkersType(click.ParamType[Any, Any]):
    """A number, or MIN:MAX; the value is a WorkerRange."""

    name = "N|MIN:MAX"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> WorkerRange:
        """As in click."""
        try:
            return WorkerRange.of(value)
        except ConfigError as error:
            self.fail(f"{error.actual}: expected {error.expected}", param, ctx)


WORKERS = WorkersType()


exit_option = click.option(
    "--exit-when-finished/--stay",
    "exit_when_finished",
    default=False,
    show_default="stay, except under TF_CONFIG",
    help="Exit with code 0 when the job is finished: every worker has left, and the last checkpoint is written.",
)


OWN_DESCRIPTORS = 64
"""Open files of a process beside those of its connections and children: what a server that idles has, doubled."""


def check_descriptors(needed: int, who: str) -> None:
    """Raise this process's limit of open files to ``needed``. Raises ConfigError if the hard limit is lower."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise ConfigError(
            f"{who} may not open as many files as it needs",
            expected=f"{needed} or more",
            actual=f"a limit of {hard}",
            remedy=f"raise the limit (ulimit -n {needed}, LimitNOFILE of systemd)",
        )
    if soft != resource.RLIM_INFINITY and soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def check_ready_file(path: Path | None) -> None:
    """Raises ConfigError unless ``path`` is None or can be written."""
    if path is None or path.is_fifo():
        return
    try:
        with tempfile.TemporaryFile(dir=path.parent):
            pass
        reason = "it is a folder" if path.is_dir() else "it is a device" if path.exists() and not path.is_file() else ""
    except OSError as error:
        reason = error.strerror or str(error)
    if reason:
        raise ConfigError(
            f"the ready file {path} cannot be written: {reason}",
            remedy="give a path in a folder that this user may write",
        )


def run_program(command: click.Command) -> NoReturn:
    """Run ``command`` as this process, and exit with its exit code as soon as it returns.

    By then everything is closed and written. The shutdown of the interpreter would only free memory, module by module,
    which takes half a second of CPU where torch is loaded. Called by entry points; an exception other than SystemExit
    ends the process in the usual way.
    """
    code = 0
    try:
        command()
    except SystemExit as end:
        if not isinstance(end.code, int | None):
            raise
        code = end.code or 0
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # the reader has gone
            stream.flush()
    os._exit(code)


@contextmanager
def clean_errors() -> Iterator[None]:
    """Show a PsError as one line without traceback; exit code 2 for ConfigError, 1 for the others.

    Where the log is JSON, it is a record of the log.
    """
    try:
        yield
    except PsError as error:
        fail(error, 2 if isinstance(error, ConfigError) else 1)
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE):
            raise
        fail(Unavailable("too many files are open here", actual=str(error), remedy="raise the limit: ulimit -n"), 1)


def fail(error: PsError, code: int) -> NoReturn:
    """Show ``error`` as ``clean_errors`` does, and end with exit code ``code``."""
    if logs_json():
        logger.failure(error)
    else:
        click.ClickException(printable(str(error), keep="\n")).show()
    raise SystemExit(code) from error
