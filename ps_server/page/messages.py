"""The messages to browsers: parts of a job as JSON. A part is sent when it changes, a curve from its first change."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from ps_protocol.cluster.history import Curves, JobHistory
from ps_server.glance.job import JobGlance, glance_of

_DIGITS = 6
_LARGE = 1e6
"""A float below _LARGE has _DIGITS significant digits; a larger one, such as a time, has three decimals."""


def plain(value: object) -> Any:
    """``value`` in JSON's types. Numbers that are not finite, which JSON lacks, are None."""
    if isinstance(value, float):
        if not math.isfinite(value):
            return None
        return float(f"{value:.{_DIGITS}g}") if abs(value) < _LARGE else round(value, 3)
    if is_dataclass(value):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return value


def rows(entries: Sequence[Any]) -> dict[str, Any]:
    """``entries``, dataclasses of one kind, as the names of their fields and a list of values for each."""
    names = [field.name for field in fields(entries[0])] if entries else []
    return {"fields": names, "rows": [[plain(getattr(entry, name)) for name in names] for entry in entries]}


_HEAD = (
    *("job", "headline", "mode", "state", "models", "moving"),
    *("steps_per_second", "samples_per_second", "bytes_per_second"),
    *("live_workers", "expected_workers", "live_shards", "expected_shards", "straggler", "reported", "alerts"),
)


def parts_of(glance: JobGlance) -> dict[str, Any]:
    """The parts of the page by name, without curves and events."""
    return {
        "head": {name: plain(getattr(glance, name)) for name in _HEAD},
        "workers": rows(glance.workers),
        "shards": rows(glance.shards),
        "tables": rows(glance.tables),
        "checkpoints": rows(glance.checkpoints),
        "placement": rows(glance.placement),
        "publications": rows(glance.publications),
        "readers": rows(glance.readers),
        "configuration": plain(glance.configuration),
    }


def whole(history: JobHistory) -> dict[str, Any]:
    """The whole state, for a static page."""
    glance = glance_of(history)
    return {
        **parts_of(glance),
        "clock": clock_of(history),
        "curves": curves_from(history.curves, 0),
        "events": plain(glance.events),
    }


def clock_of(history: JobHistory) -> dict[str, float]:
    """The time of ``history``, and that at which the coordinator started; seconds since 1970."""
    return {"at": history.at_seconds, "began": history.began_seconds}


def curves_from(curves: Curves, first: int) -> dict[str, Any]:
    """All curves from point ``first`` on."""
    return {
        "first": first,
        "times": [round(time, 2) for time in curves.times[first:]],
        "point_seconds": curves.point_seconds,
        "curves": [
            {
                "name": each.name,
                "reported": each.reported,
                "mean": _numbers(each.mean[first:]),
                "low": _numbers(each.low[first:]),
                "high": _numbers(each.high[first:]),
            }
            for each in curves.curves
        ],
    }


def _numbers(values: Iterable[float]) -> list[float | None]:
    return [plain(value) for value in values]


@dataclass(frozen=True, slots=True)
class PageState:
    """The state of the job at one moment, made once for all viewers."""

    history: JobHistory
    glance: JobGlance
    #: The JSON of each part by name.
    parts: Mapping[str, str]

    @classmethod
    def of(cls, history: JobHistory) -> PageState:
        """All parts of the page that shows ``history``."""
        glance = glance_of(history)
        return cls(history, glance, {name: to_json(part) for name, part in parts_of(glance).items()})


class Viewer:
    """What one browser has received. Used by one task."""

    def __init__(self) -> None:
        self._parts: dict[str, str] = {}
        self._event = 0
        self._points = 0
        self._curves: tuple[float, int, tuple[tuple[str, bool], ...]] | None = None

    def message(self, state: PageState) -> str:
        """JSON of the changes since the last message: parts, events, points of curves."""
        changed = {name: text for name, text in state.parts.items() if self._parts.get(name) != text}
        self._parts.update(changed)
        changed["clock"] = to_json(clock_of(state.history))
        if events := [event for event in state.glance.events if event.number > self._event]:
            changed["events"] = to_json(plain(events))
            self._event = events[-1].number
        if (points := self._new_points(state.history.curves)) is not None:
            changed["curves"] = to_json(points)
        return "{" + ",".join(f"{to_json(name)}:{text}" for name, text in changed.items()) + "}"

    def _new_points(self, curves: Curves) -> dict[str, Any] | None:
        if not len(curves.times):
            return None
        known = (
            curves.point_seconds,
            curves.generation,
            tuple((each.name, each.reported) for each in curves.curves),
        )
        # The last point sent may have grown since.
        first = max(0, self._points - 1) if known == self._curves else 0
        self._curves, self._points = known, len(curves.times)
        return curves_from(curves, first)


def to_json(value: Any) -> str:
    """Compact JSON that may stand inside a script element of HTML, too."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False, ensure_ascii=True)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
