"""The judge is not blind to published weights: with one rule broken in the shipped code, some seed shows it."""

from dataclasses import replace

from ps_protocol.model.spec import Consistency, Mode
from ps_protocol.weights.reader import VersionReader
from ps_server.coordinator.driver import Driver
from ps_server.coordinator.jobs import publish_runner
from ps_server.coordinator.jobs.quiesce import Quiesce
from ps_server.coordinator.publications import Publications
from ps_server.coordinator.views import Publisher
from ps_server.shard.weights import HeldWeights
from simulation.plan import Fault, Size
from simulation.runtime.wait import sleep
from tests.simulation.runs import every_second, shown

SEEDS = range(40)
NO_FAULTS = Size(faults=())
READERS = {"readers": 2, "keep_versions": 3, "think_seconds": 0.2, "durable": True}
ASYNC = {**READERS, "consistency": Consistency(Mode.ASYNC), "skipped": 0.0}


def test_a_shard_that_holds_the_newest_parameters_in_place_of_those_of_the_cut_is_seen(monkeypatch):
    take, write = HeldWeights.take, HeldWeights._write
    models = {}

    async def taking(self, model, *version):
        models[self] = model
        await take(self, model, *version)

    def later(self, path, manifest, region, copied):
        sleep(0.3)
        return write(self, path, manifest, models[self]._applier.replica.region, copied)

    monkeypatch.setattr(HeldWeights, "take", taking)
    monkeypatch.setattr(HeldWeights, "_write", later)
    assert shown("of the weights with", SEEDS, NO_FAULTS, **ASYNC)


def test_shards_that_publish_without_having_caught_up_are_seen(monkeypatch):
    def where_they_are(self, maps):
        return {number: [each for each in parts if each.model in maps] for number, parts in self.paused.items()}

    monkeypatch.setattr(Quiesce, "targets", where_they_are)
    monkeypatch.setattr(publish_runner, "check_same_position", lambda reports: None)
    assert shown("applied it later", SEEDS, NO_FAULTS, delay_seconds=0.05, **ASYNC)


def test_a_coordinator_that_commits_before_all_shards_have_answered_is_seen(monkeypatch):
    all_of = publish_runner.all_of

    async def all_but_one(calls):
        return (await all_of(calls))[1:]

    monkeypatch.setattr(publish_runner, "all_of", all_but_one)
    assert shown("has pieces of shards", SEEDS, NO_FAULTS, **READERS)


def test_a_coordinator_that_tells_of_a_version_before_it_is_written_is_seen(monkeypatch):
    write, told = Publisher.write, [0]

    def late(self):
        told[0] += 1
        if told[0] % 5 == 0:
            write(self)

    monkeypatch.setattr(Publisher, "write", late)
    faults = every_second("coordinator_crash")
    assert shown("of the weights, it had told", SEEDS, faults=faults, publish_waits=True, data_items=0, **READERS)


def test_a_version_that_no_journal_has_and_that_counts_as_known_is_seen(monkeypatch):
    def planned(self, rank, incarnation, ask):
        return self._state.publications.plan(ask, 1)

    monkeypatch.setattr(Driver, "plan_publication", planned)
    kinds = ("journal_refuses", "coordinator_crash")
    faults = tuple(Fault(1.2 + 0.5 * number, kinds[number % 2]) for number in range(16))
    texts = ("of the weights, it had told", "does not have its piece")
    assert shown(texts, SEEDS, faults=faults, publish_waits=True, **READERS | {"keep_versions": 1})


def test_a_version_that_is_removed_too_early_is_seen(monkeypatch):
    kept = Publications._kept
    monkeypatch.setattr(Publications, "_kept", lambda self, known, *now: kept(self, replace(known, keep=1), *now))
    assert shown("is gone, which is kept", SEEDS, NO_FAULTS, **READERS)


def test_a_shard_that_has_no_pieces_after_a_restart_is_seen(monkeypatch):
    monkeypatch.setattr(HeldWeights, "recover", lambda self: None)
    assert shown("does not have its piece", SEEDS, faults=every_second("shard_crash"), **READERS)


def test_a_reader_that_mixes_pieces_of_two_versions_is_seen(monkeypatch):
    receive = VersionReader._receive

    def mixed(self, version, answer, base):
        whole, received = receive(self, version, answer, base)
        if base is not None:
            name = whole.variables[0].name
            whole = replace(whole, values={**whole.values, name: base.values[name]})
        return whole, received

    monkeypatch.setattr(VersionReader, "_receive", mixed)
    assert shown("of the weights with", SEEDS, NO_FAULTS, **READERS)
