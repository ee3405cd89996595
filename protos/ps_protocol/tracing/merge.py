"""Makes one trace file of those of a job, with the times of all processes on one axis.

Processes of one host read one monotonic clock. The clocks of several hosts are aligned by the messages between them:
none arrives before it was sent, in either direction, so the shortest round trip bounds the difference from both sides.
"""

from __future__ import annotations

import json
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from io import TextIOWrapper
from itertools import chain
from pathlib import Path
from typing import Any

from ps_protocol.errors import DamagedData, InvalidRequest
from ps_protocol.files import replacing
from ps_protocol.text import printable
from ps_protocol.tracing.clock import ClockReading
from ps_protocol.tracing.rows import parts_of
from ps_protocol.tracing.trace_file import EARLIER, SUFFIX, Record
from ps_protocol.tracing.tracer import Attributes, Part

MERGED = "trace.json"
"""Name of the file that ``merge`` makes in a folder."""

MESSAGES = 10_000
"""As many messages of each file are looked at to align clocks."""


@dataclass(frozen=True, slots=True)
class Alignment:
    """What is added to the times of one clock."""

    offset_ns: int
    #: Half of the interval in which the offset is; 0: the clock of the axis itself; None: taken from the wall clock.
    uncertainty_ns: int | None

    def __str__(self) -> str:
        if self.uncertainty_ns is None:
            return "aligned by the wall clock"
        if not self.uncertainty_ns:
            return "the clock of the axis"
        return f"aligned by round trips, within {self.uncertainty_ns / 1e6:.3f} ms"


@dataclass(frozen=True, slots=True)
class TraceFile:
    """The file of one process: its clock, and the messages it sent and received, in nanoseconds by name."""

    path: Path
    process: str
    clock: ClockReading
    sent: Mapping[str, int]
    received: Mapping[str, int]


def files_in(folder: Path) -> list[Path]:
    """The trace files of single processes in ``folder``."""
    return sorted(folder.glob(f"*{SUFFIX}"))


def merge(paths: Sequence[Path], target: Path) -> list[str]:
    """Write the events of ``paths`` to ``target``; returns a line about each clock. Raises DamagedData, OSError.

    InvalidRequest: there is no file.
    """
    if not paths:
        raise InvalidRequest(
            "there are no trace files", remedy="run programs with PS_TRACE set to this folder, and end them"
        )
    files = [_open(path) for path in paths]
    alignments = align(files)
    with replacing(target, durable=False) as file, TextIOWrapper(file, "ascii") as out:
        out.write('{"displayTimeUnit":"ms","traceEvents":[\n')
        separator = ""
        for number, each in enumerate(files, 1):
            events = ProcessEvents(each.process, number, alignments[each.clock.name].offset_ns)
            for line in chain(events.head(), *map(events.of, _records(each.path))):
                out.write(separator + line)
                separator = ",\n"
        out.write("\n]}\n")
    return [f"{_processes(files, name)}: {alignment}" for name, alignment in alignments.items()]


