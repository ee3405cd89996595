"""Chrome's Trace Event format, which Perfetto and chrome://tracing open: one event, one line.

Format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import lru_cache

from ps_protocol.text import printable
from ps_protocol.tracing.trace_file import Record
from ps_protocol.tracing.tracer import Attributes, Part

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
