"""Run by test_atheris.py in a process of its own: coverage-guided bytes into what reads a worker's bytes."""

from __future__ import annotations

import sys

import atheris

with atheris.instrument_imports(include=["ps_protocol", "ps_server"]):
    from google.protobuf.message import DecodeError

    from ps_protocol.cluster.requests import UnknownRequest
    from ps_protocol.errors import ConfigError, InvalidRequest
    from ps_protocol.v1 import common_pb2
    from ps_protocol.v1 import shard_pb2 as pb
    from ps_protocol.wire.chunks import STEP_REQUESTS
    from ps_protocol.wire.convert.step import request_from_bytes, request_to_bytes
    from ps_protocol.wire.formats import Wire, wire_from_pb
    from ps_protocol.wire.frames import Scatter, parse_chunk
    from ps_protocol.wire.socket_messages import LENGTH, MAX_MESSAGE_BYTES, checked_length


def read_chunk(data: bytes) -> None:
    parsed = parse_chunk(STEP_REQUESTS.field, data)
    if parsed is None:
        return
    chunk = pb.StepRequest.FromString(data).chunk
    if (parsed[0], bytes(parsed[1])) != (chunk.position, chunk.payload):
        raise AssertionError(f"read by hand {parsed[0]}, {bytes(parsed[1])!r}, by protobuf {chunk}")
    memory = bytearray(10)
    try:
        Scatter([memoryview(memory)[1:4], memoryview(memory)[4:9]]).write(*parsed)
    except InvalidRequest:
        if any(memory):
            raise AssertionError("a refused chunk was written") from None
    if memory[0] or memory[9]:
        raise AssertionError("bytes beyond the pieces")


def read_request(data: bytes) -> None:
    try:
        request = request_from_bytes(data)
    except InvalidRequest:
        return
    if request == UnknownRequest("None"):
        return
    written = request_to_bytes(request)
    if request_to_bytes(request_from_bytes(written)) != written:
        raise AssertionError(f"{request} is not read as it is written")


def read_length(data: bytes) -> None:
    header = data[: LENGTH.size].ljust(LENGTH.size, b"\0")
    try:
        length = checked_length(header)
    except InvalidRequest:
        return
    if not 0 <= length <= MAX_MESSAGE_BYTES:
        raise AssertionError(f"a length of {length}")


def read_wire(data: bytes) -> None:
    try:
        Wire.parse(data.decode(errors="replace"))
    except ConfigError:
        pass
    try:
        wire = wire_from_pb(common_pb2.Wire.FromString(data))
    except (DecodeError, InvalidRequest):
        return
    if Wire.parse(str(wire)) != wire:
        raise AssertionError(f"{wire} is not read as it is written")


def one_input(data: bytes) -> None:
    """The first byte says who reads the rest."""
    readers = (read_chunk, read_request, read_length, read_wire)
    if data:
        readers[data[0] % len(readers)](data[1:])


if __name__ == "__main__":
    atheris.Setup(sys.argv, one_input)
    atheris.Fuzz()
