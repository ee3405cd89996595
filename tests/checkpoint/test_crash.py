"""Whatever stops a checkpoint on its way leaves no checkpoint or a whole one, and the earlier ones as they were."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest
from safetensors.torch import load_file

from ps_protocol.errors import ConfigError, StorageFull
from ps_server.checkpoint.checkpoint import Checkpoint
from ps_server.checkpoint.commit import commit
from ps_server.checkpoint.directory import begin, committed, discard, latest, prune
from ps_server.checkpoint.export import export
from ps_server.checkpoint.model_writer import write_part
from tests.support.length import choose

from .faults import Unsynced, counted, dies_at, full_at, growing, watched
from .support import Job, same_bits, shard_map_of, small_spec


def job() -> Job:
    return Job.of(shard_map_of(small_spec(), 2), seed=1).train([1])


def save(saved: Job, directory: Path) -> None:
    """All of it in this thread, so that the operations come in one order."""
    folder = begin(directory)
    parts = [
        write_part(folder, shard.region.layout, shard.region.bytes, shard.optimizer.state(), {})
        for shard in saved.shards
    ]
    commit(folder, [saved.shard_map], parts, {}, 0.0)


def test_death_between_any_two_file_operations_leaves_no_checkpoint_or_a_whole_one(tmp_path: Path) -> None:
    saved = job()
    save(saved, tmp_path / "counted")
    total = counted(lambda: save(saved, tmp_path / "counted"))
    assert total > 30
    found = []
    for number in range(total):
        directory = tmp_path / str(number)
        save(saved, directory)
        with dies_at(number):
            save(saved, directory)
        for folder in committed(directory):
            checkpoint = Checkpoint.open(folder)
            checkpoint.verify()
            assert same_bits(Job.restored(checkpoint, saved.shard_map).values(), saved.values())
        found.append(len(committed(directory)))
        save(saved, directory)
        newest = latest(directory)
        assert newest is not None
        Checkpoint.open(newest).verify()
    # Whole after the rename of the manifest, and never before; two syncs of folders follow it.
    assert found == [1] * (total - 4) + [2] * 4


def test_a_full_disk_at_any_operation_is_said_and_costs_no_earlier_checkpoint(tmp_path: Path) -> None:
    saved = job()
    save(saved, tmp_path / "counted")
    total = counted(lambda: save(saved, tmp_path / "counted"), growing)
    for number in range(0, total, choose(1, 2)):
        directory = tmp_path / str(number)
        save(saved, directory)
        with full_at(number), pytest.raises(StorageFull, match=r"no room to write the checkpoint at .*remedy: free"):
            save(saved, directory)
        for folder in committed(directory):
            Checkpoint.open(folder).verify()
        for folder in set(directory.iterdir()) - set(committed(directory)):
            discard(folder)
        save(saved, directory)
        newest = latest(directory)
        assert newest is not None
        Checkpoint.open(newest).verify()


def test_everything_is_synced_before_the_manifest_appears_and_again_afterwards(tmp_path: Path) -> None:
    saved = job()
    directory = tmp_path / "new"
    directory.mkdir()
    unsynced = Unsynced()
    with watched(unsynced.before):
        save(saved, directory)
    # The folder lists the manifest under its temporary name, which nobody reads.
    assert unsynced.at_renames == [{directory / "checkpoint-00000001"}]
    assert unsynced.paths == set()


def test_death_while_old_checkpoints_are_removed_leaves_each_whole_or_none(tmp_path: Path) -> None:
    saved = job()

    for _ in range(3):
        save(saved, tmp_path / "three")
    shutil.copytree(tmp_path / "three", tmp_path / "counted", symlinks=True)
    total = counted(lambda: prune(tmp_path / "counted", 1))
    for number in range(total):
        directory = shutil.copytree(tmp_path / "three", tmp_path / str(number), symlinks=True)
        newest = latest(directory)
        with dies_at(number):
            prune(directory, 1)
        assert latest(directory) == newest
        for folder in committed(directory):
            Checkpoint.open(folder).verify()
        prune(directory, 1)
        assert list(directory.iterdir()) == [newest]


def test_death_while_exporting_leaves_no_export_or_a_whole_one(tmp_path: Path) -> None:
    saved = job()
    checkpoint = saved.save(tmp_path)
    total = counted(lambda: export(checkpoint, tmp_path / "counted", "model"))
    for number in range(total):
        target = tmp_path / f"export-{number}"
        with dies_at(number):
            export(checkpoint, target, "model")
        if target.exists():
            assert same_bits(load_file(target / "model.safetensors"), saved.values())


def test_an_export_that_finds_no_room_leaves_nothing_behind(tmp_path: Path) -> None:
    checkpoint = job().save(tmp_path / "checkpoints")
    for number in range(counted(lambda: export(checkpoint, tmp_path / "counted", "model"), growing) - 1):
        with tempfile.TemporaryDirectory() as directory:
            target = Path(directory, "export")
            with full_at(number), pytest.raises(StorageFull):
                export(checkpoint, target, "model")
            assert list(Path(directory).iterdir()) == []


def test_a_shard_that_sees_another_directory_is_told(tmp_path: Path) -> None:
    shard = job().shards[0]
    with pytest.raises(ConfigError, match="a checkpoint directory that the coordinator and every shard can read"):
        write_part(tmp_path / "absent", shard.region.layout, shard.region.bytes, [], {})
