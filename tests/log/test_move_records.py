"""Records of slices that move: what was prepared holds when the switch is in the log, and only then."""

from __future__ import annotations

import pytest
import torch

from ps_protocol.errors import DamagedData
from ps_protocol.model.layout import Layout
from ps_protocol.model.spec import ShardMap, Slice
from ps_server.consistency import ParticipantStatus, Position, TrackerState, WorkerKey
from ps_server.log import segments
from ps_server.log.entries import Loaded, Placed, Resharded, StagedReshard
from ps_server.optimizers.state import StateKey
from tests.log.support import beginning, layout_of, opened, random_region, update

KNOWN = TrackerState(4, standings=(ParticipantStatus(WorkerKey(0, 1), Position(0, 4), 4),))


@pytest.fixture(autouse=True)
def small_segments(monkeypatch):
    monkeypatch.setattr(segments, "SEGMENT_BYTES", 1 << 14)


def two_shards(on_this: int, epoch: int) -> ShardMap:
    """Two variables, of which the first is here before, and ``on_this`` of them after."""
    spec = layout_of((3, 2), (5,)).shard_map.spec
    slices = tuple(Slice(i, 0, v.rows, 0 if i < on_this else 1) for i, v in enumerate(spec.variables))
    return ShardMap(epoch, spec, 2, slices)


def prepared(epoch: int = 2) -> StagedReshard:
    values = torch.arange(5, dtype=torch.float32)
    entries = [(StateKey(1, "momentum_buffer"), values * 10)]
    return StagedReshard(two_shards(2, epoch), (1,), memoryview(bytearray(values.numpy().tobytes())), entries, KNOWN)


def started(log):
    layout = Layout.of(two_shards(1, 1), 0)
    for entry in (*beginning(layout), update(layout, 1), update(layout, 2)):
        log.append(entry)
    return layout


def test_what_was_prepared_waits_for_the_decision_through_restarts(tmp_path):
    with opened(tmp_path) as (log, _):
        layout = started(log)
        log.append(prepared())
    for _ in range(2):
        with opened(tmp_path) as (log, found):
            model = found.models["model"]
            assert model.replica.layout == layout
            assert model.pending.shard_map == two_shards(2, 2)
            assert model.pending.incoming == (1,)
            assert bytes(model.pending.values) == bytes(prepared().values)
            assert torch.equal(model.pending.entries[0][1], prepared().entries[0][1])
            assert model.pending.tracker == KNOWN


def test_after_the_switch_the_slices_that_stayed_and_those_that_came_are_one_model(tmp_path):
    with opened(tmp_path) as (log, _):
        started(log)
    with opened(tmp_path) as (log, found):
        before = found.models["model"]
        stayed, state = before.replica.region.slice(0).clone(), before.replica.state()
        for entry in (prepared(), Resharded("model", 2)):
            log.append(entry)
    after = Layout.of(two_shards(2, 2), 0)
    with opened(tmp_path) as (log, found):
        model = found.models["model"]
        assert model.pending is None
        assert model.shard_map == two_shards(2, 2)
        assert torch.equal(model.replica.region.slice(0), stayed)
        assert torch.equal(model.replica.region.slice(1), torch.arange(5.0))
        now = {key.slice_index: tensor for key, tensor in model.replica.state()}
        assert torch.equal(now[0], state[0][1])
        assert torch.equal(now[1], torch.arange(5.0) * 10)
        # This shard had slices: it knows more than those they came from.
        assert model.tracker.version == 2
        log.append(update(after, 3))
    with opened(tmp_path) as (_, found):
        assert found.models["model"].tracker.version == 3


@pytest.mark.parametrize("kind", ["update", "load"])
def test_what_was_prepared_is_forgotten_when_the_model_goes_on_without_it(tmp_path, kind):
    with opened(tmp_path) as (log, _):
        layout = started(log)
        log.append(prepared())
        log.append(update(layout, 3) if kind == "update" else Loaded("model", random_region(layout, 9), None))
    with opened(tmp_path) as (_, found):
        assert found.models["model"].pending is None
        assert found.models["model"].shard_map == two_shards(1, 1)


def test_the_last_of_two_that_were_prepared_counts(tmp_path):
    with opened(tmp_path) as (log, _):
        started(log)
        log.append(StagedReshard(two_shards(0, 2), (), memoryview(b""), []))
        log.append(prepared())
        log.append(Resharded("model", 2))
    with opened(tmp_path) as (_, found):
        assert len(found.models["model"].replica.layout.slices) == 2


def test_a_shard_that_had_nothing_begins_with_what_the_others_know(tmp_path):
    with opened(tmp_path) as (log, _):
        log.append(Placed(two_shards(0, 1)))
    with opened(tmp_path) as (log, found):
        assert found.models["model"].initialised
        values = memoryview(bytearray(44))
        log.append(StagedReshard(two_shards(2, 2), (0, 1), values, [], KNOWN))
        log.append(Resharded("model", 2))
    with opened(tmp_path) as (_, found):
        model = found.models["model"]
        assert model.tracker.persisted_state().standings == KNOWN.standings
        assert model.tracker.version == 4
        assert model.initialised


def test_a_shard_that_loses_everything_knows_no_pushes_any_more(tmp_path):
    with opened(tmp_path) as (log, _):
        started(log)
        log.append(StagedReshard(two_shards(0, 2), (), memoryview(b""), []))
        log.append(Resharded("model", 2))
        log.append(Placed(two_shards(0, 3)))
    with opened(tmp_path) as (_, found):
        model = found.models["model"]
        assert (model.shard_map.epoch, model.tracker.version, model.initialised) == (3, 0, True)
        assert model.tracker.clocks() == ()


@pytest.mark.parametrize("entries", [[Resharded("model", 2)], [prepared(), Resharded("model", 3)]])
def test_a_switch_to_what_was_not_prepared_stops_the_shard(tmp_path, entries):
    with opened(tmp_path) as (log, _):
        started(log)
        for entry in entries:
            log.append(entry)
    with pytest.raises(DamagedData, match="nothing was staged for it"), opened(tmp_path):
        pass


def test_a_slice_that_did_not_come_and_was_not_there_stops_the_shard(tmp_path):
    with opened(tmp_path) as (log, _):
        started(log)
        log.append(StagedReshard(two_shards(2, 2), (), memoryview(b""), []))
        log.append(Resharded("model", 2))
    with pytest.raises(DamagedData, match="was not given a slice"), opened(tmp_path):
        pass
