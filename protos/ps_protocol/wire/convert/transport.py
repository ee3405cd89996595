"""The wire's numbers of transports."""

from __future__ import annotations

from ps_protocol.cluster.transport import Transport
from ps_protocol.v1 import common_pb2 as pb

_NUMBERS: dict[Transport, pb.Transport] = {each: getattr(pb, f"TRANSPORT_{each.name}") for each in Transport}
_TRANSPORTS: dict[int, Transport] = {number: each for each, number in _NUMBERS.items()}


def transport_to_pb(transport: Transport | None) -> pb.Transport:
    """The wire's number of ``transport``; None: unspecified."""
    return _NUMBERS[transport] if transport else pb.TRANSPORT_UNSPECIFIED


def transport_from_pb(number: int) -> Transport | None:
    """None where it is unspecified, or one that this version does not know."""
    return _TRANSPORTS.get(number)
