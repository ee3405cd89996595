"""``ps_worker.admin``: an operator's calls from Python, on a real job with a table."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch

import ps_worker
from ps_protocol.launch.ports import free_port
from ps_server.cli.options.checkpoint import CheckpointConfig
from ps_server.cli.psctl import main
from ps_worker import admin, feed, rows
from tests.support.shards import wait_until
from tests.worker.jobs import running_job

IDS = np.arange(5)

#: Commands of psctl that need no job.
FILES_ONLY = {"tables", "certs", "checkpoints", "export", "verify", "trace"}
CALLS = {
    "checkpoint": "checkpoint",
    "divergence": "acknowledge_divergence",
    "drain": "drain",
    "feed": "feed",
    "import-rows": "load_rows",
    "lr": "learning_rates",
    "mode": "set_mode",
    "move": "move",
    "release": "release",
    "report": "history",
    "restore": "restore",
    "scale": "scale",
    "status": "status",
    "top": "history",
    "wait": "wait",
    "weights": "weights",
}


def test_each_command_of_psctl_that_asks_a_job_has_its_call():
    assert set(main.main.commands) - FILES_ONLY == set(CALLS)
    assert [call for call in CALLS.values() if not callable(getattr(admin.AdminClient, call, None))] == []


# A shard that does not answer within a second is left out of what is summed.


def wait_for_rows(operator: admin.AdminClient, count: int) -> None:
    wait_until(lambda: [table.rows for table in operator.tables()] == [count])


def learning_rates(operator: admin.AdminClient) -> list[tuple[float | None, ...]]:
    with suppress(ps_worker.Unavailable):
        return [rate.groups for rate in operator.learning_rates()]
    return []


def trained(cluster: ps_worker.Cluster) -> ps_worker.Optimizer:
    """An optimizer after one step of a model with a table."""
    ads = cluster.embedding(2, name="ads", optimizer=rows.Adagrad(lr=0.5))
    model = torch.nn.ModuleList([ads, torch.nn.Linear(2, 1)])
    optimizer = cluster.optimizer(torch.optim.SGD, model, lr=0.25)
    model[1](ads(torch.tensor([7]))).sum().backward()
    optimizer.step()
    return optimizer


def test_a_job_is_looked_at_and_changed_while_it_trains(tmp_path, monkeypatch):
    with running_job(2, 1, checkpoints=CheckpointConfig(tmp_path)) as job, job.cluster() as cluster:
        optimizer = trained(cluster)
        monkeypatch.setenv("PS_COORDINATOR", job.address)
        with admin.connect() as operator:
            assert admin.job_state(operator.wait("training")).name == "training"
            wait_until(lambda: learning_rates(operator) == [(0.25,)])
            assert operator.set_mode("ssp", staleness=3) == admin.Consistency(admin.Mode.SSP, 3)
            assert operator.status().view.consistency.staleness == 3
            assert str(operator.set_mode("async", stale_policy="reject", stale_threshold=9)) == "async, reject above 9"
            assert operator.set_mode("ssp", staleness=3, stale_policy="scale").stale_by_workers

            written = operator.checkpoint()
            assert Path(written.folder).parent == tmp_path
            assert operator.checkpoints() == operator.history().checkpoints
            values = np.arange(10, dtype=np.float32).reshape(5, 2)
            assert operator.load_rows("ads", IDS, values) == 5
            wait_for_rows(operator, 6)
            found = {
                int(id_): row.tolist()
                for change in operator.feed("ads", follow=False)
                for id_, row in zip(change.ids, change.rows, strict=True)
            }
            assert {id_: found[id_] for id_ in IDS.tolist()} == dict(enumerate(values.tolist()))
            assert operator.restore() == admin.RestoredCheckpoint(written.folder, ("model",))
            wait_for_rows(operator, 1)

            seen: list[admin.MoveProgress] = []
            moved = operator.drain([1], on_progress=seen.append)
            assert (moved.moved_bytes, moved.batches) == (seen[-1].moved_bytes, seen[-1].batches)
            assert moved.batches
            assert operator.status().view.spare == frozenset({1})
            assert operator.move().batches == 0

            optimizer.close()
            assert operator.release("model") > 0
            with pytest.raises(ps_worker.UnknownModel):
                operator.learning_rates("model")
            with pytest.raises(ps_worker.NotReady, match="not '2-workers' after 0 s"):
                operator.wait("2-workers", timeout_seconds=0)


@pytest.mark.parametrize(
    ("ids", "values", "says"),
    [
        (IDS.astype(np.int32), np.zeros((5, 2), np.float32), r"the ids .* expected: int64 \[n\]; actual: int32 \[5\]"),
        (IDS, np.zeros((5, 2)), "the values .* actual: float64"),
        (IDS, np.zeros((5, 3), np.float32), r"float32 \[5, 2\] or float32 \[5, 4\]; actual: float32 \[5, 3\]"),
        (IDS, np.full((5, 2), np.nan, np.float32), "NaN or infinity in the row of id 0"),
    ],
)
def test_rows_that_do_not_fit_are_refused_before_any_is_written(job_with_table, ids, values, says):
    with pytest.raises(ps_worker.InvalidRequest, match=says):
        job_with_table.load_rows("ads", ids, values)
    wait_for_rows(job_with_table, 1)


@pytest.fixture(scope="module")
def job_with_table():
    with running_job(2, 1) as job, job.cluster() as cluster:
        trained(cluster)
        with admin.connect(job.address) as operator:
            yield operator


def test_rows_with_the_state_of_the_optimizer_keep_it(job_with_table):
    values = np.arange(4, dtype=np.float32).reshape(1, 4)
    job_with_table.load_rows("ads", [7], values)
    changes = [*job_with_table.feed("ads", with_state=True, follow=False)]
    assert [row.tolist() for change in changes for row in change.rows] == values.tolist()


def test_it_connects_from_the_host_of_a_server_with_the_tf_config_of_that(job_with_table, monkeypatch):
    cluster = {"chief": [job_with_table.address], "ps": ["host:1"], "worker": ["host:2"]}
    config = {"cluster": cluster, "task": {"type": "ps", "index": 0}}
    monkeypatch.delenv("PS_COORDINATOR", raising=False)
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))
    with admin.connect() as operator:
        assert operator.status().view.expected_shards == 2
    change = next(iter(feed.follow_table(None, "ads", follow=False)))
    assert change.table.name == "ads"


@pytest.mark.parametrize(
    "call",
    [
        lambda job: job.set_mode("ssp", staleness=1 << 64),
        lambda job: job.drain([1 << 40]),
        lambda job: job.history(last_points=-1),
        lambda job: job.release("\udc80"),
        lambda job: job.restore("/\udc80"),
    ],
)
def test_what_no_message_holds_is_a_typed_error(job_with_table, call):
    with pytest.raises(ps_worker.InvalidRequest, match="cannot be sent"):
        call(job_with_table)


def test_mistakes_are_typed_errors(job_with_table):
    with pytest.raises(ps_worker.ConfigError, match="unknown value for mode"):
        job_with_table.set_mode("quick")
    for wrong in (
        lambda: job_with_table.set_mode("async", stale_threshold=-1),
        lambda: job_with_table.set_mode("sync", backup=1, grace_seconds=float("nan")),
        lambda: job_with_table.move([1], batch_bytes=-1),
        lambda: job_with_table.drain([-1]),
        lambda: job_with_table.drain([]),
        job_with_table.scale,
    ):
        with pytest.raises(ps_worker.InvalidRequest):
            wrong()
    with pytest.raises(ps_worker.InvalidRequest, match="is not a state"):
        job_with_table.wait("running")
    with pytest.raises(ps_worker.InvalidRequest, match="has no table 'users'"):
        job_with_table.load_rows("users", IDS, np.zeros((5, 2), np.float32))
    with pytest.raises(ps_worker.Unavailable, match=r"127\.0\.0\.1"):
        admin.connect(f"127.0.0.1:{free_port()}", connect_timeout_seconds=0.5)
