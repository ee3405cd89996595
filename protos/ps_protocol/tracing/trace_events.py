"""Chrome's Trace Event format, which Perfetto and chrome://tracing open: one event, one line.

Format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

import json
from functools import lru_cache

from ps_protocol.text import printable
from ps_protocol.tracing.context import TraceContext
from ps_protocol.tracing.tracer import Attributes

CATEGORY = "step"

CLOCK = "torch_ps_clock"
"""Name of the metadata event that says which clock a file's times are of."""


@lru_cache(1024)
def _quoted(text: str) -> str:
    """``text`` as JSON, in ASCII, without characters that are not printed as themselves."""
    return json.dumps(printable(text))


def _args_of(values: Attributes | None, context: str = "") -> str:
    each = [context] if context else []
    for name, value in values.items() if values else ():
        each.append(f"{_quoted(name)}:{value if type(value) is int else _quoted(str(value))}")
    return "{" + ",".join(each) + "}"


def complete(
    name: str, pid: int, tid: int, begin_ns: int, end_ns: int, args: Attributes | None, context: str = ""
) -> str:
    """A complete event. The unit of the format is the microsecond. ``context`` comes from ``context_of``."""
    return (
        f'{{"ph":"X","cat":"{CATEGORY}","name":{_quoted(name)},"pid":{pid},"tid":{tid},'
        f'"ts":{begin_ns / 1000:.3f},"dur":{max(0, end_ns - begin_ns) / 1000:.3f},"args":{_args_of(args, context)}}},\n'
    )


def context_of(context: TraceContext, parent: str) -> str:
    """The numbers of a span, for its event. ``parent`` is the key of the span that caused it; empty: none did."""
    return f'"trace_id":"{context.trace_id:032x}","span_id":"{context.key}","parent_id":"{parent}"'


def flow(phase: str, message: str, pid: int, tid: int, at_ns: int) -> str:
    """One end of an arrow, bound to the part that begins there: "s" where a message leaves, "f" where it arrives.

    ``message`` names it: ASCII letters, digits, dots.
    """
    bound = ',"bp":"e"' if phase == "f" else ""
    return (
        f'{{"ph":"{phase}"{bound},"cat":"{CATEGORY}","name":"message","id":"{message}",'
        f'"pid":{pid},"tid":{tid},"ts":{at_ns / 1000:.3f}}},\n'
    )


def metadata(event: str, pid: int, tid: int, args: Attributes) -> str:
    """What is known of a process or a thread."""
    return f'{{"ph":"M","name":"{event}","pid":{pid},"tid":{tid},"ts":0,"args":{_args_of(args)}}},\n'
