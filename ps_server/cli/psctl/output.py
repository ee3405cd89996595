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

from ps_protocol.logs import EventLogger, LogFormat, configure_logging, describe_process, logs_json
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
    """Dataclasses, enums, paths, bytes and mappings as JSON's types; JSON has no NaN and no infinity: they are null."""
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


def tell(facts: Mapping[str, object], text: str, as_json: bool) -> None:
    """Print ``facts`` or ``text``."""
    say(json.dumps(to_json(facts)) if as_json else text)


def say(text: str, *, err: bool = False) -> None:
    """Print ``text``; ``err``: on stderr. All that psctl prints passes here, or is a cell of a table: names from
    outside, such as those of models and files, move no cursor.
    """
    click.echo(printable(text, keep="\n"), err=err)


def log_as(level: str | None, form: LogFormat, job: str | None) -> None:
    """Write the log of this command as told; records from warnings on, unless told."""
    if level is None and form is LogFormat.TEXT:
        return  # a warning is printed as it is, without time and name
    configure_logging(level or "warning", form)
    # What a command says belongs to its output, whatever the level.
    logging.getLogger(__name__).setLevel(logging.INFO)
    describe_process(role="psctl", job=job)


def note(text: str, level: int = logging.INFO) -> None:
    """Say ``text`` on stderr; ``level`` is that of the record where the log is JSON."""
    if logs_json():
        logger.log(level, "psctl.note", "%s", text)
    else:
        say(text, err=True)
