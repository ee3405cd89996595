"""Checkpoints are numbered in order of time, and only old ones go."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ps_protocol.errors import ConfigError, InvalidRequest
from ps_server.checkpoint.commit import commit
from ps_server.checkpoint.directory import (
    MARK_NAME,
    MARKS,
    KeptMark,
    begin,
    committed,
    discard,
    latest,
    listed,
    mark_of,
    of_step,
    protect,
    prune,
)

from .support import Job, shard_map_of, small_spec


@pytest.fixture(scope="module")
def job() -> Job:
    return Job.of(shard_map_of(small_spec(), 2), seed=1)


def saved_at(job: Job, directory: Path, version: object) -> Path:
    """A checkpoint whose shards note this version."""
    facts = {"tracker": {"version": version}}
    folder = begin(directory)
    parts = [replace(part, facts=facts) for part in job.parts(folder)]
    commit(folder, [job.shard_map], parts, {}, 0.0)
    return folder


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


def test_a_step_names_the_newest_checkpoint_with_it(tmp_path: Path, job: Job) -> None:
    folders = [saved_at(job, tmp_path, step) for step in (10, 20, 20, 30)]
    assert of_step(tmp_path, 20) == folders[2]
    assert [each.step for each in listed(tmp_path)] == [10, 20, 20, 30]


@pytest.mark.parametrize(
    ("saved", "asked", "expected"),
    [
        ((), 5, "a checkpoint: there is none"),
        ((10, 30), 20, "10, 30"),
        (range(100, 1000, 100), 420, "300, 400, 500, 600, of 9 from 100 to 900"),
    ],
)
def test_a_step_without_a_checkpoint_is_an_error_with_the_nearest(tmp_path, job, saved, asked, expected) -> None:
    for step in saved:
        saved_at(job, tmp_path, step)
    with pytest.raises(ConfigError, match=f"is of step {asked}") as error:
        of_step(tmp_path, asked)
    assert (error.value.expected, error.value.actual) == (expected, str(asked))


def test_the_step_is_the_highest_version_and_0_where_none_is_noted(tmp_path: Path, job: Job) -> None:
    assert [each.step for each in listed(tmp_path)] == []
    job.save(tmp_path)
    assert [each.step for each in listed(tmp_path)] == [0]


@pytest.mark.parametrize("version", [None, "7", -1, 1.5, True, 1 << 70, {}])
def test_a_version_that_is_no_number_is_no_step(tmp_path: Path, job: Job, version: object) -> None:
    saved_at(job, tmp_path, version)
    assert [each.step for each in listed(tmp_path)] == [0]


def test_the_newest_checkpoint_from_before_a_moment_is_kept_with_the_reason(tmp_path: Path, job: Job) -> None:
    folders = [job.save(tmp_path, now=float(now)).folder for now in range(5)]
    assert protect(tmp_path, 2.5, KeptMark("loss grew", "worker")) == folders[2]
    assert prune(tmp_path, 1) == [folders[0], folders[1], folders[3]]
    assert [(each.folder, each.kept) for each in listed(tmp_path)] == [(folders[2], "loss grew"), (folders[4], "")]
    (folders[2] / MARK_NAME).unlink()
    assert prune(tmp_path, 1) == [folders[2]]


def test_without_a_checkpoint_from_before_the_oldest_is_kept(tmp_path: Path, job: Job) -> None:
    assert protect(tmp_path, 9.0, KeptMark("loss grew", "worker")) is None
    folders = [job.save(tmp_path, now=float(now)).folder for now in range(1, 4)]
    assert protect(tmp_path, 0.5, KeptMark("loss grew", "worker")) == folders[0]
    assert prune(tmp_path, 1) == [folders[1]]


def test_a_checkpoint_that_is_kept_already_keeps_its_reason(tmp_path: Path, job: Job) -> None:
    folder = job.save(tmp_path, now=1.0).folder
    protect(tmp_path, 2.0, KeptMark("loss grew", "worker"))
    protect(tmp_path, 2.0, KeptMark("gradients grew", "shard"))
    assert [each.kept for each in listed(tmp_path)] == ["loss grew"]
    assert mark_of(folder) == KeptMark("loss grew", "worker")


def test_of_one_role_the_last_marks_stay_and_those_of_another_role_are_left(tmp_path: Path, job: Job) -> None:
    folders = [job.save(tmp_path, now=float(now)).folder for now in range(8)]
    protect(tmp_path, 0.5, KeptMark("gradients grew", "shard"))
    for now in range(1, 7):
        protect(tmp_path, now + 0.5, KeptMark("loss grew", "worker"))
    kept = [folder for folder in folders if mark_of(folder)]
    assert kept == [folders[0], *folders[7 - MARKS : 7]]


@pytest.mark.parametrize("damage", [b"", b"{", b"\xff" * 5000])
def test_a_checkpoint_whose_mark_is_damaged_is_kept(tmp_path: Path, job: Job, damage: bytes) -> None:
    folders = [job.save(tmp_path, now=float(now)).folder for now in range(3)]
    protect(tmp_path, 0.5, KeptMark("loss grew", "worker"))
    (folders[0] / MARK_NAME).write_bytes(damage)
    assert prune(tmp_path, 1) == [folders[1]]
    assert listed(tmp_path)[0].kept == "kept.json cannot be read"


def test_a_checkpoint_whose_manifest_is_damaged_is_listed_and_never_chosen(tmp_path: Path, job: Job) -> None:
    folders = [job.save(tmp_path, now=float(now)).folder for now in range(3)]
    (folders[1] / "manifest.json").write_text("{")
    assert protect(tmp_path, 1.5, KeptMark("loss grew", "worker")) == folders[0]
    assert [(each.step, each.size_bytes, each.at_seconds) for each in listed(tmp_path)][1] == (None, None, None)


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
