"""A shard drops a model that was released: from memory, disk and standby, whenever it is killed. About 6 s."""

from __future__ import annotations

from dataclasses import replace

import grpc
import pytest
import torch

from ps_protocol.errors import ModelReleased, StorageFull
from ps_protocol.model.spec import Consistency, Mode
from ps_protocol.v1 import shard_pb2 as pb
from ps_server.log.folder import DataFolder
from ps_server.log.recovery import recover
from tests.shard.disks import copy_of
from tests.shard.reshard.moving import OFTEN, crash_image, gradients_of, job, map_of, payload_of, spec_of
from tests.shard.reshard.moving_worker import Worker
from tests.shard.standby.support import follower, primary
from tests.support.shards import (
    StubStream,
    error_of,
    flat,
    gradients,
    refused_as,
    simple_spec,
    start,
    wait_until,
    whole_map,
)

PLACES = [0, 0, 1, 1, 0]


pytestmark = pytest.mark.usefixtures("small_files")


def named(name, optimizer="Adam"):
    return replace(spec_of(optimizer), name=name)


def streams(made, name, number=0):
    return StubStream(made.nodes[number], name=name, epoch=made.maps[name].epoch)


def step(made, name, stream, seed, number=0):
    model = made.model(number, name=name)
    payload = payload_of(model.layout, gradients_of(model.layout.shard_map.spec, seed))
    result, _ = stream.exchange(payload, with_buffers=True)
    assert result.outcome == pb.OUTCOME_APPLIED


def train(made, name, steps, number=0):
    """Push to one shard, and take what it answers."""
    stream = streams(made, name, number)
    for seed in range(1, steps + 1):
        step(made, name, stream, seed, number)
    stream.end()


def bits(made, name, number=0):
    model = made.model(number, name=name)
    published, give_back = made.nodes[number].take(model)
    data = published.region.data.clone()
    give_back()
    return data


def gone(made, name, number=0):
    registry = made.nodes[number].registry
    return all(source.layout.shard_map.spec.name != name for source in registry.kept)


def wait_until_gone(made, name, *numbers):
    wait_until(lambda: all(gone(made, name, number) for number in numbers))


def recovered(path, shard=0):
    """The models in a data directory, read twice: what was read first changes nothing."""
    found = []
    for _ in range(2):
        folder = DataFolder.open(path, shard)
        found.append(set(recover(folder, log_goes_on=True).models))
        folder.close()
    assert found[0] == found[1]
    return found[0]


@pytest.mark.parametrize("point", ["before_release_log", "after_release_log"])
def test_a_shard_that_is_killed_does_not_bring_the_model_back(tmp_path, point):
    with job(named("model"), PLACES, shards=2, path=tmp_path) as made:
        made.declare(map_of(named("other"), PLACES, shards=2))
        train(made, "model", 3)
        train(made, "other", 3)
        before = bits(made, "other")
        copied = crash_image(made.nodes[0], point, tmp_path / "image")
        made.release("model")
        wait_until_gone(made, "model", 0, 1)
        assert copied()
        # The log alone tells it, once it is written.
        assert ("model" in recovered(tmp_path / "image")) == (point == "before_release_log")
        made.start(0, tmp_path / "image")
        wait_until_gone(made, "model", 0)
        assert torch.equal(bits(made, "other"), before)
        # Another model under the name, which has another structure and begins without values.
        made.declare(map_of(named("model", "SGD"), PLACES, 2, shards=2))
        train(made, "model", 2)
        assert made.model(0, name="model").tracker.version == 2
        last = bits(made, "model")
        assert made.nodes[0].registry.versions == {"model": 2, "other": 3}
    assert recovered(tmp_path / "image") == {"model", "other"}
    folder = DataFolder.open(tmp_path / "image", 0)
    found = recover(folder, log_goes_on=True).models
    assert found["model"].shard_map.epoch == 2
    assert torch.equal(found["model"].replica.region.data, last)
    assert torch.equal(found["other"].replica.region.data, before)
    folder.close()


