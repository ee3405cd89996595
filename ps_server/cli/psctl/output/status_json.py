"""The status of a job as JSON, and the schema of it: what scripts may rely on."""

from __future__ import annotations

import json
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any, Union, get_args, get_origin, get_type_hints

from ps_protocol.client.model_status import TableTotals
from ps_protocol.cluster.events import JobEvent
from ps_protocol.cluster.job_state import job_state
from ps_protocol.cluster.view import ClusterStatus, ClusterView, MemberStatus
from ps_server.cli.psctl.output.facts import to_json

SCHEMA = 1
"""Rises when a field goes away or changes its meaning. Fields are added within one number."""

_PARTS: Mapping[str, type] = {
    "view": ClusterView,
    "members[]": MemberStatus,
    "tables[]": TableTotals,
    "decisions[]": JobEvent,
}

_SIMPLE = {int: "number", float: "number", str: "string", bool: "boolean"}


def status_json(status: ClusterStatus, tables: Sequence[TableTotals]) -> str:
    """The status as one JSON object, as ``schema_fields`` describes it."""
    state = job_state(status)
    facts = {
        "schema": SCHEMA,
        "at_seconds": status.at_seconds,
        "job": status.job,
        "state": state.name,
        "stalled_by": state.text,
        "metrics_url": status.metrics_url,
        "certificate_ends": status.certificate_ends,
        "view": status.view,
        "members": status.members,
        "tables": tables,
        "decisions": status.decisions,
    }
    return json.dumps(to_json(facts))


def schema_fields() -> dict[str, str]:
    """The type of each field by its path: ``members[].stats.steps`` is a number, ``view.models.*`` too."""
    found = {"schema": "number", "at_seconds": "number", "certificate_ends": "number"}
    found |= dict.fromkeys(("job", "state", "stalled_by", "metrics_url"), "string")
    for path, part in _PARTS.items():
        found.update(_fields_of(part, path))
    return found


def _fields_of(kind: Any, path: str) -> Iterator[tuple[str, str]]:
    """The fields of a value of type ``kind`` at ``path``."""
    origin, arguments = get_origin(kind), get_args(kind)
    if is_dataclass(kind):
        hints = get_type_hints(kind)
        for field in fields(kind):
            if hints[field.name] is not bytes:
                yield from _fields_of(hints[field.name], f"{path}.{field.name}")
    elif origin in (types.UnionType, Union):
        for name, text in _fields_of(arguments[0], path):
            yield name, text if "null" in text else f"{text} or null"
    elif origin is not None and issubclass(origin, Mapping):
        yield from _fields_of(arguments[1], f"{path}.*")
    elif origin is not None:
        yield from _fields_of(arguments[0], f"{path}[]")
    elif isinstance(kind, type) and issubclass(kind, Enum):
        yield path, "string"
    else:
        yield path, _SIMPLE[kind]
