"""The messages between ps-run and its program on a host, as dataclasses and as frames on the connection.

A frame is a length, fields as JSON, and bytes that belong to them.
"""

from __future__ import annotations

import json
import signal
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from ps_protocol.errors import InvalidRequest
from ps_protocol.records import fields_from, from_plain, to_plain
from ps_server.cli.launcher.events import ProcessName

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
            except (ValueError, RecursionError) as error:
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


@dataclass(frozen=True, slots=True)
class Hello:
    """Host: the first message."""

    kind: ClassVar = "hello"
    version: str


@dataclass(frozen=True, slots=True)
class Begin:
    """ps-run: the job. The host answers with Ready or Declined."""

    kind: ClassVar = "begin"
    #: Name of the host in this job.
    host: str
    working_folder: str
    #: The script's path; empty: a module.
    script: str
    data_dir: str
    #: Name of the lock in the data directory, which hosts may share.
    lock_name: str
    #: A side ends when the other one was silent for so long.
    silence_seconds: float
    #: Where servers of this host write checkpoints; empty: nowhere.
    checkpoint_dir: str = ""


@dataclass(frozen=True, slots=True)
class Ready:
    """Host: processes can be started."""

    kind: ClassVar = "ready"
    cores: int
    #: Addresses of ps-run's end and of this end of the connection of ssh; empty: not known.
    client_address: str
    server_address: str
    #: There is a journal of an earlier job in the data directory.
    used_before: bool = False
    #: The data directory, absolute and without links; empty: none.
    data_dir: str = ""


@dataclass(frozen=True, slots=True)
class Declined:
    """Host: why it does not take part; the parts of a ConfigError."""

    kind: ClassVar = "declined"
    message: str
    expected: str = ""
    actual: str = ""
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class Launch:
    """ps-run: start this process. Its variables are added to those of the host."""

    kind: ClassVar = "launch"
    process: ProcessName
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(repr=False)
    #: Contents of files of the job, by the variable that is to name the file: certificates, keys, tokens.
    files: Mapping[str, bytes] = field(default_factory=dict, repr=False)


@dataclass(frozen=True, slots=True)
class SendSignal:
    """ps-run: send this process a signal."""

    kind: ClassVar = "signal"
    process: ProcessName
    signal: signal.Signals


@dataclass(frozen=True, slots=True)
class Started:
    """Host: a process has begun, with this number there."""

    kind: ClassVar = "started"
    process: ProcessName
    pid: int


@dataclass(frozen=True, slots=True)
class Hangs:
    """Host: a process lives, and shows no life."""

    kind: ClassVar = "hangs"
    process: ProcessName
    why: str


@dataclass(frozen=True, slots=True)
class Printed:
    """Host: what a process wrote to its standard output or error."""

    kind: ClassVar = "printed"
    process: ProcessName
    data: bytes


@dataclass(frozen=True, slots=True)
class Serving:
    """Host: the coordinator serves at this host:port."""

    kind: ClassVar = "serving"
    address: str


@dataclass(frozen=True, slots=True)
class Ended:
    """Host: a process has ended; all that it printed came before."""

    kind: ClassVar = "ended"
    process: ProcessName
    #: Its exit code, or minus the signal that killed it.
    code: int
    peak_bytes: int


@dataclass(frozen=True, slots=True)
class Alive:
    """Both: this side is there."""

    kind: ClassVar = "alive"


Message = Hello | Begin | Ready | Declined | Launch | SendSignal | Started | Hangs | Printed | Serving | Ended | Alive

_KINDS: Mapping[str, type[Message]] = {
    each.kind: each
    for each in (Hello, Begin, Ready, Declined, Launch, SendSignal, Started, Hangs, Printed, Serving, Ended, Alive)
}


def pack(message: Message) -> bytes:
    """``message`` as one frame."""
    if isinstance(message, Printed):
        return encode({"kind": message.kind, "process": to_plain(message.process)}, message.data)
    return encode({"kind": message.kind, **to_plain(message)})


def unpack(fields: Mapping[str, Any], payload: bytes) -> Message:
    """The message of a frame. Raises InvalidRequest for one that is none."""
    try:
        values = dict(fields)
        kind = _KINDS[values.pop("kind")]
        if kind is Printed:
            return Printed(**fields_from(kind, values), data=payload)
        return from_plain(kind, values)
    except (LookupError, TypeError, ValueError) as error:
        raise InvalidRequest(
            "the other side of a host's connection sent a message that is not known",
            actual=f"{str(fields)[:80]} ({error})",
            remedy="use the same torch-ps on all hosts",
        ) from error
