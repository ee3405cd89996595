"""Between events of a job and the messages that tell them."""

from __future__ import annotations

from ps_protocol.cluster.events import JobEvent
from ps_protocol.text import printable
from ps_protocol.v1 import coordinator_pb2 as pb


def event_to_pb(event: JobEvent) -> pb.JobEvent:
    """The wire form of an event."""
    return pb.JobEvent(number=event.number, at_seconds=event.at_seconds, text=event.text, warning=event.warning)


def event_from_pb(message: pb.JobEvent) -> JobEvent:
    """An event, with a text that can be shown."""
    return JobEvent(message.number, message.at_seconds, printable(message.text), message.warning)
