"""Observes workers: what they send and what they receive."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ps_protocol.client.coordinator import CoordinatorClient
from ps_protocol.client.membership import Membership
from ps_protocol.cluster.answers import Outcome
from ps_protocol.cluster.view import Member, Role
from ps_protocol.errors import Unavailable
from ps_worker.publishing import Publishing
from ps_worker.step.host_exchange import HostExchange
from ps_worker.step.shard_stream import ShardStream
from simulation.observers.subjects import Subjects, Wrappers
from simulation.truth import RowValues

_NOTHING = (Outcome.LATE, Outcome.STALE, Outcome.SKIPPED)


class WorkerObservers:
    """Wrappers around methods of workers."""

    def __init__(self, subjects: Subjects) -> None:
        self._subjects = subjects
        self._judge = subjects.judge
        #: By stream: what is taken over from the leader of the host.
        self._taken: dict[Any, list[float]] = {}

    def wrappers(self) -> Wrappers:
        """All of them."""
        yield from (
            (ShardStream, "send", self._send),
            (ShardStream, "receive", self._receive),
            (ShardStream, "take_over", self._take_over),
            (ShardStream, "followed", self._followed),
            (HostExchange, "exchange", self._exchange),
            (HostExchange, "_take", self._take),
            (HostExchange, "at", self._at),
            (CoordinatorClient, "leave", self._leave),
            (Membership, "_report_leaving", self._report_leaving),
            (Membership, "_deliver", self._deliver),
            (Publishing, "publish", self._publish),
        )

    def _leave(self, original: Any) -> Any:
        def leave(client: CoordinatorClient, *arguments: Any, **keywords: Any) -> None:
            original(client, *arguments, **keywords)
            self._subjects.left.add(self._subjects.kernel.process)

        return leave

    def _report_leaving(self, original: Any) -> Any:
        def report(membership: Membership, reason: str, finished_seconds: float) -> None:
            try:
                original(membership, reason, finished_seconds)
            except Unavailable:
                if not reason:
                    self._subjects.unheard.add(self._subjects.kernel.process)
                raise

        return report

    def _deliver(self, original: Any) -> Any:
        def deliver(membership: Membership, view: Any) -> None:
            self._judge.coordinator.received(view)
            original(membership, view)

        return deliver

    def _publish(self, original: Any) -> Any:
        def publish(
            publishing: Publishing, name: str, model: str, step: int, metadata: Any, keep: int, *, wait: bool
        ) -> int:
            number: int = original(publishing, name, model, step, metadata, keep, wait=wait)
            self._judge.published.published(number, step, committed=wait)
            return number

        return publish

    def _send(self, original: Any) -> Any:
        def send(lane: Any, push: Any) -> None:
            if self._subjects.kernel.process not in self._subjects.workers:
                original(lane, push)
                return
            if push.combined is not None:
                self._send_combined(original, lane, push)
                return
            member, place = self._sender(lane)
            values = self._subjects.values(lane.layout, lane._gradients.pushed.memory(lane.shard))
            gradient, left = 0.0 if push.skipped else self._subjects.one(values), self._left_out(lane, len(values))
            if push.rows is not None and not push.skipped:
                self._judge.rows.sent(place, member, push.sequence, self._rows(lane, push))
            try:
                original(lane, push)
            finally:
                # What the wire format has left out comes with a later push.
                carried = gradient + left - self._left_out(lane, len(values))
                self._judge.sent(place, member, push.sequence, push.skipped, carried)

        return send

    def _send_combined(self, original: Any, lane: Any, push: Any) -> None:
        member, place = self._sender(lane)
        values = self._subjects.values(
            lane.layout, push.combined.pieces(lane.shard, [(0, lane.layout.region_bytes)])[0]
        )
        gradient = 0.0 if push.skipped else self._subjects.one(values)
        others = [(*each.worker, each.sequence) for each in push.combined.contributions(lane.shard)]
        if not push.skipped:  # as is also one of which the shard has the gradients already
            self._judge.added_up(place, member, push.sequence, others, gradient)
            if push.rows is not None:
                names = [(member.index, member.incarnation, push.sequence), *others]
                self._judge.rows.sent_together(place, names, self._rows(lane, push))
        left = self._left_out_of(lane._host_encoder, len(values))
        try:
            original(lane, push)
        finally:
            carried = gradient + left - self._left_out_of(lane._host_encoder, len(values))
            self._judge.sent_together(place, member, push.sequence, others, carried)

    def _exchange(self, original: Any) -> Any:
        def exchange(host: Any, push: Any, streams: Any, answers: Any) -> Any:
            for lane in streams:
                member, place = self._sender(lane)
                values = self._subjects.values(lane.layout, lane._gradients.pushed.memory(lane.shard))
                self._judge.made(place, member, push.sequence, None if push.skipped else self._subjects.one(values))
                if push.rows is not None:
                    name = member.index, member.incarnation, push.sequence
                    self._judge.rows.made(place, name, None if push.skipped else self._rows(lane, push))
            return original(host, push, streams, answers)

        return exchange

    def _at(self, _original: Any) -> Any:
        def at(point: str) -> None:
            armed, process = self._subjects.points, self._subjects.kernel.process
            if process in armed and armed[process][0] == point:
                armed.pop(process)[1]()

        return staticmethod(at)

    def _take_over(self, original: Any) -> Any:
        def take_over(lane: Any, answer: Any, region: Any) -> None:
            original(lane, answer, region)
            if not answer.absent and self._subjects.is_raw:
                self._taken[lane] = self._subjects.values(lane.layout, region.numpy().data)

        return take_over

    def _take(self, original: Any) -> Any:
        def take(host: Any, follower: Any, answer: Any, push: Any, streams: Any) -> Any:
            found = original(host, follower, answer, push, streams)
            for lane, part in zip(streams, answer.parts, strict=True):
                values = self._taken.pop(lane, None)
                if values is not None and follower.is_open:
                    member, place = self._sender(lane)
                    value = self._subjects.value_in(lane.layout, values, part.version)
                    self._judge.took_over(place, member, part.version, value)
            return found

        return take

    def _followed(self, original: Any) -> Any:
        def followed(lane: Any, sequence: int, outcome: Outcome, version: int) -> None:
            original(lane, sequence, outcome, version)
            member, place = self._sender(lane)
            self._judge.received(place, member, sequence, dropped=outcome in _NOTHING)

        return followed

    def _receive(self, original: Any) -> Any:
        def receive(lane: Any) -> Any:
            receipt = original(lane)
            if (
                receipt
                and receipt.outcomes[0] is not Outcome.REFUSED
                and self._subjects.kernel.process in self._subjects.workers
            ):
                member, place = self._sender(lane)
                dropped = receipt.outcomes[0] in _NOTHING
                self._judge.received(place, member, lane._sequence, dropped=dropped)
                # With SEPARATE no parameters come.
                has_values = receipt.outcomes[0] < Outcome.REFUSED
                if has_values and lane._receive_buffer is not None and lane._encoder is not None:
                    values = self._subjects.values(lane.layout, lane._receive_buffer._bytes)
                    self._judge.holds(place, member, lane._sequence, values)
            return receipt

        return receive

    def _rows(self, lane: Any, push: Any) -> RowValues:
        """The gradients of rows in this shard's part of a push."""
        part = push.rows.of(lane._router, lane.shard)
        count, data = sum(table.rows for table in part.tables), b"".join(part.pieces)
        ids, gradients = np.frombuffer(data[: 8 * count], np.int64), np.frombuffer(data[8 * count :], np.float32)
        return self._subjects.rows(ids, gradients)

    def _sender(self, lane: Any) -> tuple[Member, int]:
        member = Member(Role.WORKER, lane._session.rank, lane._session.incarnation)
        return member, self._subjects.place(lane.shard, lane._router.shard_map)

    @staticmethod
    def _left_out(lane: Any, elements: int) -> float:
        """The mean of what the wire format keeps for later pushes."""
        if lane._encoder is None or not elements:
            return 0.0
        return math.fsum(float(entry.tensor.sum()) for entry in lane.residuals()) / elements

    @staticmethod
    def _left_out_of(encoder: Any, elements: int) -> float:
        """The same of combined pushes."""
        if encoder is None or not elements:
            return 0.0
        return math.fsum(float(entry.tensor.sum()) for entry in encoder.residuals()) / elements
