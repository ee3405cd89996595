"""The output of a psctl command: text, or one JSON object."""

from __future__ import annotations

import enum
import json
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path

import click

json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")


def to_json(value: object) -> object:
    """Dataclasses, enums, paths, bytes and mappings as JSON's types."""
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
    if isinstance(value, frozenset):
        return sorted(value)
    return str(value) if isinstance(value, Path) else value


def tell(facts: Mapping[str, object], text: str, as_json: bool) -> None:
    """Print ``facts`` or ``text``."""
    click.echo(json.dumps(to_json(facts)) if as_json else text)
