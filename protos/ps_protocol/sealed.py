"""JSON in a file, with a checksum: its first member is the checksum of all the rest, and is checked first."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import xxhash

_BEFORE, _BEHIND = b'{"checksum": "', b'", '
_DIGITS = 16

#: What ``sealed`` puts before the members of the object, and where in that the checksum is.
SEAL_BYTES = len(_BEFORE) + _DIGITS + len(_BEHIND)
SEAL_AT = len(_BEFORE)


def seal(body: Mapping[str, Any]) -> bytes:
    """``body`` as it is written, with the checksum of its bytes; it has at least one member, and none "checksum"."""
    return sealed(json.dumps(body, allow_nan=False).encode())


def sealed(text: bytes) -> bytes:
    """The text of a JSON object with the checksum of its bytes (xxh3_64) as its first member."""
    return _BEFORE + xxhash.xxh3_64_hexdigest(text).encode() + _BEHIND + text[1:]


def unseal(data: bytes, first_sealed: int) -> dict[str, Any]:
    """The object that ``seal`` wrote. One whose "format" is below ``first_sealed`` had no checksum yet.

    Raises ValueError for anything else.
    """
    if data.startswith(_BEFORE):
        text = b"{" + data[SEAL_BYTES:]
        if data != sealed(text):
            found = data[SEAL_AT : SEAL_AT + _DIGITS].decode(errors="replace")
            raise ValueError(f"its checksum is {xxhash.xxh3_64_hexdigest(text)}, and it says {found!r}")
        return _object(text)
    body = _object(data)
    version = body.get("format", 0)
    if "checksum" in body or not isinstance(version, int) or version >= first_sealed:
        raise ValueError("its checksum is not where it was written")
    return body


def _object(text: bytes) -> dict[str, Any]:
    try:
        body = json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if not isinstance(body, dict):
        raise ValueError(f"a JSON object was written, not {type(body).__name__}")
    return body
