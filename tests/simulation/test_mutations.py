"""The judge is not blind: with one rule broken on purpose in the shipped code, some seed shows it."""

from contextlib import suppress
from types import SimpleNamespace

from ps_protocol.client.membership import Membership
from ps_protocol.cluster.leases import IntervalSet
from ps_protocol.errors import StorageFull, UnknownModel
from ps_protocol.model.spec import Consistency, Mode
from ps_protocol.wire.codecs import ErrorFeedback, PayloadCodec
from ps_server.consistency import Position, Tracker, Verdict
from ps_server.consistency.modes import Ssp, Sync
from ps_server.coordinator import data_leases
from ps_server.coordinator.data_leases import DataLeases
from ps_server.coordinator.jobs import checkpoints
from ps_server.coordinator.jobs.quiesce import Quiesce
from ps_server.coordinator.membership import state as durability_ledger
from ps_server.coordinator.membership.state import Barrier
from ps_server.coordinator.views import Publisher
from ps_server.log import recovery
from ps_server.log.durable import DurableLog
from ps_server.shard import registry
from ps_server.shard.durability import snapshotter
from ps_server.shard.durability.replication import Replication
from ps_server.shard.durability.snapshotter import Snapshotter
from ps_server.shard.standby import follower
from ps_server.shard.step import applier
from ps_server.shard.step.model import ShardModel
from ps_server.state.apply import Replay
from ps_worker.step.pipeline import StepPipeline
from ps_worker.step.shard_stream import ShardStream
from simulation.plan import SMALL_LOG_BYTES, Fault, Size
from tests.simulation.runs import every_second, shown

SEEDS = range(40)
LONG = {"steps": 30, "phases": 1, "data_items": 0}
SHARD_CRASHES = Size(faults=("shard_crash", "stream_break"))


def test_a_tracker_that_forgets_sequences_at_a_restart_applies_a_push_twice(monkeypatch):
    recall = Tracker._recall

    def forgetful(self, worker, sequence, position):
        recall(self, worker, sequence, position)
        self._participants[worker.rank].last_sequence = 0

    monkeypatch.setattr(Tracker, "_recall", forgetful)
    faults = tuple(Fault(2.0 + 0.4 * number, "shard_crash") for number in range(20))
    fixed = {"durable": True, "overlap": False, "think_seconds": 0.1, "delay_seconds": 0.05}
    assert shown("twice", SEEDS, consistency=Consistency(Mode.ASYNC), faults=faults, **fixed)


def test_persisted_state_that_counts_held_pushes_loses_them(monkeypatch):
    push = Tracker.push

    def keeping(self, info):
        decision = push(self, info)
        if decision.verdict is Verdict.HOLD:
            self._participants[info.worker.rank].kept = (info.sequence, info.position)
        return decision

    monkeypatch.setattr(Tracker, "push", keeping)
    fixed = {"consistency": Consistency(Mode.SYNC), "snapshot_seconds": 0.3}
    assert shown("which it has not applied", SEEDS, SHARD_CRASHES, **fixed)


def test_an_answer_before_the_log_is_seen(monkeypatch):
    async def at_once(self, *, quick=False, trace=None):
        version, region = self._applier.newest.version, self._applier.replica.region
        return SimpleNamespace(version=version, region=region, give_back=lambda *, quick: None)

    monkeypatch.setattr(ShardModel, "take_published", at_once)
    assert shown(
        ("not in its log", "instead of the sum of its log"), SEEDS, durable=True, fsync=True, sync_seconds=0.05
    )


def test_an_append_that_writes_nothing_is_seen_at_the_restart(monkeypatch):
    monkeypatch.setattr(DurableLog, "_write", lambda self, pieces, writer: None)
    assert shown(("was acknowledged", "were acknowledged"), SEEDS, SHARD_CRASHES, durable=True)


def test_an_ssp_bound_that_is_off_by_one_is_seen(monkeypatch):
    answered = Ssp.answered

    def lenient(self, clocks, applied):
        bound = answered(self, clocks, applied)
        return Position(bound.phase, bound.clock + 1)

    monkeypatch.setattr(Ssp, "answered", lenient)
    assert shown("answers a pull", SEEDS, Size(faults=()), consistency=Consistency(Mode.SSP, staleness=1))


