"""Rows: what one push notes for a trace, as plain numbers, and the parts of a span that are made of them afterwards.

A step writes a row; what draws the picture, or hands spans to OpenTelemetry, makes parts of it. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

from ps_protocol.tracing.tracer import Part, Row

SENT, SERVED = "sent", "served"
"""Kinds of rows: a push as its worker sees it, and as the shard does. The first entry of a row."""


def parts_of(row: Row, key: str, cause: str) -> Iterator[Part]:
    """The parts that ``row`` stands for; ``key`` is the number of its span, ``cause`` that of the span that caused it.

    Raises LookupError, TypeError, ValueError for what is none of a trace.
    """
    return _KINDS[row[0]](row, key, cause)


def _sent(row: Row, key: str, _: str) -> Iterator[Part]:
    _, shard, begun, encoded, sent, nbytes, heard = row
    message, begin = f"{key}.{int(shard)}", encoded or begun
    if encoded:
        yield "encode", int(begun), int(begin), {"shard": shard}, "", ""
    if sent:
        yield "send", int(begin), int(sent), {"shard": shard, "bytes": int(nbytes)}, message, ""
    for waiting, arrives, placed, reason, came, is_step in heard:
        arrived = int(arrives or placed)
        yield "wait", int(waiting), arrived, {"shard": shard, **({"reason": str(reason)} if reason else {})}, "", ""
        if came >= 0:
            said = {"shard": shard, "bytes": int(came)}
            yield "receive", arrived, int(placed), said, "", f"{message}.answer" if is_step else ""


def _served(row: Row, _: str, cause: str) -> Iterator[Part]:
    _, shard, *times, reason = row
    begun, received, logs, logged, applies, applied, follows, followed, waiting, may_go, sending, ended = map(
        int, times
    )
    message = f"{cause}.{int(shard)}"
    yield "receive", begun, received, None, "", message
    if logs:
        yield "log", logs, logged, None, "", ""
    if applies:
        yield "apply", applies, applied, None, "", ""
    if reason:
        yield "wait", *cut((waiting, may_go), (applies, applied)), {"reason": str(reason)}, "", ""
    if follows:
        yield "standby", follows, followed, None, "", ""
    if sending:
        yield "send", sending, ended, None, f"{message}.answer", ""


_KINDS: Mapping[Any, Callable[[Row, str, str], Iterator[Part]]] = MappingProxyType({SENT: _sent, SERVED: _served})


def cut(wait: tuple[int, int], apply: tuple[int, int]) -> tuple[int, int]:
    """``wait`` without what it shares with ``apply``, unless one of the two is inside the other: parts of a span nest.

    The update is made beside the event loop: in sync it begins when the last push of a step ends the wait of all, and
    in ssp a worker waits for others while its own push is applied.
    """
    if wait[0] < apply[0] < wait[1] < apply[1]:
        return wait[0], apply[0]
    if apply[0] < wait[0] < apply[1] < wait[1]:
        return apply[1], wait[1]
    return wait