def align(files: Sequence[TraceFile]) -> dict[str, Alignment]:
    """What to add to the times of each clock. The axis is the clock of most processes."""
    readings = {file.clock.name: file.clock for file in files}
    axis = Counter(file.clock.name for file in files).most_common(1)[0][0]
    found = {axis: Alignment(0, 0)}
    bounds = _bounds(files) if len(readings) > 1 else {}
    waiting = deque([axis])
    while waiting:
        known = waiting.popleft()
        for name in readings.keys() - found.keys():
            there, back = bounds.get((name, known)), bounds.get((known, name))
            if there is not None and back is not None:
                offset = found[known].offset_ns + (there - back) // 2
                found[name] = Alignment(offset, (found[known].uncertainty_ns or 0) + max(1, (there + back) // 2))
                waiting.append(name)
    for name, reading in readings.items():
        if name not in found:
            found[name] = Alignment(reading.wall_offset_ns - readings[axis].wall_offset_ns, None)
    return found


def _bounds(files: Sequence[TraceFile]) -> dict[tuple[str, str], int]:
    """By two clocks, the most by which the first's offset may exceed the second's."""
    bounds: dict[tuple[str, str], int] = {}
    for one in files:
        for other in files:
            pair = one.clock.name, other.clock.name
            if pair[0] == pair[1]:
                continue
            both = one.sent.keys() & other.received.keys()
            least = min((other.received[name] - one.sent[name] for name in both), default=None)
            if least is not None:
                bounds[pair] = min(least, bounds.get(pair, least))
    return bounds


def _open(path: Path) -> TraceFile:
    """Raises DamagedData for a file that is no trace file."""
    with path.open("rb") as lines:
        head = _parsed(lines.readline(), path, 1)
    try:
        process, said = str(head["process"]), head["clock"]
        clock = ClockReading(str(said["name"]), int(said["monotonic_ns"]), int(said["wall_ns"]))
    except (TypeError, ValueError, LookupError):
        raise DamagedData(f"{path} is no trace file of torch-ps", remedy="move it out of the folder") from None
    sent: dict[str, int] = {}
    received: dict[str, int] = {}
    for record in _records(path):
        for _, begin, _, _, sends, receives in record[8]:
            if sends:
                sent[sends] = begin
            if receives:
                received[receives] = begin
        if len(sent) + len(received) > MESSAGES:
            break
    return TraceFile(path, process, clock, sent, received)


def _records(path: Path) -> Iterator[Record]:
    """The spans of a file, after those of its earlier half. Raises DamagedData."""
    if (earlier := path.with_suffix(EARLIER)).exists():
        yield from _records_of(earlier)
    yield from _records_of(path)


def _records_of(path: Path) -> Iterator[Record]:
    """The spans of one file; a last line that its process did not write whole is left out. Raises DamagedData."""
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if number == 1 or not line.endswith(b"\n"):
                continue
            batch: Any = _parsed(line, path, number)
            try:
                for name, track, begin, end, said, trace, span, cause, parts, rows in batch:
                    whole: list[Part] = [
                        (str(n), int(b), int(e), dict(a or {}), str(s), str(r)) for n, b, e, a, s, r in parts
                    ]
                    for row in rows:
                        whole.extend(parts_of(row, str(span), str(cause)))
                    identity = str(trace), str(span), str(cause)
                    yield str(name), str(track), int(begin), int(end), dict(said), *identity, whole, []
            except (LookupError, TypeError, ValueError):
                raise _damaged(path, number, line) from None


def _parsed(line: bytes, path: Path, number: int) -> Any:
    try:
        return json.loads(line)
    except ValueError:
        raise _damaged(path, number, line) from None


def _damaged(path: Path, number: int, line: bytes) -> DamagedData:
    return DamagedData(
        f"line {number} of {path} is none of a trace file",
        actual=printable(line[:80].decode("ascii", "replace")),
        remedy="move the file out of the folder",
    )


def _processes(files: Sequence[TraceFile], clock: str) -> str:
    return ", ".join(file.process for file in files if file.clock.name == clock)


CATEGORY = "step"


class ProcessEvents:
    """Turns the spans of one process into events. ``pid`` is its number in the picture, ``offset_ns`` its clock's."""

    def __init__(self, process: str, pid: int, offset_ns: int) -> None:
        self._pid = pid
        self._offset_ns = offset_ns
        self._process = process
        #: By track, its lines: thread numbers and where the last span of each ends.
        self._lanes: dict[str, list[tuple[int, int]]] = {}
        self._threads = 0

    def head(self) -> Iterator[str]:
        """What names the process."""
        yield _metadata("process_name", self._pid, 0, {"name": self._process})

    def of(self, record: Record) -> Iterator[str]:
        """The events of one span and its parts."""
        name, track, begin, end, said, trace, span, cause, parts, _ = record
        tid, is_new, place = self._lane(track, begin, end)
        if is_new:
            named = f"{track} ({place})" if place > 1 else track
            yield _metadata("thread_name", self._pid, tid, {"name": named})
        identity = {"trace_id": trace, "span_id": span, "parent_id": cause}
        yield self._complete((name, begin, end, {**said, **identity}, "", ""), tid)
        for part in parts:
            yield self._complete(part, tid)
            if part[4]:
                yield self._flow("s", part[4], tid, part[1])
            if part[5]:
                yield self._flow("f", part[5], tid, part[1])

    def _lane(self, track: str, begin_ns: int, end_ns: int) -> tuple[int, bool, int]:
        """The thread number for a span, whether it is new, and its place among those of the track.

        Spans of one thread number do not overlap, as the format demands.
        """
        lanes = self._lanes.setdefault(track, [])
        for place, (tid, last_end) in enumerate(lanes):
            if last_end <= begin_ns:
                lanes[place] = tid, end_ns
                return tid, False, place + 1
        self._threads += 1
        lanes.append((self._threads, end_ns))
        return self._threads, True, len(lanes)

    def _complete(self, part: Part, tid: int) -> str:
        """A complete event. The unit of the format is the microsecond."""
        name, begin, end, args, _, _ = part
        return (
            f'{{"ph":"X","cat":"{CATEGORY}","name":{_quoted(name)},"pid":{self._pid},"tid":{tid},'
            f'"ts":{self._micros(begin)},"dur":{max(0, end - begin) / 1000:.3f},"args":{_args_of(args or {})}}}'
        )

    def _flow(self, phase: str, message: str, tid: int, at_ns: int) -> str:
        """One end of an arrow, bound to the part that begins there: "s" where a message leaves, "f" where it comes."""
        bound = ',"bp":"e"' if phase == "f" else ""
        return (
            f'{{"ph":"{phase}"{bound},"cat":"{CATEGORY}","name":"message","id":{_quoted(message)},'
            f'"pid":{self._pid},"tid":{tid},"ts":{self._micros(at_ns)}}}'
        )

    def _micros(self, at_ns: int) -> str:
        return f"{(at_ns + self._offset_ns) / 1000:.3f}"


def _metadata(event: str, pid: int, tid: int, args: Attributes) -> str:
    return f'{{"ph":"M","name":"{event}","pid":{pid},"tid":{tid},"ts":0,"args":{_args_of(args)}}}'


@lru_cache(1024)
def _quoted(text: str) -> str:
    """``text`` as JSON, in ASCII, without characters that are not printed as themselves."""
    return json.dumps(printable(text))


def _args_of(values: Mapping[str, str | int]) -> str:
    each = [f"{_quoted(name)}:{value if type(value) is int else _quoted(str(value))}" for name, value in values.items()]
    return "{" + ",".join(each) + "}"