def test_a_round_without_one_of_its_workers_is_seen(monkeypatch):
    monkeypatch.setattr(Sync, "due", lambda self, clocks: clocks.frontier(self.backup + 1))
    assert shown("had not reached it", SEEDS, Size(faults=()), consistency=Consistency(Mode.SYNC))


def test_a_push_that_is_decided_twice_is_seen(monkeypatch):
    push = Tracker.push

    def trusting(self, info):
        participant = self._participants.get(info.worker.rank)
        if participant and participant.last_sequence == info.sequence:
            participant.last_sequence -= 1
            self._clocks.place(info.worker.rank, Position(info.position.phase, info.position.clock - 1))
        return push(self, info)

    monkeypatch.setattr(Tracker, "last_sequence", lambda self, worker: 0)
    monkeypatch.setattr(Tracker, "push", trusting)
    fixed = {"consistency": Consistency(Mode.ASYNC), "faults": every_second("stream_break")}
    assert shown("twice", SEEDS, Size(faults=("stream_break",)), **fixed)


def write_one_in_five(monkeypatch):
    write = Publisher.write
    told = [0]

    def late(self):
        told[0] += 1
        if told[0] % 5 == 0:
            write(self)

    monkeypatch.setattr(Publisher, "write", late)


def test_a_coordinator_that_tells_before_it_writes_is_seen(monkeypatch):
    write_one_in_five(monkeypatch)
    assert shown(
        "the coordinator restarted at revision", SEEDS, Size(faults=("coordinator_crash", "worker_crash")), data_items=0
    )


def test_leases_that_are_told_before_they_are_written_are_seen(monkeypatch):
    persisted_state = DataLeases.persisted_state
    before = []

    def late(self):
        before.append(persisted_state(self))
        return before[max(0, len(before) - 2)]

    monkeypatch.setattr(DataLeases, "persisted_state", late)
    faults = every_second("coordinator_crash")
    assert shown("is leased", SEEDS, data_items=36, faults=faults)


def test_an_old_copy_of_a_data_directory_that_is_let_in_is_seen(monkeypatch):
    monkeypatch.setattr(durability_ledger, "check_state", lambda *brought: None)
    kinds = ("old_copy", "shard_crash", "old_copy", "old_copy", "old_copy", "old_copy")
    faults = tuple(Fault(2.0 + 2 * at, kind) for at, kind in enumerate(kinds))
    # One seed in thirteen has a fault at a time when it matters.
    assert shown("was let in with state", range(80), durable=True, faults=faults)


def test_a_barrier_that_opens_early_is_seen(monkeypatch):
    monkeypatch.setattr(Barrier, "_missing", lambda self, awaited: ())
    assert shown("opened without", SEEDS, Size(faults=()), phases=2)


def test_data_that_is_leased_twice_is_seen(monkeypatch):
    take = IntervalSet.take

    def generous(self, most, batch=1):
        span = take(self, most, batch)
        self.add(span)
        return span

    monkeypatch.setattr(IntervalSet, "take", generous)
    assert shown("is leased to", SEEDS, Size(faults=()), data_items=36)


def test_an_epoch_waits_for_ever_for_items_of_which_their_holder_has_not_heard(monkeypatch):
    """A request for data comes when its repetition was answered with nothing to lease."""
    monkeypatch.setattr(data_leases, "_free_unheard", lambda data, holder, ask: 0)
    fixed = {"data_items": 36, "calls_lost": 0.3, "calls_late": 0.9, "ends_at": 40.0}
    assert shown("have not finished", range(150), Size(faults=()), **fixed)


def test_workers_that_look_at_one_shard_only_wait_for_each_other_for_ever(monkeypatch):
    def in_order(self, receive, position, answers=None):
        for stream in self.streams:
            while not self.persistently(stream, lambda stream=stream: receive(stream)):
                pass

    monkeypatch.setattr(StepPipeline, "_in_turns", in_order)
    size = Size(faults=("shard_crash", "stream_break", "disk_full"))
    fixed = {"skipped": 0.3, "consistency": Consistency(Mode.SYNC), "ends_at": 120.0}
    assert shown("have not finished", range(150), size, **fixed)


