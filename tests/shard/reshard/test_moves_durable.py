"""A shard that is killed while slices move comes back as the cluster decided, with every bit it had."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from ps_protocol.errors import InternalError, ModelMismatch
from ps_server.cli.options.storage import Durability
from ps_server.log.head import HeadFile
from tests.shard.disks import copy_of
from tests.shard.reshard.moving import OFTEN, crash_image, job, map_of, spec_of
from tests.shard.reshard.moving_worker import Worker, assert_same, undisturbed
from tests.support.length import few, paired
from tests.support.shards import load, refused_as, wait_until

HERE, THERE = [0, 0, 1, 1, 0], [0, 1, 2, 0, 2]


pytestmark = pytest.mark.usefixtures("small_files")


POINTS = [
    ("before_prepare_log", False),
    ("after_prepare_log", False),
    ("after_prepare_log", True),
    ("before_switch_log", True),
    ("after_switch_log", True),
]


@pytest.mark.parametrize(("number", "point_holds"), few(paired([0, 1, 2], POINTS), 3), ids=str)
def test_a_shard_killed_while_slices_move_comes_back_as_was_decided(tmp_path, number, point_holds):
    """Each of the three: one that loses and gets slices, one that does both, one that had none."""
    point, holds = point_holds
    spec = spec_of("RMSprop", momentum=0.9)
    with job(spec, HERE, path=tmp_path) as made:
        worker = Worker(made)
        worker.train(3)
        values, state = made.values(), made.state()
        copied = crash_image(made.nodes[number], point, tmp_path / "image")
        wanted = made.next_map(THERE)
        made.prepare_all(wanted)
        if holds:
            made.commit(wanted)
        wait_until(copied)
        if not holds:
            made.abort()
        # The others go on; this one is another process now.
        made.start(number, tmp_path / "image")
        assert made.model(number).layout.shard_map == made.maps["model"]
        assert_same(made.values(), values)
        assert_same(made.state(), state)
        worker.open()
        assert {stream.opened.last_sequence for stream in worker.streams.values()} <= {0, 3}
        worker.train(2)
        assert_same(made.values(), undisturbed(spec, 5)[0])
        # And moves again.
        again = made.move([2, 1, 0, 2, 1])
        worker.open()
        worker.train(1)
        assert made.maps["model"] == again
        assert_same(made.values(), undisturbed(spec, 6)[0])
        worker.end()


def test_no_snapshot_begins_while_slices_move_and_one_under_way_is_given_up(tmp_path):
    with job(spec_of(momentum=0.9), HERE, path=tmp_path, rule=OFTEN) as made:
        worker = Worker(made)
        worker.train(3)
        snapshotter = made.nodes[0].storage._snapshotter
        wait_until(lambda: snapshotter.count > 0)
        wanted = made.next_map(THERE)
        # One that is under way when the move comes.
        model, copying, go_on = made.model(0), threading.Event(), threading.Event()
        copy_block = model.copy_block

        async def slowly(block, into):
            copying.set()
            await asyncio.to_thread(go_on.wait, 60)
            return await copy_block(block, into)

        model.copy_block = slowly
        worker.train(1)
        assert copying.wait(60)
        count = snapshotter.count
        made.prepare_all(wanted)
        made.commit(wanted)
        values, state = made.values(), made.state()
        go_on.set()
        wait_until(lambda: snapshotter.count > count)
        made.loop.run(made.nodes[0].storage.close(snapshot=False))
        made.start(0, tmp_path / "of-0")
        assert_same(made.values(), values)
        assert_same(made.state(), state)


def test_a_snapshot_taken_while_bound_would_lose_what_came_so_none_is(tmp_path):
    with job(spec_of(momentum=0.9), HERE, path=tmp_path) as made:
        worker = Worker(made)
        worker.train(3)
        node, wanted = made.nodes[2], made.next_map(THERE)
        made.prepare_all(wanted)
        count = node.storage._snapshotter.count
        made.loop.run(node.storage._snapshotter.take())
        assert node.storage._snapshotter.count == count
        copied = crash_image(node, "before_switch_log", tmp_path / "image")
        made.commit(wanted)
        assert copied()
        values = made.values()
        made.start(2, tmp_path / "image")
        assert_same(made.values(), values)


def test_a_snapshot_that_a_move_forestalls_is_taken_as_soon_as_that_is_decided(tmp_path, monkeypatch):
    """It has not failed: what has is tried again after seconds, in which the log might come to its limit."""
    monkeypatch.setattr("ps_server.shard.times.FULL_RETRY_SECONDS", 1e9)
    with job(spec_of(momentum=0.9), HERE, path=tmp_path) as made:
        worker = Worker(made)
        worker.train(3)
        snapshotter, wanted = made.nodes[0].storage._snapshotter, made.next_map(THERE)
        has_work, asked = snapshotter._has_work, []

        async def before_the_move() -> bool:
            asked.append(None)
            return True

        snapshotter._has_work = before_the_move
        made.prepare_all(wanted)
        snapshotter._log.pressed = True
        wait_until(lambda: len(asked) > 1)
        assert snapshotter.count == snapshotter.failures == 0
        snapshotter._has_work = has_work
        made.commit(wanted)
        wait_until(lambda: snapshotter.count > 0)
        assert snapshotter.failures == 0
        worker.open()
        worker.train(1)
        worker.end()


@pytest.mark.parametrize(("number", "point_holds"), few(paired([0, 1], POINTS), 3), ids=str)
def test_a_shard_killed_while_slices_move_before_its_head_was_written_comes_back_too(
    tmp_path, number, point_holds, monkeypatch
):
    """The head then names a segment before that of the move."""
    point, holds = point_holds
    monkeypatch.setattr("ps_server.log.segments.SEGMENT_BYTES", 1 << 12)
    monkeypatch.setattr("ps_server.log.record.MESSAGE_BYTES", 1 << 12)

    def lags(log: Path) -> bool:
        return HeadFile(log).read().segment < max(int(path.stem) for path in log.glob("[0-9]*.log"))

    with job(spec_of(momentum=0.9), HERE, path=tmp_path) as made:
        worker = Worker(made)
        node, wanted = made.nodes[number], made.next_map(THERE)
        while not HeadFile(node.storage._durable.path).read().segment > 1:
            worker.train(5)
            made.loop.run(asyncio.to_thread(node.storage._durable.settle))
        monkeypatch.setattr("ps_server.log.head.HeadFile.write_later", lambda *_: None)
        while not lags(node.storage._durable.path):
            worker.train(5)
        values = made.values()
        copied = crash_image(node, point, tmp_path / "image")
        made.prepare_all(wanted)
        if holds:
            made.commit(wanted)
        wait_until(copied)
        if not holds:
            made.abort()
        assert lags(tmp_path / "image" / f"shard-{number}" / "log")
        made.start(number, tmp_path / "image")
        assert_same(made.values(), values)
        worker.open()
        worker.train(1)
        worker.end()


def test_with_snapshot_durability_what_came_is_kept_before_the_move_is_decided(tmp_path):
    spec = spec_of("RMSprop")
    with job(spec, HERE, path=tmp_path, durability=Durability.SNAPSHOT) as made:
        worker = Worker(made)
        worker.train(3)
        wanted = made.next_map(THERE)
        made.prepare_all(wanted)
        values, state = made.values(), made.state()
        made.commit(wanted)
        for number in range(3):
            copied = tmp_path / f"image-{number}"
            # As kill -9 leaves it: nothing is written after the switch.
            copy_of(tmp_path / f"of-{number}", copied)
            made.start(number, copied, durability=Durability.SNAPSHOT)
        assert_same(made.values(), values)
        assert_same(made.state(), state)
        # Kept again, after a switch that was found in no log.
        made.loop.run(made.nodes[2].storage.close())
        made.start(2, tmp_path / "image-2", durability=Durability.SNAPSHOT)
        assert_same(made.values(), values)


def test_a_switch_that_fails_stops_the_model_and_a_restart_makes_it(tmp_path):
    with job(spec_of("RMSprop"), HERE, path=tmp_path) as made:
        worker = Worker(made)
        worker.train(2)
        values = made.values()
        wanted = made.next_map(THERE)
        made.prepare_all(wanted)

        def broken():
            raise OSError("broken")

        made.nodes[1].failpoints.arm("before_switch_log", broken)
        made.maps["model"], made.moving = wanted, ""
        made.show()
        with pytest.raises(InternalError, match="could not reshard"):
            made.model(1)
        made.loop.run(made.nodes[1].storage.close())
        made.start(1, tmp_path / "of-1")
        assert_same(made.values(), values)


def test_a_failure_in_preparing_is_told_and_leaves_nothing(tmp_path):
    with job(spec_of("RMSprop"), HERE, path=tmp_path) as made:
        worker = Worker(made)
        worker.train(2)

        def broken():
            raise OSError("broken")

        for point in ("before_prepare_log", "after_prepare_log"):
            made.nodes[2].failpoints.arm(point, broken)
            made.begin_move()
            made.reach()
            with refused_as(InternalError):
                made.prepare(2, made.next_map(THERE))
            made.nodes[2].failpoints.disarm(point)
            made.abort()
        worker.train(1)
        made.move(THERE)
        worker.open()
        worker.train(1)
        assert_same(made.values(), undisturbed(spec_of("RMSprop"), 4)[0])
        worker.end()


def test_a_drained_shard_that_was_away_takes_any_later_map_without_slices_for_it(tmp_path):
    with job(spec_of("RMSprop"), HERE, path=tmp_path) as made:
        worker = Worker(made)
        worker.train(1)
        made.move([0, 0, 2, 2, 0])
        away = made.nodes.pop(1)
        made.loop.run(away.storage.close())
        made.move([2, 0, 2, 0, 0])
        made.move([2, 2, 2, 0, 0])
        made.start(1, tmp_path / "of-1")
        assert made.model(1).layout.shard_map.epoch == 4
        made.move([1, 1, 2, 0, 0])
        values = made.values()
        made.loop.run(made.nodes[1].storage.close(snapshot=False))
        made.start(1, tmp_path / "of-1")
        assert_same(made.values(), values)


def test_a_directory_that_missed_a_move_of_its_slices_is_refused(tmp_path):
    with job(spec_of(), HERE, path=tmp_path) as made:
        made.loop.run(made.nodes.pop(1).storage.close())
        # Moved without it: not by any coordinator.
        made.maps["model"] = made.next_map(THERE)
        made.start(1, tmp_path / "of-1")
        with pytest.raises(ModelMismatch, match="cut for another cluster; shard: 1"):
            made.model(1)


@pytest.mark.parametrize("moves", [False, True])
def test_a_model_that_the_cluster_has_not_placed_yet_is_not_lost_in_a_snapshot_of_another(tmp_path, moves):
    """A restarted shard knows two models, and hears of one first."""
    spec = spec_of("RMSprop")
    with job(spec, HERE, path=tmp_path) as made:
        other = replace(spec, name="other")
        made.declare(map_of(other, HERE))
        worker = Worker(made)
        worker.train(2)
        values, wanted = made.values(), made.next_map(THERE)
        if moves:
            made.prepare_all(wanted)
        worker.end()
        made.loop.run(made.nodes[0].storage.close(snapshot=False))
        waiting = made.maps.pop("model")
        made.start(0, tmp_path / "of-0", rule=OFTEN)
        other = made.model(0, name="other")
        load(made.nodes[0], other, bytes(other.layout.region_bytes), with_state=False)
        snapshotter = made.nodes[0].storage._snapshotter
        if moves:
            # What had been prepared for it is in no snapshot: the log has to last.
            made.loop.run(snapshotter.take())
            assert snapshotter.count == 0
        else:
            wait_until(lambda: snapshotter.count > 0)
        made.loop.run(made.nodes[0].storage.close(snapshot=False))
        made.maps["model"] = wanted if moves else waiting
        made.moving = ""
        made.show()
        made.start(0, tmp_path / "of-0")
        if moves:
            for number in (1, 2):
                made.model(number, 2)
        assert_same(made.values(), values)
