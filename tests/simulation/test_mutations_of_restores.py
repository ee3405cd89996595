"""The judge is not blind to restored checkpoints: with one rule broken in the shipped code, some seed shows it.

Costs about 10 CPU s.
"""

from ps_server.consistency import TrackerState
from ps_server.consistency.events import START
from ps_server.coordinator import beginning, driver
from ps_server.coordinator.data_leases import DataLeases
from ps_server.coordinator.jobs import checkpoints
from ps_server.shard import placing, quiesce
from simulation.plan import Fault, Size
from tests.simulation.runs import shown

SEEDS = range(40)

RESTORES = {
    "durable": True,
    "think_seconds": 0.1,
    "momentum": 0.5,
    "faults": tuple(Fault(2.0 + 0.5 * number, ("checkpoint", "restore")[number % 2]) for number in range(12)),
}


def test_a_checkpoint_that_is_restored_without_its_momentum_is_seen(monkeypatch):
    monkeypatch.setattr(placing, "read_state", lambda checkpoint, layout: [])
    assert shown("instead of the sum of its log", SEEDS, Size(steps=30), **RESTORES)


def test_a_shard_that_does_not_take_the_checkpoint_that_is_restored_is_seen(monkeypatch):
    async def nothing(checkpoint, model, **how):
        pass

    monkeypatch.setattr(quiesce, "restore", nothing)
    assert shown("was called restored", SEEDS, **RESTORES)


MOVES = {
    "durable": True,
    "momentum": 0.0,
    "think_seconds": 0.1,
    "overlap": False,
    "faults": tuple(Fault(2.0 + 0.4 * n, ("checkpoint", "move", "restore")[n % 3]) for n in range(18)),
}


def test_slices_that_moved_after_the_checkpoint_and_are_not_restored_are_seen(monkeypatch):
    read_values = placing.read_values

    def only_those_that_stayed(checkpoint, layout, data):
        read_values(checkpoint, layout, data)
        saved = checkpoint.model(layout.shard_map.spec.name).shard_map
        homes = {(each.variable, each.row_begin): each.shard for each in saved.slices}
        for span in layout.slices:
            if homes[span.slice.variable, span.slice.row_begin] != layout.shard:
                data[span.begin : span.end] = bytes(span.end - span.begin)

    monkeypatch.setattr(placing, "read_values", only_those_that_stayed)
    assert shown("values of different updates", SEEDS, **MOVES)


def test_rows_that_a_restored_checkpoint_leaves_out_are_seen(monkeypatch):
    def none(checkpoint, layout):
        yield from ()

    monkeypatch.setattr(placing, "batches", none)
    assert shown("has not taken its rows", SEEDS, table=True, **MOVES)


def test_rows_that_a_checkpoint_does_not_have_and_that_stay_are_seen(monkeypatch):
    batches = placing.batches

    def filled(checkpoint, layout):
        for batch in batches(checkpoint, layout):
            yield [(table, contents) for table, contents in batch if len(contents.ids)]

    monkeypatch.setattr(placing, "batches", filled)
    assert shown("serves row", SEEDS, table=True, **MOVES)


NEW_JOBS = {
    "durable": True,
    "faults": (
        *(Fault(2.0 + 0.5 * number, "checkpoint") for number in range(12)),
        *(Fault(at, "new_job") for at in (4.05, 7.05)),
    ),
}


def test_a_new_job_that_takes_the_first_values_of_its_workers_is_seen(monkeypatch):
    monkeypatch.setattr(driver, "place_as_saved", lambda checkpoint, shard_map: shard_map)
    assert shown("took initial values", SEEDS, **NEW_JOBS)


def test_a_new_job_whose_shards_begin_at_version_0_is_seen(monkeypatch):
    monkeypatch.setattr(placing, "saved_tracker", lambda checkpoint, model: TrackerState(0, START, START))
    assert shown("begins at version 0", SEEDS, **NEW_JOBS)


def test_a_new_job_that_begins_in_the_first_phase_is_seen(monkeypatch):
    monkeypatch.setattr(beginning, "saved_phase", lambda checkpoint: 0)
    assert shown("the coordinator restarted in phase 0", SEEDS, phases=3, steps=2, data_items=0, **NEW_JOBS)


def test_a_new_job_that_trains_all_of_its_data_again_is_seen(monkeypatch):
    monkeypatch.setattr(beginning, "saved_data", lambda checkpoint: DataLeases())
    assert shown("leased again after it was trained", SEEDS, data_items=36, phases=1, **NEW_JOBS)


def test_a_restore_that_some_shards_without_values_leave_out_is_seen(monkeypatch):
    monkeypatch.setattr(checkpoints, "_check_whole", lambda taken, shard_maps: None)
    faults = (Fault(2.0, "checkpoint"), Fault(3.0, "checkpoint"), Fault(4.0, "new_job"))
    restores = tuple(Fault(4.2 + 0.1 * number, "restore") for number in range(15))
    assert shown("was called restored", SEEDS, durable=True, faults=faults + restores)
