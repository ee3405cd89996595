"""Judges one process of a relay of published weights: what it tells readers, by what it has received."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NoReturn

from ps_protocol.cluster.weights import FollowAsk, WeightsVersion
from simulation.published_judge import PublishedJudge


class RelayJudge:
    """Part of the judge. Every method raises Violation."""

    def __init__(self, fail: Callable[[str], NoReturn], published_of: Callable[[str], PublishedJudge]) -> None:
        """``published_of``: what the job of this id has published."""
        self._fail = fail
        self._published_of = published_of
        #: What was received of the job that is followed, in this order.
        self._received: list[WeightsVersion] = []

    def received(self, version: WeightsVersion) -> None:
        """It has ``version``, as the job has told it, and serves it from now on."""
        self._published_of(version.job_id).told(0, version, version.number)
        if self._received and self._received[-1].job_id != version.job_id:
            self._fail(f"the relay receives {version} of another job before it lets {self._received[-1]} go")
        self._received.append(version)

    def forgot(self) -> None:
        """It lets go what is of a job that is not there any more."""
        self._received.clear()

    def told(self, ask: FollowAsk, version: WeightsVersion) -> None:
        """A reader is told of ``version``."""
        if _content(version) not in map(_content, self._received):
            self._fail(f"a reader is told of {version}, which the relay has not received")
        if not ask.number and ask.have and (version.job_id != ask.job_id or version.number <= ask.have):
            self._fail(f"a reader of the relay that has version {ask.have} of job {ask.job_id} is told of {version}")

    def gone(self, number: int, keep: int) -> None:
        """A reader is told that this version is not there."""
        if number in [version.number for version in self._received[-keep:]]:
            self._fail(f"a reader is told that version {number} is not at the relay, which keeps {keep}")


def _content(version: WeightsVersion) -> WeightsVersion:
    """Without where it is."""
    return replace(version, pieces=tuple(replace(piece, incarnation=0, directory="") for piece in version.pieces))