def test_a_worker_and_a_reader_of_a_released_model_are_told_at_once():
    with job(named("model"), PLACES, shards=2) as made:
        made.declare(map_of(named("other"), PLACES, shards=2))
        open_stream, waiting = streams(made, "model"), streams(made, "other")
        step(made, "model", open_stream, 1)
        old = made.maps["model"]
        made.release("model")
        with refused_as(ModelReleased):
            open_stream.result()
        with refused_as(ModelReleased):
            StubStream(made.nodes[0], epoch=old.epoch)
        with pytest.raises(grpc.RpcError) as asked:
            made.nodes[0].stub.GetModel(pb.GetModelRequest(model="model"))
        assert isinstance(error_of(asked.value), ModelReleased)
        assert "declare a model under this name" in error_of(asked.value).remedy
        # The other goes on, and so does another one of the name; who asks with the old shard map is still told.
        step(made, "other", waiting, 1)
        made.declare(map_of(named("model", "SGD"), PLACES, 2, shards=2))
        train(made, "model", 1)
        with refused_as(ModelReleased):
            StubStream(made.nodes[0], epoch=old.epoch)


def test_a_push_that_waits_for_its_round_is_given_up():
    """In sync with two workers: the round of the released model never becomes complete."""
    with job(named("model"), PLACES, shards=1, live={0: 1, 1: 2}, consistency=Consistency(Mode.SYNC)) as made:
        stream = streams(made, "model")
        model = made.model(0)
        stream.push(payload_of(model.layout, gradients_of(model.layout.shard_map.spec, 1)), with_buffers=True)
        wait_until(lambda: model.parked_pulls == 1)
        made.release("model")
        with refused_as(ModelReleased):
            stream.result()
        wait_until_gone(made, "model", 0)


def test_a_release_that_comes_with_the_next_model_of_the_name_in_one_view(tmp_path):
    """A shard that was away sees neither the view between them nor the model that is gone."""
    with job(named("model"), PLACES, shards=2, path=tmp_path) as made:
        train(made, "model", 2)
        made.released["model"] = 1
        made.declare(map_of(named("model", "SGD"), PLACES, 2, shards=2))
        train(made, "model", 1)
        assert made.model(0).layout.shard_map.epoch == 2
    assert recovered(tmp_path / "of-0") == {"model"}


def test_a_shard_map_that_is_ahead_of_the_view_waits_for_the_release_it_comes_after(tmp_path):
    """A restarted shard has the model on disk, asks where it is placed now, and is told of the next one of the name."""
    with job(named("model"), PLACES, shards=1, path=tmp_path) as made:
        train(made, "model", 2)
        copy_of(tmp_path / "of-0", tmp_path / "image")
        later = map_of(named("model", "SGD"), PLACES, 2, shards=1)
        made.shown = {"model": 1}
        made.maps["model"] = later
        node = made.start(0, tmp_path / "image")
        wait_until(lambda: node.asked == ["model"])
        assert node.registry.versions == {}
        made.shown, made.released = None, {"model": 1}
        made.show()
        wait_until(lambda: made.nodes[0].registry.versions == {"model": 0})
        assert made.model(0).layout.shard_map == later
    assert recovered(tmp_path / "image") == {"model"}


def test_no_snapshot_brings_a_released_model_back(tmp_path):
    """Snapshots all the time, and models that come and go meanwhile."""
    with job(named("model"), PLACES, shards=1, path=tmp_path, rule=OFTEN) as made:
        made.declare(map_of(named("other"), [0] * 5, shards=1))
        lasting = streams(made, "other")
        for epoch in range(1, 6):
            train(made, "model", 3)
            step(made, "other", lasting, epoch)
            made.release("model")
            step(made, "other", lasting, 10 + epoch)
            made.declare(map_of(named("model", "SGD" if epoch % 2 else "Adam"), [0] * 5, epoch + 1, shards=1))
        before = bits(made, "other")
        made.release("model")
        wait_until_gone(made, "model", 0)
        lasting.end()
        snapshots = made.nodes[0].storage.snapshotter
        assert snapshots.failures == 0
    image = tmp_path / "of-0"
    assert recovered(image) == {"other"}
    folder = DataFolder.open(image, 0)
    assert torch.equal(recover(folder, log_goes_on=True).models["other"].replica.region.data, before)
    folder.close()


