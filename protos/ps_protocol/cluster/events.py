"""What has happened in a job, in words."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class JobEvent:
    """Something that happened, in words."""

    #: Rises by one with every event.
    number: int
    #: Seconds since 1970.
    at_seconds: float
    text: str
    #: Something was lost or is wrong.
    warning: bool = False
