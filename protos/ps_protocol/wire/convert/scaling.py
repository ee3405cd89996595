"""Between how many workers and shards a job is to have, and the messages that say it."""

from __future__ import annotations

from collections.abc import Iterable

from ps_protocol.cluster.scaling import ScaleAsk, ScaleOrder, ScaleProgress
from ps_protocol.text import printable
from ps_protocol.v1 import coordinator_pb2 as pb


def ask_to_scale_to_pb(ask: ScaleAsk) -> pb.ScaleRequest:
    """The wire form of what a caller wants."""
    return pb.ScaleRequest(workers=ask.workers, shards=ask.shards)


def ask_to_scale_from_pb(message: pb.ScaleRequest) -> ScaleAsk:
    """What a caller wants."""
    return ScaleAsk(
        message.workers if message.HasField("workers") else None,
        message.shards if message.HasField("shards") else None,
    )


def progress_of_scale_from_pb(message: pb.ScaleProgress) -> ScaleProgress:
    """What a job waits for."""
    return ScaleProgress(printable(message.text), message.done)


def order_to_pb(order: ScaleOrder) -> pb.ScaleOrder:
    """The wire form of what is to run."""
    return pb.ScaleOrder(
        number=order.number,
        ranks=_numbers(order.ranks),
        shards=_numbers(order.shards),
        added_shards=sorted(order.added_shards),
        live_ranks=sorted(order.live_ranks),
        live_shards=sorted(order.live_shards),
        finished=order.finished,
        done_ranks=sorted(order.done_ranks),
    )


def order_from_pb(message: pb.ScaleOrder) -> ScaleOrder:
    """What is to run."""
    return ScaleOrder(
        number=message.number,
        ranks=frozenset(message.ranks.numbers) if message.HasField("ranks") else None,
        shards=frozenset(message.shards.numbers) if message.HasField("shards") else None,
        added_shards=frozenset(message.added_shards),
        live_ranks=frozenset(message.live_ranks),
        live_shards=frozenset(message.live_shards),
        finished=message.finished,
        done_ranks=frozenset(message.done_ranks),
    )


def _numbers(numbers: Iterable[int] | None) -> pb.Numbers | None:
    return None if numbers is None else pb.Numbers(numbers=sorted(numbers))
