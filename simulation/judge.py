"""Judges a history as it happens, by a model of its own: nothing here calls what it judges."""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import NoReturn

from ps_protocol.cluster.view import Member
from ps_protocol.model.spec import Consistency, Mode, StalePolicy, StaleRule
from ps_server.consistency import Position, PushDecision, PushInfo, Tracker, Verdict, WorkerKey
from ps_server.consistency.events import START
from simulation.checkpoint_judge import CheckpointJudge
from simulation.coordinator_judge import CoordinatorJudge
from simulation.places import Places
from simulation.published_judge import PublishedJudge
from simulation.relay_judge import RelayJudge
from simulation.rows_judge import RowsJudge
from simulation.runtime.kernel import Kernel, Process
from simulation.truth import Clocks, Name, ShardTruth, Update, name_of, same

_DROPPED = (Verdict.LATE, Verdict.STALE, Verdict.SKIP)


class Judge:
    """Called by the simulated shells, inside the event that it judges. Every method raises Violation."""

    def __init__(
        self,
        kernel: Kernel,
        shards: int,
        *,
        durable: bool,
        early: bool,
        momentum: float,
        stale: StaleRule | None = None,
        one_mode: bool = False,
        raw: bool = True,
    ) -> None:
        """Numbers of shards are those of ``places``. ``early``: a push is acknowledged before the standby has it.

        ``stale``: the rule of the models for stale pushes; None: that of the mode. ``one_mode``: nothing keeps a change
        of the mode from beginning at one point of all shards. ``raw``: payloads are; else elements of a shard differ.
        """
        self.places = places = Places(shards)
        self._kernel = kernel
        self._durable = durable
        self._early = early
        self._momentum = momentum
        self._stale = stale
        self._one_mode = one_mode
        #: By model and push: the mode by which a shard has decided on it.
        self._modes: dict[tuple[int, Name], Consistency] = {}
        self.truth = places.truth
        self.rows = RowsJudge(self.fail, places)
        self.checkpoints = CheckpointJudge(self.fail, places, self.rows)
        #: With a wire format that keeps errors, by number and push: the parameters of its worker after the answer.
        self._assumed: dict[tuple[int, int, int, int], Sequence[float]] = {}
        self.coordinator = CoordinatorJudge(self.fail, self.acknowledged_by)
        self._raw = raw
        self.published = PublishedJudge(self.fail, places, exact=raw, job=0)
        #: Of jobs before this one.
        self._published_before: list[PublishedJudge] = []
        #: By process of a relay.
        self.relays: dict[Process | None, RelayJudge] = {}
        #: The checkpoint that the job began with; empty: none.
        self.restored_from = ""
        self.pushes_applied = 0
        self.replies = 0

    def fail(self, what: str) -> NoReturn:
        """A promise is broken."""
        self._kernel.fail(what)

    def begin_job(self, folder: str, phase: int, trained: Mapping[int, Iterable[int]]) -> None:
        """Another job begins in place of the one before, with what a checkpoint has.

        ``phase`` and items of data that are ``trained``, by epoch, are of the checkpoint.
        """
        self.places.begin_job()
        self._assumed.clear()
        self.coordinator = CoordinatorJudge(self.fail, self.acknowledged_by, phase)
        self.coordinator.began_with(trained)
        self.published.is_over = True
        self._published_before.append(self.published)
        self.published = PublishedJudge(self.fail, self.places, exact=self._raw, job=len(self._published_before))
        self.restored_from = folder

    def published_of(self, job_id: str) -> PublishedJudge:
        """What the job of this id has published."""
        published = next((each for each in (self.published, *self._published_before) if each.job_id == job_id), None)
        if published is None:
            self.fail(f"a reader has a version of job '{job_id}', which has published none")
        return published

    def reader_ended(self, reader: str, job: int, number: int) -> None:
        """A reader has followed a job to its end, and has version ``number`` of ``job``; 0: it has none."""
        jobs = [*self._published_before, self.published]
        if number and jobs[job].finished_with is None:
            self.fail(f"{reader} with version {number} is told that the job is finished, which the job has not said")
        if jobs[job] is self.published or not number:
            self.published.ended(reader, number)

    def relay_begins(self, process: Process) -> None:
        """A process of a relay, which has nothing yet."""
        self.relays[process] = RelayJudge(self.fail, self.published_of)

    # Shards: life and membership

    def restored(self, number: int, disk: str, tracker: Tracker, value: float | None) -> None:
        """What a restart brings back is a state that was, with all that was acknowledged; None: without values."""
        truth = self.truth[number]
        kept = self._keeps(truth, disk)
        version = tracker.version
        if kept and truth.gone:
            self.fail(f"shard {number} restored a model that it has dropped")
        truth.gone = False
        truth.bring_back(version)
        if version > len(truth.history):
            self.fail(f"shard {number} restored version {version}; only {len(truth.history)} were ever logged")
        if kept and version < truth.acknowledged:
            self.fail(f"shard {number} restored version {version}; version {truth.acknowledged} was acknowledged")
        if value is None and kept and truth.values_acknowledged:
            self.fail(f"shard {number} restored no values; its initial values were acknowledged")
        truth.forget_behind(version)
        if value is not None or version:
            found = None if value is None else truth.had(version, value, acknowledged=kept)
            if found is None:
                expected = truth.states(version)[-1][0]
                self.fail(f"shard {number} restored version {version} with values {value} instead of {expected}")
            truth.loads.forget_behind(version, found)
        self._begin_life(truth)
        # A snapshot remembers rounds of skipped pushes alone, which are in no log.
        truth.last_round = max(truth.last_round, min(tracker.applied, truth.furthest_round))

    def restored_nothing(self, number: int, disk: str) -> None:
        """An empty disk: nothing was acknowledged before."""
        truth = self.truth[number]
        kept = self._keeps(truth, disk) and not self.places.is_released(number)
        if kept and truth.acknowledged:
            self.fail(f"shard {number} starts empty; version {truth.acknowledged} was acknowledged")
        if kept and truth.values_acknowledged:
            self.fail(f"shard {number} starts empty; its initial values were acknowledged")
        truth.forget_behind(0)
        truth.loads.forget_behind(0, 0)
        truth.row_loads.forget_behind(0, 0)
        self._begin_life(truth)

    def dropped_model(self, number: int) -> None:
        """The shard has logged that the model is released."""
        self.truth[number].gone = True

    def members(self, number: int, live: Mapping[int, int]) -> None:
        """The shard has a new view."""
        truth = self.truth[number]
        truth.live = dict(live)
        for rank in [rank for rank, life in truth.taking_part.items() if live.get(rank) != life]:
            del truth.taking_part[rank]
            truth.clocks.remove(rank)
        if truth.untouched:
            for rank, life in live.items():
                if rank not in truth.taking_part:
                    truth.taking_part[rank] = life
                    truth.clocks.place(rank, truth.entry)

    def configured(self, number: int, mode: Consistency) -> None:
        """The shard has a new mode."""
        self.truth[number].mode = mode

    def attached(self, number: int, worker: WorkerKey, position: Position) -> None:
        """A worker was told where it stands."""
        truth = self.truth[number]
        if truth.live.get(worker.rank) != worker.incarnation:
            self.fail(f"shard {number} let {worker} in, which is not live in its view")
        truth.taking_part[worker.rank] = worker.incarnation
        truth.clocks.place(worker.rank, position)
        self._reach(truth, worker, position)

    def arrived(self, number: int, worker: WorkerKey, phase: int) -> None:
        """A worker entered the barrier that ends ``phase``."""
        truth = self.truth[number]
        position = max(truth.clocks.of.get(worker.rank, START), Position(phase + 1, 0))
        truth.clocks.place(worker.rank, position)
        self._reach(truth, worker, position)

    # Shards: pushes

    def sent(self, number: int, member: Member, sequence: int, skipped: bool, value: float) -> None:
        """A worker sends a push, the first time or again; every gradient in it is ``value``, NaN: there is none.

        It has none where its shard has it already, from the leader of the host; after a move it comes with them.
        """
        truth, name = self.truth[number], (member.index, member.incarnation, sequence)
        if math.isnan(truth.sent.get(name, math.nan)):
            truth.sent[name] = math.nan if skipped else value

    def made(self, number: int, member: Member, sequence: int, value: float | None) -> None:
        """A worker of a host has a gradient for its next push, ``value``; None: it skips the step."""
        self.truth[number].made[member.index, member.incarnation, sequence] = value

    def added_up(self, number: int, member: Member, sequence: int, others: Iterable[Name], value: float) -> None:
        """A worker sends ``value`` as the mean of its gradient and those in the pushes ``others``."""
        names = [(member.index, member.incarnation, sequence), *others]
        values = self.truth[number].gradients(names)
        expected = math.fsum(values) / max(1, len(values))
        if not same(value, expected):
            self.fail(f"{member} pushes {value} for {names} to shard {number} instead of {expected}")

    def took_over(self, number: int, member: Member, version: int, value: float) -> None:
        """A worker has ``value`` as ``version`` from another worker of its host."""
        truth = self.truth[number]
        if version > len(truth.history):
            return  # lost with the shard since
        if truth.had(version, value) is None:
            expected = truth.states(version)[-1][0]
            self.fail(f"{member} takes over {value} as version {version} of shard {number} instead of {expected}")

    def sent_together(self, number: int, member: Member, sequence: int, others: Iterable[Name], value: float) -> None:
        """A worker sends a combined push, which carries ``value``, and has parts of the pushes ``others``."""
        truth, name = self.truth[number], (member.index, member.incarnation, sequence)
        truth.combined.setdefault(name, (value, len(truth.gradients([name, *others]))))

    def decided_push(self, number: int, info: PushInfo, decision: PushDecision) -> None:
        """The shard has decided on a push."""
        truth, verdict = self.truth[number], decision.verdict
        if truth.live.get(info.worker.rank) != info.worker.incarnation:
            self.fail(f"shard {number} took a push of {info.worker}, which is not live in its view")
        if verdict in (Verdict.DUPLICATE, Verdict.SEPARATE):
            return
        if verdict in (Verdict.APPLY, Verdict.STALE):
            self._judge_factor(truth, info, decision)
        truth.untouched = False
        for each in info.contributions:
            name, worker = name_of(each), each.worker
            if truth.live.get(worker.rank) != worker.incarnation:
                self.fail(f"shard {number} took {info} for {worker}, which is not live in its view")
            truth.taking_part[worker.rank] = worker.incarnation
            truth.verdicts[name] = verdict
            mode = self._modes.setdefault((number - number % self.places.shards, name), truth.mode)
            if self._one_mode and mode != truth.mode:
                self.fail(f"shard {number} decides on {each} by {truth.mode}, another shard by {mode}")
            truth.clocks.place(worker.rank, each.position)
            self._reach(truth, worker, each.position)

    def logged(
        self,
        number: int,
        version: int,
        pushes: tuple[PushInfo, ...],
        scale: float,
        held_rows: Container[int],
        *,
        is_round: bool,
    ) -> None:
        """An update is in the log: from now on it may be restored."""
        truth = self.truth[number]
        if truth.gone:
            self.fail(f"shard {number} applies an update of a model that it has dropped")
        if version != len(truth.history) + 1:
            self.fail(f"shard {number} logged version {version} after {len(truth.history)}")
        value, velocity = truth.states(len(truth.history))[-1]
        shares = {push: truth.carried(push) for push in pushes}
        for push in pushes:
            for each in push.contributions:
                name = name_of(each)
                if name in truth.applied:
                    self.fail(f"shard {number} applies {each} twice: versions {truth.applied[name]} and {version}")
                if name in truth.dropped:
                    self.fail(f"shard {number} applies {each}, of which a worker was told that it changed nothing")
                truth.applied[name] = version
            if not is_round and scale != truth.factors.get(name_of(push), 1.0):
                expected = truth.factors.get(name_of(push))
                self.fail(f"shard {number} logs {push} with the factor {scale} instead of {expected}")
        workers = sum(count for _, count in shares.values())
        velocity = self._momentum * velocity + sum(value * count for value, count in shares.values()) / workers
        rows = self.rows.change(number, {push: count for push, (_, count) in shares.items()}, scale, held_rows)
        truth.logs(Update(pushes, value - scale * velocity, velocity, is_round, rows))
        self.pushes_applied += len(pushes)

    def round_decided(self, number: int, position: Position, pushes: tuple[PushInfo, ...]) -> None:
        """A round is to be applied, or, of skipped pushes only, to be passed over."""
        truth = self.truth[number]
        if any(each.position != position for push in pushes for each in push.contributions):
            self.fail(f"shard {truth.number}: a round of several positions: {pushes}")
        if position <= truth.last_round:
            self.fail(f"shard {truth.number}: the round of {position} comes after that of {truth.last_round}")
        truth.last_round = position
        truth.furthest_round = max(truth.furthest_round, position)
        if truth.mode.mode is Mode.SYNC:
            missing = truth.clocks.below(position)
            if missing > truth.mode.backup:
                self.fail(
                    f"shard {truth.number}: the round of {position} was applied while {missing} participants had not "
                    f"reached it ({truth.mode})"
                )

    def loaded(self, number: int, value: float) -> None:
        """Initial values are in the log."""
        truth = self.truth[number]
        if truth.history:
            self.fail(f"shard {number} took initial values after {len(truth.history)} updates")
        if self.restored_from:
            self.fail(f"shard {number} took initial values, and the job began with a checkpoint")
        truth.initial = 0.0 if math.isnan(value) else value

    def values_acknowledged(self, number: int, disk: str) -> None:
        """A worker is told that the initial values are there."""
        truth = self.truth[number]
        truth.values_acknowledged, truth.acknowledged_on = True, disk

    def answers_pull(self, number: int, info: PushInfo) -> None:
        """The mode lets this pull be answered now."""
        self.truth[number].behind = []
        self._judge_pull(self.truth[number], info)

    def replied(
        self,
        number: int,
        disk: str,
        incarnation: int,
        info: PushInfo,
        verdict: Verdict | None,
        version: int,
        value: float,
    ) -> None:
        """A push is acknowledged, and parameters go out with it."""
        truth, name = self.truth[number], name_of(info)
        self.replies += 1
        truth.behind = []
        if incarnation < truth.acknowledged_by and not self._early:
            self.fail(
                f"shard {number} as incarnation {incarnation} acknowledges a push after {truth.acknowledged_by} did"
            )
        truth.acknowledged_by, truth.acknowledged_on = incarnation, disk
        if verdict is Verdict.DUPLICATE and name not in truth.applied:
            known = truth.verdicts.get(name)
            if known not in _DROPPED:
                self.fail(f"shard {number} says it knows {info}, which it has not applied and not dropped")
        elif verdict is not None and verdict not in _DROPPED:
            if name not in truth.applied:
                self.fail(f"shard {number} acknowledges {info}, which is not in its log")
            if version < truth.applied[name]:
                self.fail(f"shard {number} answers {info} with version {version}: it is in {truth.applied[name]}")
            truth.acknowledged = max(truth.acknowledged, truth.applied[name])
        if version > len(truth.history):
            self.fail(f"shard {number} serves version {version}; {len(truth.history)} were logged")
        if truth.had(version, value, acknowledged=True) is None:
            expected = truth.states(version)[-1][0]
            self.fail(f"shard {number} serves {value} as version {version} instead of the sum of its log, {expected}")

    def received(self, number: int, member: Member, sequence: int, *, dropped: bool) -> None:
        """A worker has an answer: it must be the one to its push."""
        name = (member.index, member.incarnation, sequence)
        truth = self.truth[number]
        if name not in truth.sent and name not in truth.combined and name not in truth.made:
            self.fail(f"{member} got an answer to push {sequence}, which it has not sent")
        if dropped:
            self.truth[number].dropped.add(name)

    def assumed(self, number: int, info: PushInfo, values: Sequence[float]) -> None:
        """With the answer to a push that is made now, its worker has ``values``, as the shard assumes."""
        self._assumed[number, *name_of(info)] = values

    def holds(self, number: int, member: Member, sequence: int, values: Sequence[float]) -> None:
        """With the answer to its push a worker has ``values``."""
        assumed = self._assumed.pop((number, member.index, member.incarnation, sequence), values)
        if values != assumed:
            self.fail(f"{member} has parameters of shard {number} that differ from those that the shard assumes")

    def acknowledged_by(self, number: int) -> int:
        """The newest incarnation of shard ``number`` that acknowledged a push."""
        return max((truth.acknowledged_by for truth in self.places.of_shard(number % self.places.shards)), default=0)

    # Inner workings

    def _keeps(self, truth: ShardTruth, disk: str) -> bool:
        """Whether everything that was acknowledged is on ``disk``: a standby may lack the last of it, if it may."""
        return self._durable and (not self._early or disk == truth.acknowledged_on)

    def _judge_pull(self, truth: ShardTruth, info: PushInfo) -> None:
        mode, position = truth.mode, info.lowest
        if mode.mode is Mode.SSP:
            bound = Position(position.phase, position.clock - mode.staleness)
        elif mode.mode is Mode.SYNC and position > truth.last_round:
            bound = position
        else:
            return
        behind = truth.clocks.below(bound)
        if behind > mode.backup:
            self.fail(
                f"shard {truth.number} answers a pull for {position} while {behind} participants are below {bound} "
                f"({mode})"
            )

    def _judge_factor(self, truth: ShardTruth, info: PushInfo, decision: PushDecision) -> None:
        """A push alone is multiplied as the rule in force says, or dropped."""
        rule, staleness = self._stale or truth.mode.stale, decision.staleness
        most = len(truth.live) if rule.by_workers else rule.threshold
        expected = 1.0
        if staleness > most and rule.policy is not StalePolicy.ACCEPT:
            expected = 0.0 if rule.policy is StalePolicy.REJECT else max(most, 1) / staleness
        found = decision.scale if decision.verdict is Verdict.APPLY else 0.0
        if found != expected:
            self.fail(
                f"shard {truth.number} multiplies {info}, {staleness} updates old, by {found} instead of {expected}: "
                f"{rule}"
            )
        truth.factors[name_of(info)] = expected

    def _reach(self, truth: ShardTruth, worker: WorkerKey, position: Position) -> None:
        key = (worker.rank, worker.incarnation)
        truth.reached[key] = max(truth.reached.get(key, position), position)

    def _begin_life(self, truth: ShardTruth) -> None:
        """Participants are those in the log, by their latest life, where they ever stood at most."""
        truth.live, truth.taking_part, truth.clocks = {}, {}, Clocks()
        # A shard that has moved slices remembers pushes that changed nothing.
        truth.verdicts = {name: verdict for name, verdict in truth.verdicts.items() if verdict in _DROPPED}
        truth.untouched = not any(update.pushes for update in truth.history)
        truth.last_round = START
        for update in truth.history:
            if update.is_round:
                truth.last_round = max(truth.last_round, update.pushes[0].position)
            for worker in (each.worker for push in update.pushes for each in push.contributions):
                if truth.taking_part.get(worker.rank, 0) <= worker.incarnation:
                    truth.taking_part[worker.rank] = worker.incarnation
        for rank, life in truth.taking_part.items():
            truth.clocks.place(rank, truth.reached.get((rank, life), truth.entry))
