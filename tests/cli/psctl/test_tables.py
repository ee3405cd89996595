"""psctl on a job with tables: status sums what shards tell, and says who did not; tables move by their names."""

from __future__ import annotations

import json
from contextlib import ExitStack
from types import SimpleNamespace

import pytest

from ps_protocol.client.row_loader import RowLoader
from ps_protocol.errors import InvalidRequest, Unavailable
from tests.cli.launcher.fake_job import FakeJob, running_job
from tests.coordinator.tables import model, table

SPEC = model(table("emb", 8), table("small", 2), name="ads")


class Job(FakeJob):
    """A coordinator with two shards that hold tables, and a spare one."""

    def __init__(self, coordinator, client):
        super().__init__(coordinator, client)
        for shard in self.shards:
            shard.bucket_rows = {"emb": 5000}

    def owners(self):
        return self.client.get_shard_map("ads").tables

    def shown(self):
        """The cells of each table's line in psctl status."""
        return [line.split() for line in self.psctl("status").output.splitlines() if line.startswith("table")]


@pytest.fixture
def job():
    with running_job(Job, SPEC) as job:
        yield job


def test_status_shows_each_table_summed_over_its_shards(job):
    assert job.shown() == [
        ["table", "emb", "40000", "4.0M", "5", "0", "0", "2", "ads"],
        ["table", "small", "0", "0", "5", "0", "0", "2", "ads"],
    ]


def test_status_as_json_has_the_same_numbers(job):
    emb, _ = json.loads(job.psctl("status", "--json").output)["tables"]
    assert emb == {
        "model": "ads",
        "table": "emb",
        "rows": 40_000,
        "waiting": 0,
        "size_bytes": 4_000_000,
        "updates": 5,
        "inserted": 0,
        "expired": 0,
        "evicted": 2,
        "shards": 2,
        "answered": 2,
    }


def test_a_shard_that_does_not_answer_is_left_out_and_that_is_said(job):
    job.shards[1].fails["GetModel"] = [Unavailable("busy")]
    assert job.shown()[0][:8] == ["table", "emb", "(1", "of", "2", "shards)", "20000", "2.0M"]


def test_a_table_is_moved_by_name_and_a_drain_takes_its_buckets_along(job):
    done = job.psctl("move", "--model", "ads", "--variable", "emb", "--to", "2")
    assert done.exit_code == 0, done.output
    assert done.output.splitlines()[-1].startswith("moved 4.0 MB in 1 batch")
    assert job.owners() == ((2,) * 8, (0, 1))
    done = job.psctl("drain", "0", "2")
    assert done.exit_code == 0, done.output
    assert job.owners() == ((1,) * 8, (1, 1))


@pytest.mark.parametrize(
    ("tables", "says"),
    [
        ((), "model 'net' has no tables at all; expected: a model with tables; actual: ads; remedy: correct the name"),
        (("users",), "model 'net' has no table 'ads'; expected: users; actual: ads; remedy: correct the name"),
    ],
)
def test_rows_for_a_table_that_is_not_there_are_refused_with_what_is(monkeypatch, tables, says):
    spec = SimpleNamespace(tables=[SimpleNamespace(name=name) for name in tables])
    monkeypatch.setattr(RowLoader, "_look", lambda self: SimpleNamespace(spec=spec))
    with pytest.raises(InvalidRequest) as refused:
        RowLoader(None, "net", "ads", ExitStack())
    assert str(refused.value).startswith(says)
