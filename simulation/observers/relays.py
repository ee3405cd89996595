"""Observes relays of published weights: what they have received, and what they tell readers."""

from __future__ import annotations

from typing import Any

from ps_protocol.errors import VersionGone
from ps_server.relay.held import RelayedWeights
from simulation.observers.subjects import Subjects, Wrappers
from simulation.relay_judge import RelayJudge


class RelayObservers:
    """Wrappers around methods of ``psctl weights relay``."""

    def __init__(self, subjects: Subjects) -> None:
        self._subjects = subjects

    def wrappers(self) -> Wrappers:
        """All of them."""
        yield from (
            (RelayedWeights, "put", self._put),
            (RelayedWeights, "forget", self._forget),
            (RelayedWeights, "follow", self._follow),
        )

    @property
    def _judge(self) -> RelayJudge:
        """Of the process that runs."""
        return self._subjects.judge.relays[self._subjects.kernel.process]

    def _put(self, original: Any) -> Any:
        def put(held: RelayedWeights, name: str, received: Any) -> None:
            original(held, name, received)
            self._judge.received(received.version)

        return put

    def _forget(self, original: Any) -> Any:
        def forget(held: RelayedWeights, name: str) -> None:
            original(held, name)
            self._judge.forgot()

        return forget

    def _follow(self, original: Any) -> Any:
        async def follow(held: RelayedWeights, ask: Any, wait_seconds: float) -> Any:
            try:
                answer = await original(held, ask, wait_seconds)
            except VersionGone:
                self._judge.gone(ask.number, held._keep)
                raise
            if answer.version is not None:
                self._judge.told(ask, answer.version)
            return answer

        return follow
