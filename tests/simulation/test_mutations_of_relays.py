"""The judge is not blind to relays: with one rule broken in the shipped code, some seed shows it."""

from dataclasses import replace

from ps_protocol.errors import Retryable
from ps_protocol.weights import reader
from ps_protocol.weights.memory import VersionMemory
from ps_server.coordinator.publications import Publications
from ps_server.relay import following
from ps_server.relay.following import RelayReader, RelayStep
from simulation.plan import Fault, Size
from tests.simulation.runs import shown

SEEDS = range(40)
NO_FAULTS = Size(faults=())
RELAY = {"readers": 2, "relayed": 2, "keep_versions": 3, "relay_keeps": 3, "think_seconds": 0.2, "durable": True}


def test_a_relay_that_stays_with_a_job_that_another_one_has_replaced_is_seen(monkeypatch):
    after = following.after

    def staying(error, *, is_first):
        step = after(error, is_first=is_first)
        return RelayStep.TRY_AGAIN if step is RelayStep.BEGIN_AGAIN else step

    monkeypatch.setattr(following, "after", staying)
    faults = (*(Fault(2.0 + 0.5 * number, "checkpoint") for number in range(4)), Fault(5.0, "new_job"))
    fixed = {**RELAY, "faults": faults, "quiet_at": 6.0, "ends_at": 40.0, "releases": False}
    assert shown("readers have not finished", SEEDS, **fixed)


def test_a_relay_that_takes_a_job_that_is_away_for_a_finished_one_is_seen(monkeypatch):
    following_on = RelayReader.next

    def ending(self):
        self._what = replace(self._what, patience_seconds=1.0)
        try:
            return following_on(self)
        except Retryable:
            return None

    monkeypatch.setattr(RelayReader, "next", ending)
    monkeypatch.setattr(reader, "WAIT_SECONDS", 1.0)
    away = tuple(Fault(float(second), "coordinator_crash") for second in (3, 6, 9))
    fixed = {**RELAY, "faults": away, "quiet_at": 12.0, "steps": 30, "phases": 1, "data_items": 0}
    assert shown("is told that the job is finished", SEEDS, **fixed)


def test_a_relay_that_uses_the_memory_of_a_version_that_it_serves_is_seen(monkeypatch):
    class Same(VersionMemory):
        room = None

        def take(self, size):
            self.room = self.room or super().take(size)
            return self.room

    monkeypatch.setattr(following, "VersionMemory", Same)
    assert shown("was refused: DamagedData", SEEDS, NO_FAULTS, **RELAY)


def test_a_relay_that_keeps_fewer_versions_than_it_should_is_seen(monkeypatch):
    adopt = Publications.adopt
    monkeypatch.setattr(
        Publications, "adopt", lambda self, name, version, keep, *now: adopt(self, name, version, 1, *now)
    )
    assert shown("is not at the relay, which keeps", SEEDS, NO_FAULTS, **RELAY)
