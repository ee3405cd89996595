"""Between the dataclasses of ps_protocol.cluster.exchange and the messages of the coordinator."""

from __future__ import annotations

import math
from collections.abc import Iterable

from ps_protocol.cluster.exchange import ExchangeKey, ExchangeState, ExchangeValue, TensorBytes
from ps_protocol.cluster.view import Member
from ps_protocol.errors import InvalidRequest
from ps_protocol.v1 import coordinator_pb2 as pb
from ps_protocol.wire.convert.model import dtype_from_pb, dtype_to_pb

_MAX_DIMS = 64


def exchange_to_pb(worker: Member, key: ExchangeKey, payload: bytes, wait_seconds: float) -> pb.ExchangeRequest:
    """The wire form of what ``worker`` gives."""
    return pb.ExchangeRequest(
        rank=worker.index,
        incarnation=worker.incarnation,
        name=key.name,
        ordinal=key.ordinal,
        payload=payload,
        wait_seconds=wait_seconds,
    )


def exchange_state_to_pb(state: ExchangeState) -> pb.ExchangeReply:
    """The wire form of an answer."""
    return pb.ExchangeReply(
        complete=state.complete, contributions=_contributions(state.payloads.items()), missing_ranks=state.missing
    )


def exchange_state_from_pb(message: pb.ExchangeReply) -> ExchangeState:
    """An answer. Raises InvalidRequest for one without payloads, or with ranks that do not rise."""
    payloads = _payloads(message.contributions)
    if message.complete and not payloads:
        raise InvalidRequest("a complete exchange has no payloads", expected="one of each worker that took part")
    return ExchangeState(message.complete, dict(payloads), tuple(message.missing_ranks))


def exchange_record_to_bytes(number: int, payloads: Iterable[tuple[int, bytes]]) -> bytes:
    """A complete exchange for the journal."""
    record = pb.ExchangeRecord(number=number, contributions=_contributions(payloads))
    return record.SerializeToString(deterministic=True)


def exchange_record_from_bytes(data: bytes) -> tuple[int, tuple[tuple[int, bytes], ...]]:
    """Number and payloads. Raises DecodeError, InvalidRequest."""
    message = pb.ExchangeRecord.FromString(data)
    return message.number, _payloads(message.contributions)


def exchange_value_to_bytes(value: ExchangeValue) -> bytes:
    """A payload."""
    message = pb.ExchangeValue(call=value.call)
    if value.tensor is None:
        message.json = value.json
    else:
        tensor = value.tensor
        message.tensor.dtype, message.tensor.elements = dtype_to_pb(tensor.dtype), tensor.elements
        message.tensor.shape.extend(tensor.shape)
    return message.SerializeToString()


def exchange_value_from_bytes(payload: bytes) -> ExchangeValue:
    """The value in a payload. Raises DecodeError, InvalidRequest for a tensor whose bytes do not fit its shape."""
    message = pb.ExchangeValue.FromString(payload)
    if not message.HasField("tensor"):
        return ExchangeValue(message.call, message.json)
    dtype, shape, elements = dtype_from_pb(message.tensor.dtype), tuple(message.tensor.shape), message.tensor.elements
    if len(shape) > _MAX_DIMS or math.prod(shape) * dtype.itemsize != len(elements):
        raise InvalidRequest(
            "the bytes of a tensor do not fit its shape",
            expected=f"{shape[:_MAX_DIMS]} of {dtype.value}",
            actual=f"{len(elements)} bytes",
        )
    return ExchangeValue(message.call, tensor=TensorBytes(dtype, shape, elements))


def _contributions(payloads: Iterable[tuple[int, bytes]]) -> list[pb.Contribution]:
    return [pb.Contribution(rank=rank, payload=payload) for rank, payload in payloads]


def _payloads(contributions: Iterable[pb.Contribution]) -> tuple[tuple[int, bytes], ...]:
    payloads = tuple((each.rank, each.payload) for each in contributions)
    ranks = [rank for rank, _ in payloads]
    if ranks != sorted(set(ranks)):
        raise InvalidRequest("the ranks of an exchange do not rise", actual=", ".join(map(str, ranks[:20])))
    return payloads
