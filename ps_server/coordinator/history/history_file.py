"""The history of a job in a file beside the journal, so that curves and events outlive the coordinator's process."""

from __future__ import annotations

import base64
import hashlib
import json
import math
from array import array
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

from ps_protocol.cluster.history import CheckpointFacts, Curve, Curves
from ps_protocol.cluster.view import JobEvent
from ps_protocol.errors import DamagedData
from ps_protocol.files import replace_file
from ps_server.coordinator.event_log import EVENTS, TEXT_CHARACTERS
from ps_server.coordinator.history.curve_book import NAMES, POINTS

FILE = "history.json"

_VERSION = 1
_LONGEST = 8 << 20
_CHECKPOINTS = 1000
_DOUBLE_BYTES = 8

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class SavedHistory:
    """The saved history of a job."""

    began_seconds: float
    curves: Curves = field(default_factory=Curves)
    events: tuple[JobEvent, ...] = ()
    checkpoints: tuple[CheckpointFacts, ...] = ()


def encode(saved: SavedHistory) -> bytes:
    """One JSON object, preceded by a line with its digest."""
    curves = saved.curves
    said = {
        "version": _VERSION,
        "began": saved.began_seconds,
        "point_seconds": curves.point_seconds,
        "generation": curves.generation,
        "times": _packed(curves.times),
        "curves": [
            [each.name, each.reported, *map(_packed, (each.mean, each.low, each.high))] for each in curves.curves
        ],
        "events": [asdict(each) for each in saved.events],
        "checkpoints": [asdict(each) for each in saved.checkpoints],
    }
    text = json.dumps(said).encode()
    return hashlib.sha256(text).hexdigest().encode() + b"\n" + text


def decode(data: bytes, where: str) -> SavedHistory:
    """Raises DamagedData, naming ``where``, for bytes that ``encode`` did not make."""
    digest, _, text = data.partition(b"\n")
    if hashlib.sha256(text).hexdigest().encode() != digest:
        raise DamagedData(f"{where} is not what was written", remedy="curves and events begin again; nothing to do")
    try:
        said = json.loads(text)
        if said["version"] != _VERSION:
            raise ValueError(f"version {said['version']}")
        return SavedHistory(
            _finite(said["began"]),
            _curves(said),
            tuple(_each(said["events"], _event, EVENTS)),
            tuple(_each(said["checkpoints"], _checkpoint, _CHECKPOINTS)),
        )
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise DamagedData(
            f"{where} is of another version of torch-ps: {error}", remedy="curves and events begin again; nothing to do"
        ) from error


class HistoryFile:
    """The file of a job's history, in the coordinator's data directory, which one process uses at a time."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / FILE

    def read(self) -> SavedHistory | None:
        """Read the history; None if there is no file. Raises DamagedData, OSError."""
        if not self.path.exists():
            return None
        if self.path.stat().st_size > _LONGEST:
            raise DamagedData(f"{self.path} is too large", expected=f"at most {_LONGEST} bytes")
        return decode(self.path.read_bytes(), str(self.path))

    def write(self, saved: SavedHistory) -> None:
        """Replace the file whole. Raises OSError. From any thread, one at a time."""
        replace_file(self.path, encode(saved))


def _packed(values: Any) -> str:
    return base64.b64encode(array("d", values).tobytes()).decode()


def _unpacked(text: str, most: int) -> array[float]:
    data = base64.b64decode(text, validate=True)
    if len(data) % _DOUBLE_BYTES or len(data) > most * _DOUBLE_BYTES:
        raise ValueError("a curve of a wrong length")
    return array("d", data)


def _curves(said: Mapping[str, Any]) -> Curves:
    times = _unpacked(said["times"], POINTS)
    if not all(map(math.isfinite, times)) or any(after < before for before, after in pairwise(times)):
        raise ValueError("times that do not rise")
    point_seconds = _finite(said["point_seconds"])
    if point_seconds <= 0:
        raise ValueError("points of no time")

    def curve(entry: Any) -> Curve:
        name, reported, *lanes = entry
        mean, low, high = (_unpacked(lane, POINTS) for lane in lanes)
        if not {len(mean), len(low), len(high)} == {len(times)}:
            raise ValueError("curves of different lengths")
        return Curve(_text(name), bool(reported), mean, low, high)

    return Curves(times, tuple(_each(said["curves"], curve, NAMES)), point_seconds, int(said["generation"]))


def _event(said: Any) -> JobEvent:
    return JobEvent(int(said["number"]), _finite(said["at_seconds"]), _text(said["text"]), bool(said["warning"]))


def _checkpoint(said: Any) -> CheckpointFacts:
    return CheckpointFacts(
        str(said["folder"]),
        int(said["size_bytes"]),
        _finite(said["seconds"]),
        _finite(said["at_seconds"]),
        int(said.get("step", 0)),
        _text(said.get("kept", "")),
    )


def _each(entries: Any, read: Callable[[Any], T], most: int) -> list[T]:
    if not isinstance(entries, list) or len(entries) > most:
        raise ValueError("a list that is too long")
    return [read(entry) for entry in entries]


def _finite(value: Any) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise ValueError("a number that is not finite")
    return number


def _text(value: Any) -> str:
    if not isinstance(value, str) or len(value) > TEXT_CHARACTERS:
        raise ValueError("a text that is too long")
    return value
