"""One model's exchanges made together with the other workers of this host: one of them pushes for all."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from ps_protocol import times
from ps_protocol.cluster.answers import Outcome, StepAnswer
from ps_protocol.cluster.view import Role
from ps_protocol.errors import InternalError, InvalidRequest
from ps_protocol.logs import EventLogger
from ps_protocol.model.spec import ModelSpec, NonFinite, Options
from ps_protocol.model.tables import MAX_ROWS_BYTES, RowOptions, TableSpec
from ps_protocol.wire.means import shares
from ps_protocol.wire.shared_memory import SharedMemory
from ps_worker.host.connection import HostConnection
from ps_worker.host.core import Lead
from ps_worker.host.folder import HostFolder
from ps_worker.host.follower import Follower
from ps_worker.host.group import HostGroup
from ps_worker.host.leader import CombinedPush, Leader, LiveWorkers, TakenDeposit
from ps_worker.host.memory import HostMean, HostShare, LentParameters, LentRows
from ps_worker.host.messages import (
    FOREVER,
    Deposit,
    HostHello,
    HostWorker,
    Position,
    RoundAnswer,
    Separate,
    ShardAnswer,
    numbers_of,
    runs_of,
)
from ps_worker.memory.flat import FlatModel
from ps_worker.memory.plan import FlatPlan
from ps_worker.session.session import Session
from ps_worker.step.gradients import Gradients
from ps_worker.step.shard_stream import ShardStream
from ps_worker.step.summary import StepPush, StepSettings, StepSummary
from ps_worker.tables.row_payloads import RowUpdate, TableGradients, array_bytes, joined_gradients

logger = EventLogger("ps_worker")

Answers = Callable[[StepPush], list[StepSummary]]
"""Pushes, and returns what each shard has answered."""


class _LeaderLost(Exception):
    """The leader is no member of the job any more."""


class _LeaderLate(Exception):
    """The leader has not come to its step in time."""


class HostExchange:
    """Used by a StepPipeline, in the thread that makes exchanges; ``close`` from the thread that ends it."""

    #: Called at named points of an exchange; tests end or stop the process there.
    at: Callable[[str], None] = staticmethod(lambda _point: None)

    def __init__(
        self,
        session: Session,
        folder: HostFolder,
        flat: FlatModel,
        gradients: Gradients,
        spec: ModelSpec,
        style: StepSettings,
        keep: Callable[[Position], None],
    ) -> None:
        """``keep`` is called while this worker, which stands at a position, waits for another of its host: it opens
        streams that have ended, and raises where waiting has to end.
        """
        self._session, self._flat, self._gradients, self._keep = session, flat, gradients, keep
        self._joined_running = False
        #: This worker has said that it makes no push before.
        self._until: Position = (0, 0)
        #: Of the last push that every shard has taken.
        self._reached: Position = (0, 0)
        self._spec = spec
        self._style = f"wire {style.wire}, overlap {style.overlap}"
        self._group = HostGroup(folder, session.host_leaders, self._hello, self._members)
        self._has_begun = False
        #: That the last round was pushed with, as text.
        self._options = ""
        #: Of the shard map that the gradients are laid out by.
        self._plan: FlatPlan | None = None
        self._mean: HostMean | None = None
        self._lent: LentParameters | None = None
        self._rows = LentRows()

    def exchange(self, push: StepPush, streams: Sequence[ShardStream], answers: Answers) -> list[StepSummary]:
        """As ``answers``, whose push may be that of another worker. Raises as that does."""
        if not self._session.pushes_with_host:
            if self._until != FOREVER:
                self.away(FOREVER)
            return self._reaching(push, answers(push))
        if push.alone:
            return self.alone(push, answers)
        return self._reaching(push, self._exchange(push, streams, answers))

    def alone(self, push: StepPush, answers: Answers) -> list[StepSummary]:
        """``answers``, while no other worker of this host waits for the end: it may wait for the push of that one."""
        self.away(max(self._until, (push.phase, push.clock + 1)))
        return self._reaching(push, answers(push))

    def _reaching(self, push: StepPush, found: list[StepSummary]) -> list[StepSummary]:
        if not any(Outcome.REFUSED in each.outcomes for each in found):
            self._reached = push.phase, push.clock
        return found

    def _exchange(self, push: StepPush, streams: Sequence[ShardStream], answers: Answers) -> list[StepSummary]:
        self._until = 0, 0
        if (segments := self._own_segments(streams)) is None:
            self._group.hand_over()
            return self._alone(push, answers)
        if (part := self._group.enter()) is None:
            return self._alone(push, answers)
        if isinstance(part, Leader):
            return _as_skipped(push, self._lead(part, push, streams, answers))
        if (found := self._follow(part, push, streams, segments)) is not None:
            return _as_skipped(push, found)
        return self._alone(push, answers)

    def start(self, *, joined_running: bool) -> None:
        """The model has its values. ``joined_running``: it had been trained before this worker came."""
        self._joined_running = joined_running
        if self._spec.tables:
            # Compiled or loaded now: in the first step the others would wait for it.
            import_module("ps_protocol.wire.row_means")
        self._group.start()

    def away(self, until: Position) -> None:
        """No push of this worker comes before ``until``, or it is made by this worker itself."""
        self._until = until
        self._group.away(until)

    def close(self) -> None:
        """Take part no more. Safe to repeat."""
        self._group.close()

    # -- both

    def _alone(self, push: StepPush, answers: Answers) -> list[StepSummary]:
        """Push by itself: who begins to lead does not wait for this push, which may wait for that of the leader."""
        self._group.apart((push.phase, push.clock + 1))
        return answers(push)

    def _hello(self) -> HostHello:
        session = self._session
        return HostHello(
            session.rank, session.incarnation, session.revision, session.seed, self._spec.name, self._style
        )

    def _members(self) -> LiveWorkers:
        view = self._session.view
        live = {rank: each.incarnation for rank, each in view.live(Role.WORKER).items()}
        return LiveWorkers(live, view.revision, self._session.consistency.mode.bounded)

    def _own_segments(self, streams: Sequence[ShardStream]) -> list[SharedMemory | None] | None:
        """The segments with this worker's gradients, by shard; None: they are not in segments."""
        found = []
        for stream in streams:
            segment = self._gradients.pushed.segment(stream.shard)
            if segment is None and stream.layout.region_bytes:
                self._group.say(
                    "this host has no shared memory for the gradients of this worker, which pushes by itself"
                )
                return None
            found.append(segment)
        return found

    def _patience(self) -> float | None:
        """How long one worker of the host waits for another; None: as long as it is live.

        In lockstep no answer comes without it, and it cannot wait for this one, unless it does so in another model.
        """
        lockstep = self._session.consistency.in_lockstep and self._group.is_sole
        return None if lockstep else self._session.lease_seconds

    # -- a follower

    def _follow(
        self,
        follower: Follower,
        push: StepPush,
        streams: Sequence[ShardStream],
        segments: Sequence[SharedMemory | None],
    ) -> list[StepSummary] | None:
        """None: the push has to be made by this worker."""
        group, has_copied, tables = self._group, False, _tables_of(push)
        openings = [stream.openings for stream in streams]
        try:
            rows = self._rows.take([*(array_bytes(t.ids) for t in tables), *(array_bytes(t.gradients) for t in tables)])
        except OSError as error:
            group.say(f"this host has no shared memory for the rows of this worker, which pushes by itself: {error}")
            group.leave()
            return None
        try:
            follower.deposit(self._deposit(push, streams, tables), segments, rows)
            self.at("deposited")
            answer = follower.wait(self._while_following(follower, push))
            if isinstance(answer, Separate):
                return None
            self.at("before_copy")
            has_copied = True
            found = self._take(follower, answer, push, streams)
            for stream, count in zip(streams, openings, strict=True):
                if stream.openings != count:
                    # Opened without a word of this push: the shard may have lost it since, and wait for it.
                    stream.drop()
            self.at("after_copy")
            if found is None or follower.is_open:
                return found
            # It may have written other parameters while these were copied.
        except _LeaderLate:
            group.give_up("it has not come to its step")
            return None
        except (OSError, InvalidRequest, _LeaderLost) as error:
            if isinstance(error, InvalidRequest):
                group.say(f"this worker pushes by itself: {error}")
        except BaseException:
            group.leave()
            raise
        group.leave()
        for stream in streams if has_copied else ():
            # An answer on a new stream leaves nothing out.
            stream.drop()
        return None

    def _deposit(self, push: StepPush, streams: Sequence[ShardStream], tables: Sequence[TableGradients]) -> Deposit:
        return Deposit(
            push.sequence,
            push.phase,
            push.clock,
            streams[0].epoch,
            push.weight or 1.0,
            push.skipped,
            push.with_buffers and not push.skipped,
            runs_of(push.absent),
            tuple(stream.version for stream in streams),
            (),
            _options_text(push),
            tuple(number for each in tables for number in (each.table, len(each.ids))),
        )

    def _while_following(self, follower: Follower, push: StepPush) -> Callable[[], None]:
        began, patience = time.monotonic(), self._patience()

        def check() -> None:
            self._keep((push.phase, push.clock - 1))
            leader, members = follower.leader, self._members()
            if members.live.get(leader.rank) != leader.incarnation:
                raise _LeaderLost
            waited = time.monotonic() - began
            if patience is not None and waited > patience:
                raise _LeaderLate
            if waited > times.HINT_SECONDS:
                self._session.wait_hint(f"waiting for {leader}, which pushes for this host")

        return check

    def _take(
        self, follower: Follower, answer: RoundAnswer, push: StepPush, streams: Sequence[ShardStream]
    ) -> list[StepSummary] | None:
        """Take over what the leader has received; None: it lacks what changed before. Raises InvalidRequest."""
        if len(answer.parts) != len(streams):
            raise InvalidRequest("the leader of this host answers for other shards", actual=str(len(answer.parts)))
        pairs = list(zip(streams, answer.parts, strict=True))
        if any(part.before > stream.version and part.absent for stream, part in pairs):
            return None
        collects, found = self._session.consistency.mode.collects, []
        for stream, part in pairs:
            layout = stream.layout
            absent = numbers_of(part.absent, len(layout.slices))
            if part.segment:
                segment, region = follower.region(part.segment, layout.region_bytes)
                stream.take_over(StepAnswer(absent=absent, with_buffers=part.with_buffers, payload_bytes=1), region)
                del segment, region
            stream.followed(push.sequence, _outcome(part.outcome), part.version)
            clock, outcomes = part.clock if collects else push.clock, (_outcome(part.outcome),)
            found.append(StepSummary((part.version,), outcomes, part.staleness, clock, 0, answer.waited_seconds))
        self._tell_options(answer.options, push)
        return found

    def _tell_options(self, used: str, push: StepPush) -> None:
        if used != (own := _options_text(push)):
            self._group.say(
                f"a step of this host is made with the options of one of its workers: {used} are used, and {own} of "
                "this worker are not"
            )

    # -- the leader

    def _lead(
        self, leader: Leader, push: StepPush, streams: Sequence[ShardStream], answers: Answers
    ) -> list[StepSummary]:
        answer: Callable[[HostConnection], RoundAnswer] | None = None
        try:
            taken = leader.gather(self._led(push), self._expected(push), self._while_leading(push))
            self.at("gathered")
            combined = self._combined(leader, taken, push, streams) if taken else None
            if combined is None:
                return self._alone(push, answers)
            before = [stream.version for stream in streams]
            is_apart = False

            def apart() -> StepPush:
                nonlocal is_apart
                is_apart = True
                leader.dissolve("not every shard could take the push of this host")
                self._group.apart((push.phase, push.clock + 1))
                return push

            found = answers(replace(combined, apart=apart))
            self.at("answered")
            if is_apart:
                return found
            answer = self._answer(streams, before, found)
            self._tell_options(self._options, push)
            return found
        except BaseException:
            leader.dissolve("the leader's step has failed")
            raise
        finally:
            leader.ended(answer)
            if answer is not None:
                self.at("told")

    def _led(self, push: StepPush) -> Lead:
        mode, patience = self._session.consistency.mode, self._patience()
        # A job of a fixed size that begins: every worker makes this step.
        begins = patience is None and not self._session.elastic and not self._joined_running
        expects = None if begins else self._session.lease_seconds
        return Lead((push.phase, push.clock), mode.collects, mode.bounded, patience, expects, self._reached)

    def _expected(self, push: StepPush) -> Callable[[], set[HostWorker]] | None:
        """Before this worker's first step: gives the workers that may not have connected."""
        if self._has_begun:
            return None
        self._has_begun = True
        self._group.wait_for_names()
        return partial(self._group.others, (push.phase, push.clock), self._reached)

    def _while_leading(self, push: StepPush) -> Callable[[Sequence[HostWorker]], None]:
        began = time.monotonic()

        def check(waits_for: Sequence[HostWorker]) -> None:
            self._keep((push.phase, push.clock - 1))
            if time.monotonic() - began > times.HINT_SECONDS and waits_for:
                ranks = ", ".join(str(each.rank) for each in waits_for)
                self._session.wait_hint(f"waiting for worker {ranks} of this host, whose gradients go with this push")

        return check

    def _combined(
        self, leader: Leader, taken: list[TakenDeposit], push: StepPush, streams: Sequence[ShardStream]
    ) -> StepPush | None:
        """The push of the round; None: this worker pushes by itself, and so do the others."""
        own, plan = HostWorker(self._session.rank, self._session.incarnation), self._flat.plan
        if plan is not self._plan:
            self._plan, self._lent, self._mean = plan, None, HostMean(plan.layouts)
        try:
            self._lent = self._lent or LentParameters(plan.layouts)
        except OSError as error:
            self._group.say(f"this host has no shared memory for parameters, each worker pushes by itself: {error}")
            self._group.resign()
            return None
        mean = self._mean
        if mean is None or any(each.deposit.epoch != streams[0].epoch for each in taken):
            leader.dissolve("slices are moving between shards")
            return None
        while taken:
            parts = self._parts(leader, taken, own, push, streams)
            rows = self._add_up(mean, parts, streams)
            self.at("summed")
            # A worker that writes its gradients has closed its connection before.
            ended = [each for each in taken if each.connection.has_ended() or each.worker not in parts]
            if not ended:
                break
            leader.leave_out(each.worker for each in ended)
            taken = [each for each in taken if each not in ended]
        if not taken:
            return None
        present = [part for part in parts.values() if part is not None]
        absent = frozenset.intersection(*(part.absent for part in present)) if present else frozenset()
        places = {stream.shard: place for place, stream in enumerate(streams)}
        missing = {
            stream.shard: frozenset(plan.contents(stream.shard, tuple(sorted(absent)), False)[0]) for stream in streams
        }
        finite = self._spec.nonfinite is not NonFinite.ALLOW
        if finite and not (
            all(mean.is_finite(shard, slices) for shard, slices in missing.items())
            and all(each.is_finite() for each in rows)
        ):
            leader.dissolve("the sum of the gradients of this host is not finite")
            return None
        if sum(each.nbytes for each in rows) > MAX_ROWS_BYTES:
            leader.dissolve("the rows of this host are more than one push may have")
            return None
        # The parts are by rank.
        texts = {own: _options_text(push)} | {each.worker: each.deposit.options for each in taken}
        self._options = texts[min(parts)]
        groups, tables = _options_of(self._options)
        norm = None
        if self._spec.clip_grad_norm and present:
            squares = [mean.squared_norm(shard, slices) for shard, slices in missing.items()]
            norm = math.fsum([*squares, *(each.squared_norm() for each in rows)])
        return replace(
            push,
            absent=tuple(sorted(absent)),
            with_buffers=any(part.with_buffers for part in present),
            skipped=not present,
            finite=finite,
            staged=(),
            rows=RowUpdate(rows) if self._spec.tables else None,
            options=groups,
            table_options=tables,
            weight=math.fsum(part.weight for part in present),
            squared_norm=norm,
            combined=CombinedPush(mean, taken, places),
        )

    def _parts(
        self,
        leader: Leader,
        taken: Sequence[TakenDeposit],
        own: HostWorker,
        push: StepPush,
        streams: Sequence[ShardStream],
    ) -> dict[HostWorker, _PartOfMean | None]:
        """What each worker adds, by rank; None: it skips the step. A deposit that does not fit is left out."""
        count, pushed = len(self._flat.plan.variables), self._gradients.pushed
        regions = [pushed.region(stream.shard) for stream in streams]
        parts: dict[HostWorker, _PartOfMean | None] = {
            own: None
            if push.skipped
            else _PartOfMean(regions, frozenset(push.absent), push.weight or 1.0, push.with_buffers, _tables_of(push))
        }
        for each in taken:
            deposit = each.deposit
            try:
                if (
                    not (len(deposit.versions) == len(deposit.segments) == len(streams))
                    or not 0.0 < deposit.weight < math.inf
                ):
                    raise InvalidRequest("a deposit does not fit the model", actual=repr(deposit)[:80])
                if [*map(len, _options_of(deposit.options))] != [len(push.options), len(push.table_options)]:
                    raise InvalidRequest("a deposit has other options than the model", actual=deposit.options[:80])
                absent = frozenset(numbers_of(deposit.absent, count))
                mapped = [
                    _mapped(each, number, stream) for number, stream in zip(deposit.segments, streams, strict=True)
                ]
                rows, of_rows = _mapped_rows(each, self._spec.tables)
            except InvalidRequest as error:
                leader.refuse(each.worker, error)
                continue
            parts[each.worker] = (
                None
                if deposit.skipped
                else _PartOfMean(
                    [region for _, region in mapped],
                    absent,
                    deposit.weight,
                    deposit.with_buffers,
                    rows,
                    (mapped, of_rows),
                )
            )
        return dict(sorted(parts.items()))

    def _add_up(
        self, mean: HostMean, parts: dict[HostWorker, _PartOfMean | None], streams: Sequence[ShardStream]
    ) -> list[TableGradients]:
        """Take the mean over all regions, and return that of rows."""
        plan, present = self._flat.plan, [part for part in parts.values() if part is not None]
        for place, stream in enumerate(streams if present else ()):
            shared = [
                HostShare(
                    part.regions[place],
                    frozenset(plan.contents(stream.shard, tuple(sorted(part.absent)), False)[0]),
                    part.weight,
                    part.with_buffers,
                )
                for part in present
            ]
            mean.take(stream.shard, shared, self._spec.buffers)
        weights = shares([part.weight for part in present]) if present else None
        return joined_gradients([part.rows for part in present], weights)

    def _answer(
        self, streams: Sequence[ShardStream], before: Sequence[int], found: Sequence[StepSummary]
    ) -> Callable[[HostConnection], RoundAnswer]:
        """Lend what has come; the answer to the others, for the connection of one."""
        lent = self._lent
        if lent is None:
            raise InternalError("parameters are lent to nobody")
        received = [stream.copy_received(lent.region(stream.shard)) for stream in streams]
        options = self._options

        def answer(connection: HostConnection) -> RoundAnswer:
            parts, named = [], []
            for stream, version, summary, came in zip(streams, before, found, received, strict=True):
                segment = lent.segments[stream.shard]
                number = 0
                if segment is not None and came is not None:
                    number = connection.lend(segment)
                    named.append(segment)
                absent, with_buffers = (came.absent, came.with_buffers) if came is not None else ((), False)
                parts.append(
                    ShardAnswer(
                        int(summary.outcomes[0]),
                        version,
                        summary.versions[0],
                        summary.clock,
                        summary.staleness,
                        number,
                        runs_of(sorted(absent)),
                        with_buffers,
                    )
                )
            connection.lent.used(named)
            return RoundAnswer(max(each.waited_seconds for each in found), options, tuple(parts))

        return answer


