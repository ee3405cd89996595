"""The output of a job as JSON: what processes log as it is, and what they print as records of the same form."""

from __future__ import annotations

import json
from typing import Any

from ps_protocol.logs import FACTS, LogEvent, json_line, time_text
from ps_server.cli.launcher.events import ProcessName, ProcessRole

OUTPUT_EVENT = "output"
"""Event of a line that is no record of a log."""


def record_of(process: ProcessName, line: str, now: float) -> str:
    """``line`` of ``process`` as one JSON object: a record of a log as it came, else a record with the line in it."""
    try:
        found = json.loads(line) if line.startswith("{") else None
    except ValueError:
        found = None
    if isinstance(found, dict) and {"time", "level", "message"} <= found.keys():
        return json_line(found)
    return json_line(_fields(process.part.value, OUTPUT_EVENT, line, now) | _number(process))


def own_record(event: LogEvent, message: str, now: float) -> str:
    """A message of ps-run itself."""
    return json_line(_fields("ps-run", event, message, now))


def _fields(role: str, event: str, message: str, now: float) -> dict[str, Any]:
    facts: dict[str, Any] = dict.fromkeys(FACTS)
    facts["role"] = role
    return {"time": time_text(now), "level": "info", **facts, "event": event, "message": message, "logger": "ps_run"}


def _number(process: ProcessName) -> dict[str, int]:
    if process.part is ProcessRole.SHARD:
        return {"shard": process.index}
    return {"worker": process.index} if process.part is not ProcessRole.COORDINATOR else {}