def test_a_shard_without_any_model_left_takes_a_snapshot_and_starts_again(tmp_path):
    with job(named("model"), PLACES, shards=1, path=tmp_path, rule=OFTEN) as made:
        train(made, "model", 2)
        made.release("model")
        wait_until_gone(made, "model", 0)
        storage = made.nodes[0].storage
        wait_until(lambda: storage.durable.unsaved_records == 0)
    folder = DataFolder.open(tmp_path / "of-0", 0)
    found = recover(folder, log_goes_on=True)
    assert found.models == {}
    assert found.number > 0
    folder.close()


def test_a_release_is_logged_as_soon_as_the_disk_takes_it(tmp_path, caplog):
    with job(named("model"), PLACES, shards=1, path=tmp_path) as made:
        full = [StorageFull("no room"), StorageFull("no room")]

        def fail():
            if full:
                raise full.pop()

        made.nodes[0].failpoints.arm("before_release_log", fail)
        made.release("model")
        wait_until_gone(made, "model", 0)
        assert not full
    assert recovered(tmp_path / "of-0") == set()
    assert "the release of model 'model' cannot be logged yet: no room" in caplog.text


@pytest.mark.parametrize("copies", [False, True])
def test_a_standby_drops_it_too_and_takes_over_without_it(tmp_path, copies):
    """By the log, or in a copy that is made afterwards."""
    with primary(tmp_path / "a") as shard, follower(tmp_path / "b", OFTEN) as following:
        kept = shard.place(whole_map(replace(simple_spec((4, 3)), name="kept")))
        if not copies:
            following.begin(shard)
        model, _ = start(shard, (5, 2))
        stream = StubStream(shard)
        for seed in range(1, 4):
            stream.exchange(flat(model.layout, *gradients(model, seed)))
        if not copies:
            following.reach(shard)
            assert set(following.storage.recovered) == {"kept", "model"}

        def show(**changes):
            shard.view = replace(shard.view, revision=shard.view.revision + 1, **changes)

            async def tell():
                shard.registry.on_view(shard.view)

            shard.loop.run(tell())

        show(released_models={"model": 1})
        wait_until(lambda: [each.name for each in shard.registry.placed] == ["kept"])
        if copies:
            following.begin(shard)
        following.reach(shard)
        assert set(following.storage.recovered) == {"kept"}
        again = shard.place(replace(whole_map(simple_spec((7,))), epoch=2))
        following.reach(shard)
        assert following.model().shard_map == again.layout.shard_map
        assert following.model("kept").shard_map == kept.layout.shard_map
        following.end()
        following.loop.run(following.storage.give_up_snapshots())
        found = recover(following.storage.kept[0], log_goes_on=True).models
        assert {name: each.shard_map.epoch for name, each in found.items()} == {"kept": 1, "model": 2}


def test_a_model_that_is_being_resharded_is_dropped_after_that(tmp_path):
    """The view of the release comes while the shard still makes what was decided before it."""
    with job(named("model"), PLACES, shards=2, path=tmp_path) as made:
        worker = Worker(made)
        worker.train(2)
        wanted = made.next_map([1, 0, 1, 0, 1])
        made.prepare_all(wanted)
        made.maps["model"], made.moving = wanted, ""
        made.revision += 1
        decided = made.view
        del made.maps["model"]
        made.released["model"] = 2
        made.revision += 1
        released = made.view

        async def show(node):
            node.registry.on_view(decided)
            assert [model.is_pending for model in node.registry.placed] == [True]
            node.registry.on_view(released)

        for node in made.nodes.values():
            node.view = released
            made.loop.run(show(node))
        wait_until_gone(made, "model", 0, 1)
        made.declare(map_of(named("model", "SGD"), PLACES, 3, shards=2))
        train(made, "model", 1)
    assert recovered(tmp_path / "of-0") == {"model"}
    assert recovered(tmp_path / "of-1", 1) == {"model"}
