"""A shard that keeps its state on disk: killed at any moment, it comes back with every push that was acknowledged."""

from __future__ import annotations

import errno
import os
import threading
from dataclasses import replace

import pytest
import torch

from ps_protocol.errors import ModelMismatch, StorageFull
from ps_protocol.model.registered_optimizers import name_of
from ps_protocol.model.spec import Consistency, Mode, NonFinite, StalePolicy, StaleRule
from ps_protocol.v1 import shard_pb2
from ps_server.cli.options.storage import Durability
from tests.shard.disks import NEVER, OFTEN, durable, held, shard_on
from tests.shard.durability.test_replay import OPTIMIZERS
from tests.support import user_optimizers
from tests.support.length import paired
from tests.support.seeds import seeded
from tests.support.shards import (
    StubStream,
    flat,
    gradients,
    in_slices,
    load,
    running_shard,
    simple_spec,
    start,
    wait_until,
    whole_map,
)

pytestmark = pytest.mark.usefixtures("disk", "small_files")


@pytest.mark.parametrize(("optimizer", "rule"), paired([*OPTIMIZERS, user_optimizers.Counting], [NEVER, OFTEN]))
def test_a_killed_shard_comes_back_bit_for_bit(tmp_path, optimizer, rule, killed):
    chance = seeded()
    name, options = ("torch.optim." + optimizer, OPTIMIZERS[optimizer]) if isinstance(optimizer, str) else (None, {})
    with shard_on(tmp_path / "a", rule=rule) as shard:
        model, _ = start(shard, optimizer=name or name_of(optimizer), **options)
        stream = StubStream(shard)
        for step in range(1, 25):
            absent = sorted({chance.randrange(2) for _ in range(chance.randrange(2))})
            kept = [g for i, g in enumerate(gradients(model, step)) if i not in absent]
            stream.exchange(in_slices(kept), absent=absent)
        with killed(shard, rule=rule) as again:
            other = again.place(model.layout.shard_map)
            assert torch.equal(held(again, other), held(shard, model))
            assert (other.tracker.version, other.initialised) == (24, True)
            # Training goes on as if nothing had happened.
            resumed = StubStream(again)
            assert (resumed.opened.last_sequence, resumed.opened.clock, resumed.opened.version) == (24, 24, 24)
            for step in range(25, 30):
                payload = flat(model.layout, *gradients(model, step))
                assert resumed.exchange(payload)[1] == stream.exchange(payload)[1]
            resumed.end()
        stream.end()


def test_snapshots_are_taken_while_several_workers_train_and_the_log_is_cut(tmp_path, killed, monkeypatch):
    monkeypatch.setattr("ps_server.log.segments.SEGMENT_BYTES", 1 << 13)
    monkeypatch.setattr("ps_server.log.record.MESSAGE_BYTES", 1 << 11)
    chance = seeded()
    with shard_on(tmp_path / "a", {0: 1, 1: 2, 2: 3}, rule=OFTEN) as shard:
        model, _ = start(shard, (4, 3), (5,), (30,), optimizer="torch.optim.Adam", lr=0.01)
        done = threading.Event()

        def train(rank):
            stream = StubStream(shard, rank, incarnation=rank + 1)
            while not done.is_set():
                stream.exchange(flat(model.layout, *gradients(model, chance.randrange(1 << 30))))
            stream.end()

        workers = [threading.Thread(target=train, args=(rank,)) for rank in range(3)]
        for worker in workers:
            worker.start()
        log = shard.storage._durable
        wait_until(lambda: shard.storage._snapshotter.count >= 10 and log._segments.live()[0].first > 1)
        done.set()
        for worker in workers:
            worker.join()
        with killed(shard, {0: 1, 1: 2, 2: 3}) as again:
            other = again.place(model.layout.shard_map)
            assert torch.equal(held(again, other), held(shard, model))
            assert other.tracker.persisted_state() == model.tracker.persisted_state()