@dataclass(frozen=True, slots=True)
class _PartOfMean:
    """What one worker adds to the mean."""

    #: By shard that has anything of the model.
    regions: Sequence[torch.Tensor]
    #: Variables without a gradient.
    absent: frozenset[int]
    weight: float
    with_buffers: bool
    #: By number of the table.
    rows: Sequence[TableGradients]
    #: Keeps the regions and rows mapped.
    mapped: object = None


def _mapped(taken: TakenDeposit, number: int, stream: ShardStream) -> tuple[SharedMemory | None, torch.Tensor]:
    """The gradients of a deposit for one shard, and what keeps them mapped. Raises InvalidRequest."""
    size_bytes = stream.layout.region_bytes
    if not size_bytes:
        return None, torch.empty(0, dtype=torch.uint8)
    found = taken.connection.mapped.region(number, size_bytes)
    if found is None:
        raise InvalidRequest(
            "a deposit does not fit the shards", shard=str(stream.shard), expected=f"{size_bytes} bytes of gradients"
        )
    return found


def _tables_of(push: StepPush) -> Sequence[TableGradients]:
    """The gradients of rows in ``push``."""
    return push.rows.tables if push.rows is not None and not push.skipped else ()


def _mapped_rows(taken: TakenDeposit, tables: Sequence[TableSpec]) -> tuple[list[TableGradients], SharedMemory | None]:
    """The gradients of rows of a deposit, and what keeps them mapped. Raises InvalidRequest."""
    deposit = taken.deposit
    numbers, counts = deposit.tables[::2], deposit.tables[1::2]
    rises = all(one < other for one, other in pairwise([-1, *numbers, len(tables)]))
    if len(numbers) != len(counts) or not rises:
        raise InvalidRequest("a deposit does not fit the tables", actual=repr(deposit.tables)[:80])
    widths = [tables[number].dim for number in numbers]
    begin = 8 * sum(counts)
    size_bytes = begin + sum(4 * rows * width for rows, width in zip(counts, widths, strict=True))
    nothing = None, torch.empty(0, dtype=torch.uint8)
    mapped = taken.connection.mapped.region(deposit.rows, size_bytes) if size_bytes else nothing
    if mapped is None:
        raise InvalidRequest("a deposit does not fit the tables", expected=f"{size_bytes} bytes of rows")
    data = mapped[1].numpy()
    ids, values = data[:begin].view(np.int64), data[begin:].view(np.float32)
    found, row, at = [], 0, 0
    for number, rows, width in zip(numbers, counts, widths, strict=True):
        gradients = values[at : at + rows * width].reshape(rows, width)
        found.append(TableGradients(number, ids[row : row + rows], gradients))
        row, at = row + rows, at + rows * width
    return found, mapped[0]


