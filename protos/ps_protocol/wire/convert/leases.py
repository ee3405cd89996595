"""Between the dataclasses of ps_protocol.cluster.leases and the messages of the coordinator."""

from __future__ import annotations

from ps_protocol.cluster.leases import LeaseAnswer, LeaseAsk, Span
from ps_protocol.cluster.view import Member
from ps_protocol.v1 import coordinator_pb2 as pb


def ask_to_pb(worker: Member, ask: LeaseAsk, wait_seconds: float) -> pb.LeaseDataRequest:
    """The wire form of what ``worker`` asks."""
    return pb.LeaseDataRequest(
        rank=worker.index,
        incarnation=worker.incarnation,
        dataset=ask.dataset,
        length=ask.length,
        epoch=ask.epoch,
        lease_items=ask.lease_items,
        sequence=ask.sequence,
        trained=[pb.ItemSpan(begin=span.begin, end=span.end) for span in ask.trained],
        trained_epoch=ask.trained_epoch,
        wait_seconds=wait_seconds,
        batch_items=ask.batch_items,
    )


def ask_from_pb(message: pb.LeaseDataRequest) -> LeaseAsk:
    """What a worker asks; who it is stays in the message."""
    return LeaseAsk(
        dataset=message.dataset,
        length=message.length,
        epoch=message.epoch,
        lease_items=message.lease_items,
        sequence=message.sequence,
        trained=tuple(Span(span.begin, span.end) for span in message.trained),
        trained_epoch=message.trained_epoch,
        batch_items=message.batch_items,
    )


def answer_to_pb(answer: LeaseAnswer) -> pb.LeaseDataReply:
    """The wire form of an answer."""
    span = None if answer.span is None else pb.ItemSpan(begin=answer.span.begin, end=answer.span.end)
    return pb.LeaseDataReply(span=span, epoch=answer.epoch, done=answer.done, holders=answer.holders)


def answer_from_pb(message: pb.LeaseDataReply) -> LeaseAnswer:
    """An answer."""
    span = Span(message.span.begin, message.span.end) if message.HasField("span") else None
    return LeaseAnswer(span, message.epoch, message.done, tuple(message.holders))
