"""The judge is not blind to moves and releases: with one rule broken in the shipped code, some seed shows it."""

from dataclasses import replace

import numpy as np

from ps_protocol.model.spec import Consistency, Mode
from ps_server.coordinator.driver import Driver
from ps_server.coordinator.jobs import move_runner
from ps_server.coordinator.jobs.mode_runner import ModeRunner
from ps_server.coordinator.jobs.quiesce import check_same_position
from ps_server.shard import registry
from ps_server.shard.step.model import ShardModel
from ps_server.state import reshard
from ps_server.tables.table import ShardTable
from simulation.plan import Fault, Plan
from tests.simulation.runs import shown

SEEDS = range(40)
MOVES = {"durable": True, "momentum": 0.0, "models": 1, "wire": "raw"}
RELEASES = {"models": 2, "releases": True, "phases": 3, "steps": 2, "data_items": 0}


def test_slices_that_come_without_their_values_are_seen(monkeypatch):
    cut = reshard._cut
    monkeypatch.setattr(
        reshard, "_cut", lambda layout, pending: [memoryview(bytes(len(each))) for each in cut(layout, pending)]
    )
    faults = tuple(Fault(2.0 + number, "move") for number in range(6))
    assert shown("values of different updates", SEEDS, faults=faults, **MOVES)


def test_a_move_after_which_held_pushes_count_as_known_loses_them(monkeypatch):
    def with_those_held(self):
        return replace(self.tracker.persisted_state(), standings=self.tracker.clocks())

    monkeypatch.setattr(ShardModel, "known_pushes", with_those_held)
    faults = tuple(Fault(2.0 + number, "move") for number in range(6))
    assert shown("which it has not applied", SEEDS, consistency=Consistency(Mode.SYNC), faults=faults, **MOVES)


def test_a_move_while_one_shard_holds_a_push_that_another_has_applied_is_seen(monkeypatch):
    def whatever_is_held(reports):
        check_same_position([[replace(model, open={}) for model in models] for models in reports])

    async def on_one_shard_after_another(self, consistency):
        return self._driver.set_consistency(consistency)

    monkeypatch.setattr(move_runner, "check_same_position", whatever_is_held)
    # Otherwise no shard holds what another has applied, unless a view is lost.
    monkeypatch.setattr(ModeRunner, "_make", on_one_shard_after_another)
    monkeypatch.setattr(Plan, "loses_no_view", False)
    # The mode changes a little later in each move than in the one before it.
    pairs = ((2.0 + 0.6 * number, 2.01 + 0.63 * number) for number in range(12))
    faults = tuple(Fault(at, kind) for pair in pairs for at, kind in zip(pair, ("move", "mode"), strict=True))
    # One in fifteen shows it.
    assert shown("slices move while shard", range(100), faults=faults, **MOVES)


def test_rows_that_come_without_their_values_are_seen(monkeypatch):
    put = ShardTable.put
    monkeypatch.setattr(ShardTable, "put", lambda self, held: put(self, replace(held, rows=np.zeros_like(held.rows))))
    faults = tuple(Fault(2.0 + 0.5 * number, ("move", "balance")[number % 2]) for number in range(20))
    assert shown("serves row", SEEDS, faults=faults, table=True, overlap=False, **MOVES)


def test_a_release_that_is_not_in_the_log_is_seen_at_the_restart(monkeypatch):
    async def nothing(context, entry):
        pass

    monkeypatch.setattr(registry, "log_release", nothing)
    faults = tuple(Fault(4.0 + 0.5 * number, "shard_crash") for number in range(12))
    assert shown("restored a model that it has dropped", SEEDS, durable=True, faults=faults, **RELEASES)


def test_a_release_that_does_not_say_which_model_of_the_name_it_means_is_seen(monkeypatch):
    release = Driver.release_model
    monkeypatch.setattr(Driver, "release_model", lambda self, model, epoch=0: release(self, model))
    assert shown("which kept to the rules, was refused", SEEDS, calls_late=0.2, calls_lost=0.2, **RELEASES)