def _as_skipped(push: StepPush, found: list[StepSummary]) -> list[StepSummary]:
    """``found``, which is of the mean of the others where this worker has skipped the step: for it the step is that."""
    if not push.skipped:
        return found
    skipped = {Outcome.APPLIED: Outcome.SKIPPED}
    return [replace(each, outcomes=tuple(skipped.get(one, one) for one in each.outcomes)) for each in found]


def _options_text(push: StepPush) -> str:
    """The options of a push: equal for equal options."""
    return json.dumps([[*map(dict, push.options)], [*map(dict, push.table_options)]], sort_keys=True)


def _options_of(text: str) -> tuple[tuple[Options, ...], tuple[RowOptions, ...]]:
    """The options in ``text``: of parameter groups, and of tables. Raises InvalidRequest."""
    try:
        groups, tables = json.loads(text)
        return tuple(map(_tuples_in, groups)), tuple(map(_tuples_in, tables))
    except (ValueError, TypeError, AttributeError) as error:
        raise InvalidRequest("a worker of this host sent what are no options", actual=repr(text[:80])) from error


def _tuples_in(options: dict[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in options.items()}


def _outcome(number: int) -> Outcome:
    """Raises InvalidRequest."""
    try:
        return Outcome(number)
    except ValueError as error:
        raise InvalidRequest(
            "the leader of this host tells an outcome that is not known", actual=str(number)
        ) from error
