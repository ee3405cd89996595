"""Frames of a connection to a host: a length, fields as JSON, and bytes that belong to them. Pure."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from typing import Any

from ps_protocol.errors import InvalidRequest

BEGINNING = b"\n\x02torch-ps ps-run hosts 1\n"
"""What the host's side writes before its first frame; what a login shell printed comes before it."""

MAX_FRAME_BYTES = 8 << 20

_HEAD = struct.Struct(">II")


def encode(fields: Mapping[str, Any], payload: bytes = b"") -> bytes:
    """One frame."""
    text = json.dumps(fields).encode()
    return _HEAD.pack(len(text), len(payload)) + text + payload


class FrameReader:
    """Used by one thread. Bytes in, frames out."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, data: bytes) -> Iterator[tuple[dict[str, Any], bytes]]:
        """The frames that ``data`` completes. Raises InvalidRequest for what is no frame."""
        self._rest += data
        while len(self._rest) >= _HEAD.size:
            head, size = _HEAD.unpack_from(self._rest)
            if head + size > MAX_FRAME_BYTES:
                raise _no_frame(f"{head + size} bytes")
            end = _HEAD.size + head + size
            if len(self._rest) < end:
                return
            text, payload = bytes(self._rest[_HEAD.size : _HEAD.size + head]), bytes(self._rest[end - size : end])
            del self._rest[:end]
            try:
                fields = json.loads(text)
            except ValueError as error:
                raise _no_frame(f"{text[:80]!r}") from error
            if not isinstance(fields, dict):
                raise _no_frame(f"{text[:80]!r}")
            yield fields, payload


def _no_frame(actual: str) -> InvalidRequest:
    return InvalidRequest(
        "the other side of a host's connection sent what is no message",
        expected=f"a JSON object, at most {MAX_FRAME_BYTES} bytes",
        actual=actual,
        remedy="use the same torch-ps on all hosts",
    )
