"""Random lives of a job, against the naive rules: nothing twice, nothing lost, the bound kept, nobody stuck."""

from __future__ import annotations

import pickle
from dataclasses import dataclass, replace

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ps_protocol.model.spec import Consistency, Mode, StalePolicy
from ps_server.consistency import ParkedPulls, Position, PushInfo, Round, Tracker, Verdict, WorkerKey
from ps_server.consistency.events import START
from tests.support.length import examples

from .reference import Reference

RANKS = 4

consistencies = st.builds(
    Consistency,
    st.sampled_from(Mode),
    staleness=st.integers(0, 2),
    backup=st.integers(0, 2),
    grace_seconds=st.sampled_from([0.0, 0.0, 3.0]),
    stale_policy=st.sampled_from(StalePolicy),
    stale_threshold=st.integers(0, 3),
    stale_by_workers=st.booleans(),
)
which = st.integers(0, 11)


@dataclass(eq=False)
class Worker:
    """A worker as the SDK behaves: one push at a time unless it sends ahead, then a pull; barriers in between."""

    key: WorkerKey
    #: Barriers passed.
    phase: int
    position: Position | None = None
    sequence: int = 0
    pulled: int = 0
    #: Its pull is parked.
    waits: bool = False
    in_barrier: bool = False
    #: Its last push; of a combined one that it sent, all of it.
    last: PushInfo | None = None
    #: Where its pull counts as standing: in a combined push, where the one stands that is furthest.
    asks: Position = START


