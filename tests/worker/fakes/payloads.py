"""Tensors as bytes in chunks, and back; refusals as a shard sends them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NoReturn

import grpc
import torch

from ps_protocol.errors import ERROR_TRAILER, PsError
from ps_protocol.model.layout import aligned
from ps_protocol.v1 import shard_pb2 as pb
from ps_protocol.wire.convert.errors import to_detail

CHUNK_BYTES = 1000


def refuse(context: grpc.ServicerContext, error: PsError) -> NoReturn:
    context.set_trailing_metadata(((ERROR_TRAILER, to_detail(error).SerializeToString()),))
    context.abort(grpc.StatusCode.FAILED_PRECONDITION, error.message)
    raise AssertionError("abort raises")


def receive(requests: Iterator[bytes], size: int) -> bytes:
    payload = b""
    while len(payload) < size:
        chunk = pb.StepRequest.FromString(next(requests)).chunk
        assert chunk.position == len(payload)
        payload += chunk.payload
    assert len(payload) == size
    return payload


def take(tensor: torch.Tensor, payload: bytes, alignment_bytes: int = 1) -> bytes:
    """Fill ``tensor``; what of the payload is left."""
    if tensor.nbytes:
        values = torch.frombuffer(bytearray(payload[: tensor.nbytes]), dtype=tensor.dtype)
        tensor.copy_(values.reshape(tensor.shape))
    return payload[aligned(tensor.nbytes, alignment_bytes) :]


def join(tensors: Sequence[torch.Tensor], alignment_bytes: int = 1) -> bytes:
    values = (t.detach().reshape(-1).view(torch.uint8).numpy().tobytes() for t in tensors)
    return b"".join(each.ljust(aligned(len(each), alignment_bytes), b"\0") for each in values)


def cut(payload: bytes) -> Iterator[pb.Chunk]:
    for position in range(0, len(payload), CHUNK_BYTES):
        yield pb.Chunk(position=position, payload=payload[position : position + CHUNK_BYTES])


def in_replies(payload: bytes) -> Iterator[bytes]:
    """The chunks of a payload as messages of the step stream."""
    for chunk in cut(payload):
        yield pb.StepReply(chunk=chunk).SerializeToString()