def test_a_push_held_for_its_step_is_not_known_after_the_restart_and_comes_again(tmp_path, killed):
    sync, live = Consistency(Mode.SYNC), {0: 1, 1: 2}
    with shard_on(tmp_path / "a", live, sync) as shard:
        model, _ = start(shard)
        streams = [StubStream(shard, rank, rank + 1) for rank in live]
        payloads = [flat(model.layout, *gradients(model, seed)) for seed in range(4)]
        for rank in live:
            streams[rank].push(payloads[rank])
        for stream in streams:
            stream.result()
        streams[0].push(payloads[2])
        wait_until(lambda: len(model._held) == 1)
        with killed(shard, live, sync) as again:
            other = again.place(model.layout.shard_map)
            assert torch.equal(held(again, other), held(shard, model))
            repeated = [StubStream(again, rank, rank + 1) for rank in live]
            assert [(s.opened.last_sequence, s.opened.clock) for s in repeated] == [(1, 1), (1, 1)]
            for rank in live:
                repeated[rank].push(payloads[2 + rank], sequence=2, clock=2)
            streams[1].push(payloads[3])
            expected = [stream.result()[1] for stream in streams]
            assert [stream.result()[1] for stream in repeated] == expected
            for stream in repeated:
                stream.end()
        for stream in streams:
            stream.end()


def test_a_loaded_state_is_kept_and_a_snapshot_under_way_begins_again(tmp_path, killed):
    with shard_on(tmp_path / "a", rule=OFTEN) as shard:
        model, _ = start(shard, momentum=0.9)
        stream = StubStream(shard)
        for step in range(1, 6):
            stream.exchange(flat(model.layout, *gradients(model, step)))
            entries = shard.loop.run(saved(model))
            shard.loop.run(model.values.load(None, [(key, tensor * 2) for key, tensor in entries], only_first=False))
        with killed(shard) as again:
            other = again.place(model.layout.shard_map)
            assert torch.equal(held(again, other), held(shard, model))
            for (_, ours), (_, theirs) in zip(again.loop.run(saved(other)), shard.loop.run(saved(model)), strict=True):
                assert torch.equal(ours, theirs)
        stream.end()


async def saved(model):
    async with model.save() as (_, entries):
        return entries


def test_snapshot_durability_loses_what_came_after_the_last_snapshot_and_nothing_before(tmp_path, killed):
    fields = {"durability": Durability.SNAPSHOT, "rule": NEVER}
    with shard_on(tmp_path / "a", **fields) as shard:
        model, _ = start(shard)
        stream = StubStream(shard)
        for step in range(1, 8):
            stream.exchange(flat(model.layout, *gradients(model, step)))
            if step == 5:
                shard.loop.run(shard.storage._snapshotter.take())
                kept = held(shard, model)
        with killed(shard, **fields) as again:
            other = again.place(model.layout.shard_map)
            assert other.tracker.version == 5
            assert torch.equal(held(again, other), kept)
        stream.end()
    # A shard that is stopped, not killed, loses nothing.
    with shard_on(tmp_path / "a", **fields) as again:
        assert again.place(model.layout.shard_map).tracker.version == 7


def test_a_shard_may_be_started_again_with_more_durability_or_less(tmp_path):
    """What was kept is found in every order of the two kinds."""
    chance, path, version, kept = seeded(), tmp_path / "a", 0, None
    shard_map = whole_map(simple_spec(momentum=0.9))
    for life in range(8):
        durability = chance.choice([Durability.DURABLE, Durability.SNAPSHOT])
        with running_shard({0: life + 1}, storage_config=durable(path, OFTEN, durability)) as shard:
            model = shard.place(shard_map)
            assert model.tracker.version == version
            if not version:
                load(shard, model, flat(model.layout, *[torch.ones(span.shape) for span in model.layout.slices]))
            else:
                assert torch.equal(held(shard, model), kept)
            stream = StubStream(shard, incarnation=life + 1)
            for step in range(5):
                stream.exchange(flat(model.layout, *gradients(model, 10 * life + step)))
            stream.end()
            version, kept = model.tracker.version, held(shard, model)


