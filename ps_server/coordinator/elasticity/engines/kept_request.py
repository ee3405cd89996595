"""Keeps what is asked for, for the program that starts the workers: it asks the coordinator now and then."""

from __future__ import annotations

from dataclasses import dataclass

LAUNCHER = "launcher"
"""What ``--engine`` calls it."""


@dataclass(frozen=True, slots=True)
class WorkerRequest:
    """What the coordinator asks for."""

    #: From 1; rises with every request of this coordinator process. 0: nothing was asked for yet.
    number: int = 0
    #: How many the job is to have.
    workers: int = 0
    #: Ranks whose workers were lost.
    ranks: tuple[int, ...] = ()


class KeptRequest:
    """The engine ``launcher``. ``last`` may be read by any thread."""

    def __init__(self) -> None:
        self.last = WorkerRequest()

    def request(self, wanted: int, ranks: tuple[int, ...]) -> str:
        """Keep it in place of the one before."""
        self.last = WorkerRequest(self.last.number + 1, wanted, ranks)
        return f"request {self.last.number}, of the program that starts them"

    def describe(self) -> str:
        """What started the workers."""
        return "the program that starts them"
