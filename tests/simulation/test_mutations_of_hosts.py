"""The judge is not blind to what hosts do together: with one rule broken on purpose, some seed shows it."""

from dataclasses import replace

from ps_protocol.model.spec import Consistency, Mode
from ps_server.consistency import Tracker
from ps_worker.host import memory
from ps_worker.host.memory import HostMean
from ps_worker.step import host_exchange
from ps_worker.step.shard_stream import ShardStream
from ps_worker.tables import row_payloads
from simulation.plan import Fault, Size
from simulation.swarms import in_order
from tests.simulation.runs import shown

SEEDS = range(40)
ENDS = tuple(Fault(1.5 + 0.4 * number, "host") for number in range(20))
HOSTS = {"per_host": 3, "faults": ENDS, "quiet_at": 10.0, "overlap": False, "durable": True, "think_seconds": 0.2}
ASYNC = {**HOSTS, "consistency": Consistency(Mode.ASYNC), "skipped": 0.0}

TABLES = {**HOSTS, "faults": (), "table": True, "models": 1}

CRASHES = (Fault(1.6 + 0.4 * number, "shard_crash") for number in range(16))
CRASHING = {**ASYNC, "faults": in_order((*ENDS, *CRASHES)), "snapshot_seconds": 0.0}


def test_a_tracker_that_keeps_the_sequence_of_the_sender_alone_applies_a_push_twice(monkeypatch):
    push = Tracker.push

    def forgetful(self, info):
        before = {each.worker.rank: self._participants[each.worker.rank].last_sequence for each in info.others}
        decision = push(self, info)
        for rank, sequence in before.items():
            self._participants[rank].last_sequence = sequence
        return decision

    monkeypatch.setattr(Tracker, "push", forgetful)
    assert shown(("twice", "does not advance"), SEEDS, **ASYNC)


def test_a_tracker_that_takes_a_combined_push_of_which_it_knows_a_part_applies_a_push_twice(monkeypatch):
    monkeypatch.setattr(Tracker, "_apart", lambda self, push: "")
    assert shown("twice", SEEDS, **CRASHING)


def test_a_replay_that_recalls_the_sender_alone_applies_a_push_twice(monkeypatch):
    replay = Tracker.replay

    def forgetful(self, pushes, version, **how):
        replay(self, [replace(push, others=()) for push in pushes], version, **how)

    monkeypatch.setattr(Tracker, "replay", forgetful)
    assert shown(("twice", "does not advance"), SEEDS, **CRASHING)


def test_a_host_that_adds_gradients_up_instead_of_taking_their_mean_is_seen(monkeypatch):
    monkeypatch.setattr(memory, "shares", lambda weights: [1.0] * len(weights))
    assert shown("pushes", SEEDS, Size(faults=()), **HOSTS | {"faults": ()})


def test_a_host_that_adds_rows_up_instead_of_taking_their_mean_is_seen(monkeypatch):
    merge = row_payloads.merge_rows
    monkeypatch.setattr(row_payloads, "merge_rows", lambda parts, _, weights: merge(parts, 1, weights))
    assert shown("rows", SEEDS, Size(faults=()), **TABLES)


def test_rows_of_one_worker_in_place_of_those_of_its_host_are_seen(monkeypatch):
    monkeypatch.setattr(host_exchange, "joined_gradients", lambda workers, weights: workers[0])
    assert shown("rows", SEEDS, Size(faults=()), **TABLES)


def test_a_mean_with_the_weight_of_one_worker_is_seen(monkeypatch):
    send = ShardStream.send

    def as_one(self, push):
        send(self, replace(push, weight=1.0) if push.combined else push)

    monkeypatch.setattr(ShardStream, "send", as_one)
    fixed = {**HOSTS, "faults": (), "per_host": 4, "consistency": Consistency(Mode.SYNC)}
    assert shown("instead of the sum of its log", SEEDS, Size(faults=()), **fixed)


def test_gradients_that_change_while_they_are_added_up_are_seen(monkeypatch):
    take = HostMean.take

    def torn(self, shard, shared, buffers):
        take(self, shard, shared, buffers)
        self.region(shard)[:8] = shared[0].region[:8]

    monkeypatch.setattr(HostMean, "take", torn)
    assert shown(("different updates", "pushes"), SEEDS, Size(faults=()), **HOSTS | {"faults": ()})