class JobLife(RuleBasedStateMachine):
    """Drives a Tracker and the Reference alike, and plays shard, workers and coordinator around them."""

    @initialize(consistency=consistencies, workers=st.integers(0, RANKS))
    def start(self, consistency: Consistency, workers: int) -> None:
        self.tracker, self.reference = Tracker(consistency), Reference(consistency)
        self.parked: ParkedPulls[Worker] = ParkedPulls()
        self.workers: dict[int, Worker] = {}
        self.phase = self.incarnations = 0
        self.now = 0.0
        self.applied: list[tuple[WorkerKey, int]] = []
        self.owed: list[PushInfo] = []
        #: Pushes applied, and those that each of their workers had to make by itself.
        self.pushes_applied = self.separate = 0
        for rank in range(workers):
            self.join(rank)

    # What the coordinator does.

    def publish_members(self) -> None:
        live = {rank: worker.key.incarnation for rank, worker in self.workers.items()}
        self.tracker.members(live)
        self.reference.members(live)
        self.settle()
        self.open_barrier()

    def open_barrier(self) -> None:
        if self.workers and all(worker.in_barrier for worker in self.workers.values()):
            self.phase += 1
            for worker in self.workers.values():
                worker.phase, worker.in_barrier = self.phase, False
                if worker.position:
                    worker.position = Position(self.phase, 0)

    @rule(rank=st.integers(0, RANKS - 1))
    def join(self, rank: int) -> None:
        if rank in self.workers:
            self.parked.discard(self.workers[rank])
        self.incarnations += 1
        self.workers[rank] = Worker(WorkerKey(rank, self.incarnations), self.phase)
        self.publish_members()

    @precondition(lambda self: self.workers)
    @rule(which=which)
    def leave(self, which: int) -> None:
        worker = self.workers.pop(sorted(self.workers)[which % len(self.workers)])
        self.parked.discard(worker)
        self.publish_members()

    @rule(consistency=consistencies)
    def configure(self, consistency: Consistency) -> None:
        self.tracker.configure(consistency)
        self.reference.consistency = consistency
        self.settle()

    @rule(seconds=st.sampled_from([0.5, 1.0, 2.0, 5.0]))
    def time_passes(self, seconds: float) -> None:
        """As a shard's timer does: nothing is looked at before a grace time ends."""
        until = self.now + seconds
        while self.tracker.grace_ends is not None and self.tracker.grace_ends <= until:
            self.now = self.tracker.grace_ends
            self.settle()
        self.now = until

    # What workers do.

    def pick(self, which: int) -> Worker | None:
        """Some worker that is not in the barrier, attached."""
        free = [worker for _, worker in sorted(self.workers.items()) if not worker.in_barrier]
        if not free:
            return None
        worker = free[which % len(free)]
        if worker.position is None:
            self.attach(worker)
        return worker

    def attach(self, worker: Worker) -> None:
        position = self.tracker.attach(worker.key, worker.phase)
        assert position == self.reference.attach(worker.key, worker.phase)
        assert position.phase == worker.phase + worker.in_barrier
        worker.position = worker.position or position
        self.settle()

    @rule(which=which)
    def reconnect(self, which: int) -> None:
        """The stream breaks; the worker opens a new one and repeats its last push."""
        worker = self.workers[sorted(self.workers)[which % len(self.workers)]] if self.workers else None
        if worker is None:
            return
        self.parked.discard(worker)
        self.attach(worker)
        if worker.last is not None:
            verdict = self.tracker.push(worker.last).verdict
            assert verdict is self.reference.push(worker.last)[0]
            if verdict is Verdict.SEPARATE:
                assert worker.last.others, "another of its workers is gone"
                worker.last = replace(worker.last, others=())
                verdict = self.tracker.push(worker.last).verdict
                assert self.reference.push(worker.last)[0] is Verdict.DUPLICATE
            assert verdict is Verdict.DUPLICATE
        if worker.waits:
            self.parked.park(worker.asks, worker)
        self.settle()

    @rule(which=which, ahead=st.booleans(), skipped=st.integers(0, 4).map(lambda n: n == 0))
    def push(self, which: int, ahead: bool, skipped: bool) -> None:
        worker = self.pick(which)
        if worker is not None and not worker.waits:
            self.step(worker, ahead, skipped)

    @rule(chosen=st.lists(which, min_size=2, max_size=RANKS), how=st.sampled_from(["whole", "skipped", "one alone"]))
    def push_together(self, chosen: list[int], how: str) -> None:
        """Workers of one host push as one; or one of them has done so by itself, as when the sender was frozen."""
        found = [worker for each in chosen if (worker := self.pick(each)) is not None and not worker.waits]
        group = list(dict.fromkeys(found))
        if len(group) < 2:
            return
        pushes = [self.next_push(worker, skipped=how == "skipped") for worker in group]
        if how == "one alone":
            self.send(group[chosen[0] % len(group)], pushes[chosen[0] % len(group)])
        sender, *others = pushes
        lowest = min(each.pulled_version for each in pushes)
        whole = replace(sender, others=tuple(others), pulled_version=lowest)
        if self.decide(whole) is Verdict.SEPARATE:
            for worker, push in zip(group, pushes, strict=True):
                if not worker.waits:
                    self.send(worker, push)
            return
        for worker, push in zip(group, pushes, strict=True):
            worker.last = whole if worker is group[0] else push
            self.park(worker, whole.lowest)
            if self.tracker.collects:
                worker.position = self.tracker.resume(push.position)
        self.settle()

    def next_push(self, worker: Worker, skipped: bool = False) -> PushInfo:
        assert worker.position is not None
        worker.sequence += 1
        worker.position = Position(worker.phase, worker.position.clock + 1)
        return PushInfo(worker.key, worker.sequence, worker.position, worker.pulled, skipped)

    def step(self, worker: Worker, ahead: bool = False, skipped: bool = False) -> None:
        self.send(worker, self.next_push(worker, skipped), ahead)

    def send(self, worker: Worker, push: PushInfo, ahead: bool = False) -> None:
        verdict = self.decide(push)
        worker.last = push
        if verdict is Verdict.LATE:
            worker.position = self.tracker.resume(push.position)
        if not ahead:
            self.park(worker, push.position)
        self.settle()

    def park(self, worker: Worker, position: Position) -> None:
        worker.waits, worker.asks = True, position
        self.parked.park(position, worker)

    def decide(self, push: PushInfo) -> Verdict:
        decision = self.tracker.push(push)
        assert (decision.verdict, decision.scale, decision.staleness) == self.reference.push(push)
        self.separate += decision.verdict is Verdict.SEPARATE
        if decision.verdict is Verdict.APPLY:
            self.apply(push)
        elif decision.verdict is Verdict.HOLD:
            self.owed.append(push)
        return decision.verdict

    @rule(which=which)
    def arrive(self, which: int) -> None:
        worker = self.pick(which)
        if worker is not None and not worker.waits:
            self.enter_barrier(worker)

    def enter_barrier(self, worker: Worker) -> None:
        self.tracker.arrive(worker.key, worker.phase)
        self.reference.arrive(worker.key, worker.phase)
        worker.in_barrier = True
        self.settle()
        self.open_barrier()

    # What the shard does after each event.

    def settle(self) -> None:
        rounds = self.tracker.take_ready(self.now)
        assert [(r.position, list(r.contributions)) for r in rounds] == self.reference.take_ready(self.now)
        for taken in rounds:
            self.check_round(taken)
            for push in taken.contributions:
                self.owed.remove(push)
                self.apply(push)
        waiting = [worker for worker in self.workers.values() if worker.waits]
        due = {worker.key for worker in waiting if self.reference.may_pull(worker.asks)}
        released = [worker for worker in self.parked.release(self.tracker) if worker.waits]
        assert {worker.key for worker in released} == due
        for worker in released:
            self.answer(worker)

    def apply(self, push: PushInfo) -> None:
        self.pushes_applied += 1
        for each in push.contributions:
            assert (each.worker, each.sequence) not in self.applied
            self.applied.append((each.worker, each.sequence))

    def check_round(self, taken: Round) -> None:
        """Never before its quorum. Without backup workers, it has the push of each live worker that made one, once."""
        consistency = self.tracker.consistency
        if consistency.mode is Mode.SYNC:
            below = [s for s in self.tracker.clocks() if s.position < taken.position]
            assert len(below) <= consistency.backup
            waited = self.reference.waited(taken.position)
            assert not below or not consistency.grace_seconds or waited >= consistency.grace_seconds
        if self.tracker.consistency.mode is not Mode.SYNC or self.tracker.consistency.backup:
            return
        standing = [s for s in self.tracker.clocks() if s.position <= taken.position]
        assert all(s.position == taken.position for s in standing)
        workers = [each.worker for push in taken.contributions for each in push.contributions]
        assert len(set(workers)) == len(workers)
        owing = {each.worker for push in self.owed for each in push.contributions} & {s.worker for s in standing}
        assert owing <= set(workers)

    def answer(self, worker: Worker) -> None:
        """Ho et al.: a worker that gets parameters at clock c is at most s ahead of everyone."""
        phase, clock = worker.asks
        if self.tracker.consistency.mode is Mode.SSP:
            bound = Position(phase, clock - self.tracker.consistency.staleness)
            assert all(standing.position >= bound for standing in self.tracker.clocks())
        worker.waits = False
        worker.pulled = self.tracker.version

    # What must hold.

    @rule(steps=st.integers(1, 3), changes=st.lists(st.tuples(st.integers(0, 20), consistencies), max_size=3))
    def everyone_goes_on(self, steps: int, changes: list[tuple[int, Consistency]]) -> None:
        """All make ``steps`` more and enter the barrier while the mode changes: it opens, nobody is left waiting."""
        left = {worker.key: steps for worker in self.workers.values()}
        opens_at = self.phase + 1
        for moment in range(60 * len(left) + 60):
            for consistency in [c for when, c in changes if when == moment]:
                self.configure(consistency)
            if self.phase == opens_at or not left:
                break
            if self.tracker.grace_ends is not None and moment % 2:
                self.time_passes(self.tracker.grace_ends - self.now)
            able = [worker for worker in self.workers.values() if not worker.in_barrier and not worker.waits]
            if not able and self.tracker.grace_ends is not None:
                continue
            parked = [self.tracker.blocker(worker.asks) for worker in self.parked]
            assert able, f"everyone waits: {parked}"
            worker = able[moment % len(able)]
            if worker.position is None:
                self.attach(worker)
            if left[worker.key]:
                left[worker.key] -= 1
                self.step(worker)
            else:
                self.enter_barrier(worker)
        assert self.phase == opens_at or not left
        assert not any(worker.waits for worker in self.workers.values())

    @invariant()
    def both_agree(self) -> None:
        standing = {s.worker: s.position for s in self.tracker.clocks()}
        assert standing == self.reference.standing()
        assert self.tracker.version == len(self.reference.updates)
        assert self.tracker.applied == self.reference.taken[-1]
        assert sorted(self.applied) == sorted(
            (each.worker, each.sequence) for u in self.reference.updates for p in u for each in p.contributions
        )
        for worker in self.workers.values():
            if worker.key in standing:
                assert self.tracker.last_sequence(worker.key) == worker.sequence

    @invariant()
    def a_blocked_pull_has_a_reason(self) -> None:
        for phase in (self.phase, self.phase + 1):
            for clock in (0, 1, 2, 5):
                position = Position(phase, clock)
                assert self.tracker.may_pull(position) == self.reference.may_pull(position)
                assert (self.tracker.blocker(position) is None) == self.tracker.may_pull(position)

    @invariant()
    def a_round_with_its_quorum_waits_for_its_grace_time_at_most(self) -> None:
        consistency, lowest = self.tracker.consistency, min((p.position for p in self.reference.held), default=None)
        behind = len(self.reference.below(lowest)) if lowest else 0
        has_quorum = lowest is not None and behind <= consistency.backup
        assert (self.tracker.grace_ends is not None) == has_quorum
        assert self.tracker.grace_ends is None or self.now <= self.tracker.grace_ends

    @invariant()
    def counts_add_up(self) -> None:
        outcomes = self.tracker.counts.outcomes
        accepted = len(self.reference.accepted)
        decided = sum(outcomes.values()) - outcomes["duplicate"] - outcomes["separate"]
        assert decided + len(self.owed) == accepted
        assert outcomes["applied"] == self.pushes_applied == sum(self.tracker.counts.staleness)
        assert outcomes["separate"] >= self.separate

    @invariant()
    def memory_is_bounded(self) -> None:
        assert len(pickle.dumps(self.tracker)) < 3000 + 300 * (RANKS + len(self.owed))

    def teardown(self) -> None:
        """When everyone has left, every accepted push has been applied."""
        if hasattr(self, "tracker"):
            for worker in self.workers.values():
                self.parked.discard(worker)
            self.workers.clear()
            self.publish_members()
            assert not self.owed


TestJobLife = JobLife.TestCase
TestJobLife.settings = examples(80, stateful_step_count=40)
