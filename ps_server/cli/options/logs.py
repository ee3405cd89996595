"""The options of a server's log: --log-level and --log-format."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from ps_protocol.logs import LEVELS, LogFormat

FORMAT_VARIABLE = "PS_LOG_FORMAT"
LEVEL_VARIABLE = "PS_LOG_LEVEL"

FORMATS = click.Choice([each.value for each in LogFormat], case_sensitive=False)


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
        type=FORMATS,
        default=LogFormat.TEXT.value,
        show_default=True,
        envvar=[f"{prefix}_LOG_FORMAT", FORMAT_VARIABLE],
        help=f"Form of log lines: text, or one JSON object per line.{note}",
    )
