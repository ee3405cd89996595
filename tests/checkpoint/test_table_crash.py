"""Whatever stops a checkpoint with tables on its way leaves no checkpoint or a whole one, with all it goes on from."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np

from ps_server.checkpoint.checkpoint import Checkpoint
from ps_server.checkpoint.directory import committed, latest, prune
from tests.support.length import choose

from .faults import Unsynced, counted, dies_at, watched
from .tables import TableJob, same, table_spec


def trained() -> TableJob:
    job = TableJob.of(table_spec())
    job.push(np.arange(50))
    return job


def checked(directory: Path, job: TableJob) -> int:
    """How many complete checkpoints there are; the newest has everything."""
    for folder in committed(directory):
        Checkpoint.open(folder).verify()
    newest = latest(directory)
    assert newest is not None
    assert same(TableJob.restored(Checkpoint.open(newest), 1).contents(), job.contents())
    return len(committed(directory))


def test_death_between_any_two_file_operations_of_an_increment_costs_nothing(tmp_path: Path) -> None:
    job = trained()
    job.save(tmp_path / "counted", full_every=3)
    total = counted(lambda: job.save(tmp_path / "counted", full_every=3))
    assert total > 20
    found = []
    for number in range(0, total, choose(1, 2)):
        job, directory = trained(), tmp_path / str(number)
        job.save(directory, full_every=3)
        with dies_at(number):
            job.save(directory, full_every=3)
        found.append(checked(directory, job))
        job.push(np.arange(3), number)
        job.save(directory, full_every=3)
        checked(directory, job)
    assert found == sorted(found)
    assert set(found) == {1, 2}


def test_everything_is_synced_before_the_manifest_appears(tmp_path: Path) -> None:
    job, unsynced = trained(), Unsynced()
    tmp_path.joinpath("new").mkdir()
    with watched(unsynced.before):
        job.save(tmp_path / "new")
    assert unsynced.at_renames == [{tmp_path / "new" / "checkpoint-00000001"}]
    assert unsynced.paths == set()


def test_death_while_a_chain_is_removed_leaves_no_checkpoint_without_what_it_goes_on_from(tmp_path: Path) -> None:
    job, made = trained(), tmp_path / "made"
    for number in range(6):
        job.push(np.arange(number, number + 3), number)
        job.save(made, full_every=3)

    def copied(name: str) -> Path:
        return shutil.copytree(made, tmp_path / name, symlinks=True)

    counted_in = copied("counted")
    total = counted(lambda: prune(counted_in, 1))
    for number in range(0, total, choose(1, 3)):
        directory = copied(str(number))
        with dies_at(number):
            prune(directory, 1)
        checked(directory, job)
        prune(directory, 1)
        assert checked(directory, job) == 3
