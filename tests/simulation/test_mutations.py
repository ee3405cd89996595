"""The judge is not blind: with one rule broken on purpose, some seed shows it."""

import ps_server.coordinator.kept_state as kept_state
from ps_protocol.model import Consistency, Mode
from ps_server.consistency import Position, Tracker, Verdict
from ps_server.consistency.rules import Ssp, Sync
from ps_server.coordinator.barrier import Barrier
from ps_server.coordinator.spans import SpanSet
from simulation.coordinator import SimCoordinator
from simulation.disk import DiskLog
from simulation.plan import Size
from simulation.shard import SimShard
from simulation.worker import SimWorker
from tests.simulation.runs import every_second, first_violation

SEEDS = range(40)
SHARD_CRASHES = Size(faults=("shard_crash", "stream_break"))


def test_a_tracker_that_forgets_sequences_at_a_restart_applies_a_push_twice(monkeypatch):
    recall = Tracker._recall

    def forgetful(self, worker, sequence, position):
        recall(self, worker, sequence, position)
        self._participants[worker.rank].last_sequence = 0

    monkeypatch.setattr(Tracker, "_recall", forgetful)
    assert "twice" in first_violation(SEEDS, SHARD_CRASHES, consistency=Consistency(Mode.ASYNC))


def test_a_memento_with_held_pushes_loses_them(monkeypatch):
    push = Tracker.push

    def keeping(self, info):
        decision = push(self, info)
        if decision.verdict is Verdict.HOLD:
            self._participants[info.worker.rank].kept = (info.sequence, info.position)
        return decision

    monkeypatch.setattr(Tracker, "push", keeping)
    fixed = {"consistency": Consistency(Mode.SYNC), "snapshot_seconds": 0.3}
    assert "which it has not applied" in first_violation(SEEDS, SHARD_CRASHES, **fixed)


def test_an_answer_before_the_log_is_seen(monkeypatch):
    monkeypatch.setattr(SimShard, "_after_lane", lambda self, then: then())
    assert "not in its log" in first_violation(SEEDS, lane_seconds=0.01)


def test_an_append_that_writes_nothing_is_seen_at_the_restart(monkeypatch):
    monkeypatch.setattr(DiskLog, "append", lambda self, entry, torn=None: 0)
    assert "acknowledged" in first_violation(SEEDS, SHARD_CRASHES, durable=True)


def test_an_ssp_bound_that_is_off_by_one_is_seen(monkeypatch):
    answered = Ssp.answered

    def lenient(self, clocks, applied):
        bound = answered(self, clocks, applied)
        return Position(bound.phase, bound.clock + 1)

    monkeypatch.setattr(Ssp, "answered", lenient)
    found = first_violation(SEEDS, Size(faults=()), consistency=Consistency(Mode.SSP, staleness=1))
    assert "answers a pull" in found


def test_a_round_without_one_of_its_workers_is_seen(monkeypatch):
    monkeypatch.setattr(Sync, "due", lambda self, clocks: clocks.frontier(self.backup + 1))
    found = first_violation(SEEDS, Size(faults=()), consistency=Consistency(Mode.SYNC))
    assert "had not reached it" in found


def test_a_push_that_is_decided_twice_is_seen(monkeypatch):
    push = Tracker.push

    def trusting(self, info):
        participant = self._participants.get(info.worker.rank)
        if participant and participant.last_sequence == info.sequence:
            participant.last_sequence -= 1
            self._clocks.place(info.worker.rank, Position(info.position.phase, info.position.clock - 1))
        return push(self, info)

    monkeypatch.setattr(Tracker, "push", trusting)
    fixed = {"consistency": Consistency(Mode.ASYNC), "faults": every_second("stream_break")}
    assert "twice" in first_violation(SEEDS, Size(faults=("stream_break",)), **fixed)


def test_a_coordinator_that_tells_before_it_writes_is_seen(monkeypatch):
    write = SimCoordinator._write_down

    def late(self):
        if self._scheduler.random.random() < 0.2:
            write(self)

    monkeypatch.setattr(SimCoordinator, "_write_down", late)
    found = first_violation(SEEDS, Size(faults=("coordinator_crash", "worker_crash")))
    assert "was given to" in found or "the coordinator restarted" in found


def test_an_old_copy_of_a_data_directory_that_is_let_in_is_seen(monkeypatch):
    monkeypatch.setattr(kept_state, "check_state", lambda *brought: None)
    size = Size(faults=("shard_crash", "old_copy"))
    found = first_violation(SEEDS, size, durable=True)
    assert "was let in with state" in found


def test_a_barrier_that_opens_early_is_seen(monkeypatch):
    monkeypatch.setattr(Barrier, "_missing", lambda self, awaited: ())
    assert "opened without" in first_violation(SEEDS, Size(faults=()), phases=2)


def test_data_that_is_leased_twice_is_seen(monkeypatch):
    take = SpanSet.take

    def generous(self, most):
        span = take(self, most)
        self.add(span)
        return span

    monkeypatch.setattr(SpanSet, "take", generous)
    assert "is leased to" in first_violation(SEEDS, Size(faults=()), data_items=36)


def test_workers_that_look_at_one_shard_only_wait_for_each_other_for_ever(monkeypatch):
    monkeypatch.setattr(SimWorker, "_sign_of_life", lambda worker, push: None)
    size = Size(faults=("shard_crash", "stream_break", "disk_full"))
    fixed = {"skipped": 0.3, "consistency": Consistency(Mode.SYNC)}
    assert "have not finished" in first_violation(range(150), size, **fixed)
