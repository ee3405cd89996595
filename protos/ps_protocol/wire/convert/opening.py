"""Between the first messages of a step stream and the dataclasses that both sides think in."""

from __future__ import annotations

from ps_protocol import PROTOCOL_VERSION
from ps_protocol.cluster import answers, requests
from ps_protocol.v1 import shard_pb2 as pb
from ps_protocol.wire.convert.enums import transport_from_pb, transport_to_pb
from ps_protocol.wire.formats import wire_from_pb, wire_to_pb


def open_to_pb(request: requests.OpenRequest) -> pb.Open:
    """The wire form of ``request``."""
    rank, incarnation = request.worker
    return pb.Open(
        model=request.model,
        epoch=request.epoch,
        worker=pb.WorkerId(rank=rank, incarnation=incarnation),
        membership_revision=request.membership_revision,
        protocol_version=request.protocol_version,
        phase=request.phase,
        transports=[transport_to_pb(each) for each in request.transports],
        clock=request.clock,
        wire=wire_to_pb(request.wire),
        acknowledged=request.acknowledged,
        torch_version=request.torch_version,
        keeps_slices=request.keeps_slices,
    )


def open_from_pb(message: pb.Open) -> requests.OpenRequest:
    """What ``message`` asks for."""
    if message.protocol_version != PROTOCOL_VERSION:
        return requests.OpenRequest(protocol_version=message.protocol_version)  # the rest may mean something else
    return requests.OpenRequest(
        message.model,
        message.epoch,
        (message.worker.rank, message.worker.incarnation),
        message.membership_revision,
        message.phase,
        message.clock if message.HasField("clock") else None,
        wire_from_pb(message.wire),
        message.acknowledged,
        message.torch_version,
        message.keeps_slices,
        [transport_from_pb(each) for each in message.transports],
    )


def opened_to_pb(opened: answers.OpenedStream) -> pb.Opened:
    """The wire form of ``opened``."""
    return pb.Opened(
        version=opened.version,
        phase=opened.phase,
        clock=opened.clock,
        last_sequence=opened.last_sequence,
        initialised=opened.initialised,
        torch_version=opened.torch_version,
        side_channels=[
            pb.SideChannel(
                transport=transport_to_pb(each.transport),
                name=each.name,
                port=each.port,
                token=each.token,
                tls=each.tls,
            )
            for each in opened.side_channels
        ],
    )


def opened_from_pb(message: pb.Opened) -> answers.OpenedStream:
    """What ``message`` answers."""
    return answers.OpenedStream(
        message.version,
        message.phase,
        message.clock,
        message.last_sequence,
        message.initialised,
        message.torch_version,
        [
            answers.SideChannel(transport_from_pb(each.transport), each.token, each.name, each.port, each.tls)
            for each in message.side_channels
        ],
    )