def test_with_a_full_disk_pushes_are_refused_and_training_goes_on_when_there_is_room(tmp_path, monkeypatch, killed):
    monkeypatch.setattr("ps_server.log.segments.SEGMENT_BYTES", 1 << 17)
    full = threading.Event()
    fallocate = os.posix_fallocate

    def limited(descriptor, offset, size):
        if full.is_set():
            raise OSError(errno.ENOSPC, "No space left on device")
        fallocate(descriptor, offset, size)

    with shard_on(tmp_path / "a") as shard:
        model, _ = start(shard, (4000,))
        monkeypatch.setattr(os, "posix_fallocate", limited)
        full.set()
        stream, step, before = StubStream(shard), 1, None
        while True:
            payload = flat(model.layout, *gradients(model, step))
            result, parameters = stream.exchange(payload, sequence=step, clock=step)
            if result.outcome == shard_pb2.OUTCOME_REFUSED:
                break
            before, step = parameters, step + 1
        assert "no room for its log" in result.error.message
        assert model.tracker.version == step - 1
        # Everything acknowledged is on the disk.
        with killed(shard) as again:
            other = again.place(model.layout.shard_map)
            assert bytes(held(again, other).numpy())[: len(before)] == before
        # A push alone is refused with a typed error, too.
        full.clear()
        # Who comes next would wait for a file that is being made, and get its error.
        making = shard.storage._durable
        wait_until(lambda: making._preparing is None or making._preparing.done())
        result, _ = stream.exchange(payload, sequence=step, clock=step)
        assert result.outcome == shard_pb2.OUTCOME_APPLIED
        assert shard.storage._durable._reserved == {}
        stream.end()


def test_a_model_is_placed_when_there_is_room_for_its_record_and_not_before(tmp_path, killed, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with shard_on(tmp_path / "a") as shard:
        with monkeypatch.context() as broken:
            broken.setattr(os, "posix_fallocate", full)
            with pytest.raises(StorageFull):
                shard.place(whole_map(simple_spec()))
            # Who comes next would wait for a file that is being made, and get its error.
            making = shard.storage._durable
            wait_until(lambda: making._preparing is None or making._preparing.done())
        model, _ = start(shard)
        with killed(shard) as again:
            assert torch.equal(held(again, again.place(model.layout.shard_map)), held(shard, model))


def test_a_model_with_other_policies_is_refused_and_nothing_is_changed(tmp_path):
    """A coordinator without a journal places it again; the shard would go on with those that it knows."""
    with shard_on(tmp_path / "a") as shard:
        start(shard)
    other = replace(simple_spec(), nonfinite=NonFinite.SKIP, clip_grad_norm=1.0, stale=StaleRule(StalePolicy.REJECT, 3))
    with shard_on(tmp_path / "a") as shard:
        with pytest.raises(ModelMismatch, match="holds model 'model' with other arguments, 3 differences") as caught:
            shard.place(whole_map(other))
        assert "stale: reject above 3 instead of as the mode" in str(caught.value)
    with shard_on(tmp_path / "a") as shard:
        assert shard.place(whole_map(simple_spec())).initialised


def test_another_model_under_the_same_name_is_refused_and_nothing_is_changed(tmp_path):
    with shard_on(tmp_path / "a") as shard:
        start(shard)
    with shard_on(tmp_path / "a") as shard:
        other = whole_map(simple_spec((9, 9)))
        with pytest.raises(ModelMismatch, match="shard 0 holds another model under the name 'model', 2 differences"):
            shard.place(other)
    with shard_on(tmp_path / "a") as shard:
        assert shard.place(whole_map(simple_spec())).initialised