# Bugs that were found and mended (docs/simulation.md): each comes back with its mend taken out. Seeds 558, 1995 and 541
# are the test above.

SNAPSHOT_CRASHES = {
    "durable": False,
    "snapshot_seconds": 0.7,
    **LONG,
    "think_seconds": 0.2,
    "sync_seconds": 0.05,
    "quiet_at": 12.0,
    "faults": tuple(Fault(2.0 + 0.5 * number, "snapshot_crash") for number in range(16)),
}


def test_a_gap_before_the_newest_snapshot_is_taken_for_damage(monkeypatch):
    needed = recovery._needed

    def with_those_before(segments, snapshot, *, log_goes_on):
        return segments if snapshot is not None else needed(segments, snapshot, log_goes_on=log_goes_on)

    monkeypatch.setattr(recovery, "_needed", with_those_before)
    assert shown("DamagedData", SEEDS[13:], **SNAPSHOT_CRASHES)


def test_what_is_left_of_a_first_snapshot_is_taken_for_damage(monkeypatch):
    needed = recovery._needed
    monkeypatch.setattr(
        recovery, "_needed", lambda segments, snapshot, *, log_goes_on: needed(segments, snapshot, log_goes_on=True)
    )
    # Training begins after about a second, when every worker has the first values.
    early = tuple(Fault(1.2 + 0.25 * number, "snapshot_crash") for number in range(12))
    assert shown("record 1 and those after it", SEEDS, **SNAPSHOT_CRASHES | {"quiet_at": 6.0, "faults": early})


def test_replayed_records_that_make_no_snapshot_due_leave_a_log_at_its_limit_for_ever(monkeypatch):
    begin, due = Snapshotter.__init__, Snapshotter._due

    def beginning(self, folder, log, *others, **rule):
        begin(self, folder, log, *others, **rule)
        self.replayed = log.number

    monkeypatch.setattr(Snapshotter, "__init__", beginning)
    monkeypatch.setattr(Snapshotter, "_due", lambda self: self._log.number > self.replayed and due(self))
    fixed = {
        "durable": True,
        "consistency": Consistency(Mode.ASYNC),
        "log_bytes": SMALL_LOG_BYTES,
        "snapshot_seconds": 0.0,
        **LONG,
        "think_seconds": 0.2,
        "quiet_at": 12.0,
        "ends_at": 40.0,
    }
    faults = tuple(Fault(2.0 + 0.5 * number, "full_restart") for number in range(16))
    assert shown("have not finished", SEEDS, faults=faults, **fixed)


def test_a_model_that_is_placed_without_room_for_its_record_is_seen(monkeypatch):
    reserve = DurableLog.reserve

    async def unreserved(self, nbytes):
        with suppress(StorageFull):
            await reserve(self, nbytes)

    monkeypatch.setattr(DurableLog, "reserve", unreserved)
    faults = tuple(Fault(0.3, "disk_full") for _ in range(8))
    assert shown("InternalError", SEEDS, durable=True, faults=faults)


def test_a_shard_that_does_not_know_a_model_before_the_coordinator_answers_ends_its_workers(monkeypatch):
    unheard = registry._unheard

    def undeclared(shard, name, epoch, known):
        return unheard(shard, name, epoch, known) if known else UnknownModel(f"model '{name}' is not declared")

    monkeypatch.setattr(registry, "_unheard", undeclared)
    monkeypatch.setattr("ps_server.shard.times.UNKNOWN_SECONDS", 0.05)
    faults = tuple(Fault(2.0 + number, "shard_crash") for number in range(8))
    assert shown("is not declared", SEEDS, durable=True, standby=True, faults=faults)


def test_a_worker_that_does_not_say_how_far_it_has_come_stands_at_different_places(monkeypatch):
    opened = ShardStream.open
    monkeypatch.setattr(ShardStream, "open", lambda self, phase, clock=None: opened(self, phase, None))
    faults = tuple(Fault(1.5 + 0.5 * number, "shard_crash") for number in range(16))
    fixed = {
        "skipped": 0.6,
        "consistency": Consistency(Mode.SSP, staleness=0),
        "durable": True,
        "overlap": False,
        "ends_at": 120.0,
    }
    assert shown(("its clock", "have not finished"), SEEDS[5:], faults=faults, **fixed)


