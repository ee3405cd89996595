"""Checkpoints are numbered in order of time, and only old ones go."""

from __future__ import annotations

from pathlib import Path

import pytest

from ps_protocol.errors import ConfigError, InvalidRequest
from ps_server.checkpoint.commit import commit
from ps_server.checkpoint.directory import begin, committed, discard, latest, prune

from .support import Job, shard_map_of, small_spec


@pytest.fixture(scope="module")
def job() -> Job:
    return Job.of(shard_map_of(small_spec(), 2), seed=1)


def names(folders: list[Path]) -> list[str]:
    return [folder.name for folder in folders]


def test_an_absent_directory_holds_no_checkpoints(tmp_path: Path) -> None:
    assert committed(tmp_path / "absent") == []
    assert latest(tmp_path / "absent") is None


def test_only_committed_folders_count_and_the_newest_is_the_latest(tmp_path: Path, job: Job) -> None:
    first = job.save(tmp_path).folder
    attempt = begin(tmp_path)
    second = job.save(tmp_path).folder
    assert names([first, attempt, second]) == [f"checkpoint-0000000{n}" for n in (1, 2, 3)]
    begin(tmp_path)
    assert committed(tmp_path) == [first, second]
    assert latest(tmp_path) == second


def test_other_things_in_the_directory_are_left_alone(tmp_path: Path, job: Job) -> None:
    (tmp_path / "checkpoint-notes").mkdir()
    (tmp_path / "checkpoint-00000009").write_text("a file")
    job.save(tmp_path)
    newest = job.save(tmp_path).folder
    prune(tmp_path, 1)
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        *sorted([newest.name, "checkpoint-00000009", "checkpoint-notes"])
    ]


def test_pruning_keeps_the_newest_and_takes_older_attempts_with_it(tmp_path: Path, job: Job) -> None:
    folders = [job.save(tmp_path).folder, begin(tmp_path), *(job.save(tmp_path).folder for _ in range(3))]
    running = begin(tmp_path)
    assert prune(tmp_path, 2) == folders[:3]
    assert committed(tmp_path) == folders[3:]
    assert running.is_dir()
    assert prune(tmp_path, 2) == []


def test_pruning_spares_the_checkpoint_that_the_job_began_with(tmp_path: Path, job: Job, monkeypatch) -> None:
    first, second, third = (job.save(tmp_path).folder for _ in range(3))
    monkeypatch.chdir(tmp_path)
    assert prune(tmp_path, 1, spared=Path(first.name)) == [second]
    assert committed(tmp_path) == [first, third]
    assert prune(tmp_path, 1, spared=tmp_path / "elsewhere") == [first]


def test_numbers_go_on_rising_after_old_ones_are_gone(tmp_path: Path, job: Job) -> None:
    for _ in range(3):
        job.save(tmp_path)
    prune(tmp_path, 1)
    assert begin(tmp_path).name == "checkpoint-00000004"


def test_pruning_counts_no_checkpoint_that_cannot_be_read(tmp_path: Path, job: Job) -> None:
    good = job.save(tmp_path).folder
    damaged = job.save(tmp_path).folder
    (damaged / "manifest.json").write_text("{")
    assert prune(tmp_path, 1) == []
    assert committed(tmp_path) == [good, damaged]


def test_keeping_none_is_refused(tmp_path: Path, job: Job) -> None:
    job.save(tmp_path)
    with pytest.raises(InvalidRequest, match="expected: keep ≥ 1; actual: 0"):
        prune(tmp_path, 0)
    assert len(committed(tmp_path)) == 1


def test_an_attempt_is_discarded_and_a_checkpoint_is_not(tmp_path: Path, job: Job) -> None:
    attempt = begin(tmp_path)
    job.parts(attempt)
    discard(attempt)
    assert not attempt.exists()
    folder = job.save(tmp_path).folder
    with pytest.raises(ConfigError, match="is a checkpoint and stays"):
        discard(folder)
    assert committed(tmp_path) == [folder]


def test_a_checkpoint_is_never_committed_over(tmp_path: Path, job: Job) -> None:
    folder = job.save(tmp_path).folder
    before = (folder / "manifest.json").read_bytes()
    with pytest.raises(ConfigError, match="is a checkpoint already"):
        commit(folder, [job.shard_map], job.parts(folder), {}, 0.0)
    assert (folder / "manifest.json").read_bytes() == before


def test_a_directory_that_cannot_be_made_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="give a checkpoint directory"):
        begin(tmp_path / "file" / "checkpoints")
