"""JSON files with a format number and a checksum, which are read as they were written or refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import xxhash
from google.protobuf.message import DecodeError

from ps_protocol.errors import DamagedData, InvalidRequest

T = TypeVar("T")

_BEFORE, _BEHIND = b'{"checksum": "', b'", '
_DIGITS = 16

SEAL_BYTES = len(_BEFORE) + _DIGITS + len(_BEHIND)
"""How much of a sealed text is before the members of its object."""


def seal(format_number: int, body: Mapping[str, Any]) -> bytes:
    """The text of ``body``, in format ``format_number``, with the checksum of its bytes.

    ``body`` has no member "checksum" or "format".
    """
    return sealed(json.dumps({"format": format_number, **body}, allow_nan=False).encode())


def sealed(text: bytes) -> bytes:
    """The text of a JSON object with the checksum of its bytes (xxh3_64) as its first member."""
    return _BEFORE + xxhash.xxh3_64_hexdigest(text).encode() + _BEHIND + text[1:]


def checksum_in(data: bytes) -> str:
    """The checksum at the beginning of a sealed text."""
    return data[len(_BEFORE) :][:_DIGITS].decode(errors="replace")


def unseal(
    data: bytes, format_number: int, path: Path, build: Callable[[dict[str, Any]], T], remedy: str, earlier: int = 0
) -> T:
    """What ``build`` makes of the members that ``seal`` wrote to ``path``. ``remedy``: where the file is damaged.
    ``earlier``: another format that ``build`` reads.

    Raises DamagedData for anything else than ``seal`` wrote, for another format, and for what ``build`` cannot read.
    """
    try:
        body = _object(data)
        found = body.pop("format")
        if found in (format_number, earlier or format_number):
            return build(body)
    except (
        ArithmeticError,
        AttributeError,
        DecodeError,
        InvalidRequest,
        LookupError,
        RecursionError,
        TypeError,
        ValueError,
    ) as error:
        reason = str(error) if type(error) is ValueError else repr(error)
        raise DamagedData(
            f"{path} is damaged: {reason}",
            expected=f"what torch-ps writes there, in format {format_number}",
            remedy=remedy,
        ) from error
    program = body.get("program")
    raise DamagedData(
        f"{path} has a format that this version of torch-ps does not read",
        expected=f"format {format_number}",
        actual=f"format {found}" + (f", written by torch-ps {program}" if program else ""),
        remedy="use the version that wrote it; nothing was changed",
    )


def load(path: Path, format_number: int, build: Callable[[dict[str, Any]], T], remedy: str, *, earlier: int = 0) -> T:
    """What ``build`` makes of the file ``path``. Raises DamagedData as ``unseal``, and where it cannot be read."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise DamagedData(f"{path} cannot be read: {error.strerror}", remedy=remedy) from error
    return unseal(data, format_number, path, build, remedy, earlier)


def _object(data: bytes) -> dict[str, Any]:
    """Raises ValueError for a text that is not from ``sealed``."""
    text = b"{" + data[SEAL_BYTES:]
    if data != sealed(text):
        raise ValueError(f"its checksum is {xxhash.xxh3_64_hexdigest(text)}, and it begins with {data[:SEAL_BYTES]!r}")
    body = json.loads(text)
    if not isinstance(body, dict):
        raise ValueError(f"a JSON object was written, not {type(body).__name__}")
    return body