def test_a_worker_that_waits_some_seconds_only_to_say_that_it_has_finished_is_seen(monkeypatch):
    leave = Membership.leave
    monkeypatch.setattr(Membership, "leave", lambda self, reason="", seconds=0.0: leave(self, reason, 5.0))
    faults = tuple(Fault(4.0 + 0.5 * number, "coordinator_crash") for number in range(16))
    assert shown("has not heard of it", SEEDS, faults=faults, quiet_at=40.0, ends_at=120.0, think_seconds=0.5)


def test_an_answer_before_the_standby_has_the_push_is_seen_when_it_takes_over(monkeypatch):
    monkeypatch.setattr(Replication, "covers", lambda self, number, *, always=False: True)
    faults = tuple(Fault(2.0 + 0.5 * number, "shard_crash") for number in range(12))
    fixed = {"durable": True, "standby": True, "delay_seconds": 0.05, "think_seconds": 0.1, "quiet_at": 12.0}
    assert shown("was acknowledged", SEEDS, faults=faults, **fixed, **LONG)


def test_a_standby_that_does_not_apply_what_it_follows_is_seen_when_it_takes_over(monkeypatch):
    class Forgetful(Replay):
        def _update(self, model, number, record):
            update = record.update(model.gradients, model.options)
            model.tracker.replay(update.pushes, update.version, is_round=update.is_round)

    monkeypatch.setattr(follower, "Replay", Forgetful)
    faults = tuple(Fault(2.0 + 0.5 * number, "shard_crash") for number in range(12))
    assert shown("with values", SEEDS, durable=True, standby=True, acknowledged_after=False, faults=faults)


def test_a_round_that_adds_rows_up_instead_of_taking_their_mean_is_seen(monkeypatch):
    combined = applier.combined_rows
    monkeypatch.setattr(
        applier, "combined_rows", lambda pushes, tables, _, **how: combined(pushes, tables, [1.0] * len(pushes), **how)
    )
    assert shown("row ", SEEDS, Size(faults=()), table=True, overlap=False, consistency=Consistency(Mode.SYNC))


def test_rows_that_a_snapshot_leaves_out_are_missed_at_the_restart(monkeypatch):
    monkeypatch.setattr(snapshotter, "save_group", lambda saves, wanted: [])
    faults = tuple(Fault(3.0 + 0.5 * number, "shard_crash") for number in range(10))
    fixed = {"table": True, "overlap": False, "durable": True, "snapshot_seconds": 0.7}
    assert shown("restored row", SEEDS, faults=faults, **fixed)


def test_a_format_that_forgets_what_it_left_out_is_seen(monkeypatch):
    encode = ErrorFeedback.encode

    def forgetful(self, *arguments):
        encode(self, *arguments)
        self.clear()

    monkeypatch.setattr(ErrorFeedback, "encode", forgetful)
    assert shown("instead of the sum of its log", SEEDS, Size(faults=()), wire="topk:0.3")


def test_differences_that_a_worker_does_not_add_are_seen(monkeypatch):
    monkeypatch.setattr(PayloadCodec, "accumulate", lambda self, payload, runs, region: None)
    assert shown("that the shard assumes", SEEDS, Size(faults=()), wire="int8")


def test_a_checkpoint_of_shards_that_have_not_caught_up_is_seen(monkeypatch):
    def where_they_are(self, maps):
        return {number: [each for each in parts if each.model in maps] for number, parts in self.paused.items()}

    monkeypatch.setattr(Quiesce, "targets", where_they_are)
    monkeypatch.setattr(checkpoints, "check_same_position", lambda reports: None)
    fixed = {"consistency": Consistency(Mode.ASYNC), "think_seconds": 0.1, "delay_seconds": 0.05}
    assert shown(
        "a checkpoint has push", SEEDS, faults=tuple(Fault(2.0 + 0.5 * n, "checkpoint") for n in range(10)), **fixed
    )
