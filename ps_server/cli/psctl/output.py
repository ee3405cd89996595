"""The output of psctl: results on stdout, as text or one JSON object, and notes on stderr, which are not part of it."""

from __future__ import annotations

import enum
import json
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import click

from ps_protocol.logs import EventLogger, LogEvent, LogFormat, configure_logging, describe_process, logs_json
from ps_protocol.text import printable

logger = EventLogger(__name__)

_JSON = "torch-ps.json"


def output_option(what: str = "one JSON object") -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add -o text|json: ``as_json`` (bool). --json is another name of -o json."""

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        chosen = click.option(
            "-o",
            "--output",
            "as_json",
            type=click.Choice(["text", "json"]),
            default="text",
            show_default=True,
            callback=_is_json,
            help=f"Form of the output; json: {what}.",
        )
        short = click.option(
            "--json", is_flag=True, is_eager=True, expose_value=False, callback=_note_json, help="Same as -o json."
        )
        return chosen(short(command))

    return decorate


def _note_json(context: click.Context, _: click.Parameter, given: bool) -> None:
    context.meta[_JSON] = given


def _is_json(context: click.Context, _: click.Parameter, form: str) -> bool:
    return form == "json" or context.meta[_JSON]


def to_json(value: object) -> object:
    """Convert dataclasses, enums, paths, bytes and mappings to JSON's types; NaN and infinity become null."""
    if is_dataclass(value):
        values = {field.name: getattr(value, field.name) for field in fields(value)}
        # Fields of bytes are opaque to everyone but the coordinator.
        return {name: to_json(each) for name, each in values.items() if not isinstance(each, bytes)}
    if isinstance(value, enum.Enum):
        return to_json(value.value)
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(item) for item in value]
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, frozenset):
        return sorted(value)
    return str(value) if isinstance(value, Path) else value


def print_result(facts: Mapping[str, object], text: str, as_json: bool) -> None:
    """Print ``facts`` as JSON, or ``text``."""
    echo(json.dumps(to_json(facts)) if as_json else text)


def echo(text: str, *, err: bool = False) -> None:
    """Print ``text``; ``err``: on stderr. Every output of psctl but tables passes here, which escapes the control
    characters in names from outside, such as those of models and files.
    """
    click.echo(printable(text, keep="\n"), err=err)


def log_as(level: str | None, form: LogFormat, job: str | None) -> None:
    """Configure the log of this command: ``level`` None logs warnings and errors."""
    if level is None and form is LogFormat.TEXT:
        return  # warnings are printed without time and name
    configure_logging(level or "warning", form)
    # The notes of a command belong to its output, at any level.
    logging.getLogger(__name__).setLevel(logging.INFO)
    describe_process(role="psctl", job=job)


def note(text: str, level: int = logging.INFO, event: LogEvent = "psctl.note") -> None:
    """Print ``text`` on stderr, or log it with ``level`` as ``event`` where the log is JSON."""
    if logs_json():
        logger.log(level, event, "%s", text)
    else:
        echo(text, err=True)
