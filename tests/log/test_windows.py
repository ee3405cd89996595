"""Durability "snapshot": the log is written during snapshots only, and what is left of a broken one does no harm."""

from __future__ import annotations

import pytest

from ps_protocol.model.spec import Consistency
from ps_server.consistency import Tracker
from ps_server.log.durable import DurableLog
from ps_server.log.folder import DataFolder
from ps_server.log.recovery import recover
from ps_server.log.snapshots import ModelPart, SnapshotWriter
from ps_server.state.blocks import blocks_of
from ps_server.state.replica import Replica
from tests.log.support import beginning, layout_of, update


class Shard:
    """The log of one, written as a shard with durability "snapshot" writes it."""

    def __init__(self, root, *, log_goes_on=False) -> None:
        self.folder = DataFolder.open(root, 0)
        found = recover(self.folder, log_goes_on=log_goes_on)
        self.number, self.models = found.number, found.models
        self.log = DurableLog(self.folder, found.number, found.end, sync=False, writing=log_goes_on)
        self.layout = layout_of((4, 4))
        model = found.models.get("model")
        self.replica = model.replica if model else Replica(self.layout)
        self.tracker = model.tracker if model else Tracker(Consistency())

    def step(self) -> None:
        made = update(self.layout, self.tracker.version + 1)
        self.log.append(made)
        self.replica.apply(made.step)
        self.tracker.replay(made.pushes, made.version, is_round=False)

    def snapshot(self, *, cut: bool) -> None:
        """One, with an update while it is made; killed before the log is cut where not ``cut``."""
        self.log.resume()
        self.step()
        number = self.log.number
        with SnapshotWriter(self.folder.snapshots, number) as writer:
            writer.begin_model(ModelPart(self.layout.shard_map, True, self.tracker.persisted_state(), number))
            for block in blocks_of(self.layout):
                values = self.replica.region.bytes[block.begin : block.end]
                writer.write_block(block, number, values, self.replica.state(block.slices))
            self.step()
            made = writer.commit(self.log.number, log_goes_on=False)
        if cut:
            self.log.cut(made.number, 1)
            self.log.pause()

    def killed(self) -> None:
        self.log.close()
        self.folder.close()


@pytest.fixture(autouse=True)
def small_segments(monkeypatch):
    monkeypatch.setattr("ps_server.log.segments.SEGMENT_BYTES", 1 << 14)


def test_a_shard_killed_in_its_first_snapshot_starts_over(tmp_path):
    shard = Shard(tmp_path)
    for entry in beginning(shard.layout):
        shard.log.append(entry)
    shard.log.resume()
    shard.step()
    shard.killed()
    again = Shard(tmp_path)
    assert (again.number, again.models) == (0, {})
    again.killed()


@pytest.mark.parametrize("log_goes_on", [False, True])
def test_a_shard_killed_before_its_log_was_cut_has_the_newest_snapshot_and_goes_on(tmp_path, log_goes_on):
    shard = Shard(tmp_path)
    for entry in beginning(shard.layout):
        shard.log.append(entry)
    shard.snapshot(cut=True)
    shard.step()
    shard.step()
    shard.snapshot(cut=False)
    version = shard.tracker.version
    held = bytes(shard.replica.region.bytes)
    shard.killed()
    again = Shard(tmp_path, log_goes_on=log_goes_on)
    assert again.tracker.version == version
    assert bytes(again.replica.region.bytes) == held
    again.step()
    expected = bytes(again.replica.region.bytes) if log_goes_on else held
    again.killed()
    once_more = Shard(tmp_path, log_goes_on=log_goes_on)
    assert bytes(once_more.replica.region.bytes) == expected
    once_more.killed()


def test_a_record_that_could_not_be_written_leaves_no_gap(tmp_path, monkeypatch):
    shard = Shard(tmp_path, log_goes_on=True)
    for entry in beginning(shard.layout):
        shard.log.append(entry)
    written = shard.log.number
    with monkeypatch.context() as broken:
        broken.setattr("ps_server.log.durable.write_at", lambda *_: (_ for _ in ()).throw(OSError(5, "I/O error")))
        with pytest.raises(OSError, match="I/O error"):
            shard.log.append(update(shard.layout, 1))
    assert shard.log.number == written
    shard.step()
    shard.killed()
    again = Shard(tmp_path, log_goes_on=True)
    assert (again.number, again.tracker.version) == (written + 1, 1)
    again.killed()


def test_a_segment_that_a_start_removes_is_not_missed_by_the_next(tmp_path):
    shard = Shard(tmp_path)
    shard.step()
    shard.snapshot(cut=True)
    shard.log.resume()
    shard.step()  # in a segment that no snapshot will need
    shard.killed()
    for _ in range(2):
        again = Shard(tmp_path)
        assert again.tracker.version == 3
        again.killed()
