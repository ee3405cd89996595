"""The command psctl status: tables, lines or JSON. Scripts may rely on the schema of the JSON."""

from __future__ import annotations

import json
import logging
import sys
import time
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any, Union, get_args, get_origin, get_type_hints

import click
from rich.console import Console
from rich.live import Live

from ps_protocol.client.admin import AdminClient
from ps_protocol.client.model_status import TableTotals
from ps_protocol.cluster.job_state import ailments, diverging, expiring, has_expired, job_state, time_text
from ps_protocol.cluster.view import ClusterStatus, ClusterView, Divergence, JobEvent, MemberStatus
from ps_server.cli.psctl.connection import connected, coordinator_option
from ps_server.cli.psctl.output import echo, note, output_option, to_json
from ps_server.cli.psctl.wait import UNHEALTHY
from ps_server.glance.terminal import status_line, status_tables

SCHEMA = 1
"""Rises when a field goes away or changes its meaning. Fields are added within one number."""

_PARTS: Mapping[str, type] = {
    "view": ClusterView,
    "members[]": MemberStatus,
    "tables[]": TableTotals,
    "decisions[]": JobEvent,
    "divergences[]": Divergence,
}

_SIMPLE = {int: "number", float: "number", str: "string", bool: "boolean"}


@click.command()
@coordinator_option
@click.option("--watch", is_flag=True, help="Repeat until Ctrl-C or the end of the job.")
@output_option("one JSON object (docs/psctl.md); with --watch, one per line")
@click.option(
    "--check",
    is_flag=True,
    help=f"Exit with code {UNHEALTHY} if the job is stalled, members are missing, failed or lost, or certificates have "
    "expired.",
)
def status(coordinator: str, watch: bool, as_json: bool, check: bool) -> None:
    """Show members, their speed, models and mode, and the rows and bytes of tables."""
    console = Console(highlight=False, markup=False, emoji=False)
    with connected(coordinator) as job:
        pause = 2.0 if watch and not as_json and not console.is_terminal else 1.0
        polled = _polled(job, pause if watch else None)
        if as_json:
            for seen, tables in polled:
                echo(status_json(seen, tables))
        elif watch and console.is_terminal:
            with Live(console=console, auto_refresh=False) as live:
                for seen, tables in polled:
                    live.update(status_tables(seen, console.width, tables=tables), refresh=True)
        elif watch:
            for seen, tables in polled:
                echo(f"{time_text(time.time())} {status_line(seen, tables)}")
        else:
            for seen, tables in polled:
                console.print(status_tables(seen, console.width, tables=tables))
    if check and (soon := expiring(seen)) and not has_expired(seen):
        note(soon, logging.WARNING)
    if check and (text := diverging(seen)):
        note(text, logging.WARNING)
    if check and (found := ailments(seen)):
        note("not healthy: " + "; ".join(found), logging.WARNING)
        sys.exit(UNHEALTHY)


def _polled(job: AdminClient, pause_seconds: float | None) -> Iterator[tuple[ClusterStatus, tuple[TableTotals, ...]]]:
    """The status of the job now; with a pause, again after each until the job is finished."""
    while True:
        seen = job.status()
        yield seen, job.tables(seen)
        if pause_seconds is None or seen.view.finished:
            return
        time.sleep(pause_seconds)


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
        "stale_rules": status.stale_rules,
        "view": status.view,
        "members": status.members,
        "tables": tables,
        "decisions": status.decisions,
        "divergences": status.divergences,
    }
    return json.dumps(to_json(facts))


def schema_fields() -> dict[str, str]:
    """The type of each field by its path: ``members[].stats.steps`` is a number, ``view.models.*`` too."""
    found = {"schema": "number", "at_seconds": "number", "certificate_ends": "number"}
    found |= dict.fromkeys(("job", "state", "stalled_by", "metrics_url", "stale_rules.*"), "string")
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
