"""The program that kills shards while readers follow: what it counts as wrong, and what it says."""

from __future__ import annotations

import itertools

import pytest
from click.testing import CliRunner

from benchmarks import mixed
from benchmarks.mixed import Seen, reader, trainer
from tests.support.shards import wait_until
from tests.worker.jobs import running_job


def test_readers_compare_every_version_with_the_checksum_of_the_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    with running_job(shards=2) as job, reader(job.address) as follower, trainer(job.address, 40_000, 100.0) as source:
        wait_until(lambda: follower.seen().versions >= 3)
        assert follower.seen().wrong == []
        different = itertools.count()
        monkeypatch.setattr(mixed, "checksum", lambda _: str(next(different)))
        wait_until(lambda: follower.seen().wrong)
        monkeypatch.undo()
        assert "is mixed" in follower.seen().wrong[0]
        source.stop()
        assert source.progress()[0] >= follower.seen().newest
        assert source.progress()[1] == []


class Cluster:
    """Nothing runs."""

    address = "nowhere"

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class Told(Cluster):
    """A child that answers as it was told to."""

    answers: dict[str, object]

    def __init__(self, role: object, *_: object) -> None:
        self._role = role

    def ready(self) -> None:
        pass

    def call(self, method: str) -> object:
        return self.answers[method]


@pytest.mark.parametrize(
    ("wrong", "code", "last"),
    [
        ([], 0, "14 versions seen by 2 readers, 0 kills of shards: 0 wrong"),
        (["version 7 is mixed"], 1, "14 versions seen by 2 readers, 0 kills of shards: 2 wrong"),
    ],
)
def test_the_verdict_is_in_the_last_line_and_in_the_exit_code(
    wrong: list[str], code: int, last: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mixed, "running_cluster", lambda **_: Cluster())
    monkeypatch.setattr(mixed, "Child", Told)
    monkeypatch.setattr(
        Told, "answers", {"seen": Seen(7, 7, wrong=wrong), "progress": (7, []), "stop": None}, raising=False
    )
    done = CliRunner().invoke(mixed.main, ["--readers", "2", "--seen", "14", "--kill-seconds", "0"])
    assert done.exit_code == code, done.output
    assert done.output.splitlines()[-1] == last
