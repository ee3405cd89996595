"""Checkpoints of running jobs with tables: restored on any number of shards, in increments, exported and imported."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result
from safetensors.numpy import load_file, save_file

from ps_protocol.errors import ModelMismatch
from ps_protocol.model.spec import Consistency, Mode
from ps_server.checkpoint.checkpoint import Checkpoint
from ps_server.cli.options.checkpoint import CheckpointConfig
from ps_server.cli.psctl.main import main
from ps_worker import Cluster, rows
from tests.end_to_end.table_training import DIM, TOP, Model, loss_of, on_shards, read, steps_of, with_ids
from tests.end_to_end.training import run_workers
from tests.support.length import few
from tests.worker.jobs import Job, running_job

STEPS = 4
WORKERS = 2
BATCHES = steps_of(11, 4 * STEPS, WORKERS)
SYNC = Consistency(Mode.SYNC)
ADAM = rows.Adam(lr=0.05)

Found = list[torch.Tensor]
Then = Callable[[Cluster, Model], object]


def training(steps: range, then: Then | None = None, optimizer: rows.RowOptimizer = ADAM) -> Callable[[Cluster], Found]:
    """One worker's part of ``steps``; ``then`` is done by rank 0 behind the last. Gives the rows of both tables."""

    def work(cluster: Cluster) -> Found:
        model = on_shards(cluster, "sum", optimizer, shared=False)
        made = cluster.optimizer(torch.optim.SGD, model, lr=TOP)
        for step in steps:
            made.zero_grad()
            loss_of(model(*map(with_ids, BATCHES[step][cluster.rank]))).backward()
            made.step()
        cluster.barrier()
        if then and cluster.rank == 0:
            then(cluster, model)
        cluster.barrier()
        return read(model.one, model.two)

    return work


def trained(job: Job, steps: range, then: Then | None = None, optimizer: rows.RowOptimizer = ADAM) -> Found:
    return run_workers(job, WORKERS, training(steps, then, optimizer))[0]


def same(one: Found, other: Found) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def saved(tmp_path: Path, shards: int = 2, steps: int = STEPS, config: CheckpointConfig | None = None) -> Checkpoint:
    """A checkpoint behind every STEPS steps; the last."""
    with running_job(shards, WORKERS, consistency=SYNC, checkpoints=config or CheckpointConfig(tmp_path)) as job:
        trained(job, range(steps), lambda *_: job.client.checkpoint())
        return Checkpoint.open(max(tmp_path.iterdir()))


def psctl(job: Job, *arguments: str | Path) -> Result:
    return CliRunner().invoke(main, ["--coordinator", job.address, *map(str, arguments)])


@pytest.mark.parametrize(("before", "after"), few([(2, 3), (3, 1), (2, 2)], 2))
def test_rows_go_on_from_a_checkpoint_on_any_number_of_shards_bit_for_bit(
    tmp_path: Path, before: int, after: int
) -> None:
    with running_job(2, WORKERS, consistency=SYNC) as job:
        undisturbed = trained(job, range(2 * STEPS))
    checkpoint = saved(tmp_path, before)
    checkpoint.verify()
    with running_job(after, WORKERS, consistency=SYNC, saved=checkpoint) as job:
        resumed = trained(job, range(STEPS, 2 * STEPS))
    # The dense layer above rounds by how it is cut, and the gradients of rows with it.
    if before == after == 2:
        assert same(resumed, undisturbed)
    for one, other in zip(resumed, undisturbed, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


class Training:
    """One worker in this thread."""

    def __init__(self, job: Job, optimizer: rows.RowOptimizer = ADAM) -> None:
        self.cluster = job.cluster()
        self.model = on_shards(self.cluster, "sum", optimizer, shared=False)
        self.optimizer = self.cluster.optimizer(torch.optim.SGD, self.model, lr=TOP)

    def step(self, number: int) -> None:
        self.optimizer.zero_grad()
        loss_of(self.model(*map(with_ids, BATCHES[number][0]))).backward()
        self.optimizer.step()

    @property
    def rows(self) -> Found:
        return read(self.model.one, self.model.two)


def lineage(folder: Path) -> list[str]:
    return [each.folder.name for each in Checkpoint.open(folder).lineage("model", "one")]


def test_increments_of_a_running_job_give_what_it_had_and_what_they_go_on_from_is_kept(tmp_path: Path) -> None:
    config = CheckpointConfig(tmp_path, keep=1, full_every=3)
    with running_job(2, checkpoints=config) as job:
        training = Training(job)
        training.cluster.barrier()
        wide = torch.arange(1000)[:, None]  # most rows are not touched again
        training.model.one(wide).sum().backward()
        training.model.two(wide).sum().backward()
        training.optimizer.step()
        kept = []
        for number in range(4):
            training.step(number)
            job.client.checkpoint()
            kept.append(sorted(folder.name[-1] for folder in tmp_path.iterdir()))
        expected = training.rows
        assert kept == [["1"], ["1", "2"], ["1", "2", "3"], ["4"]]
        training.step(4)
        _, size, _ = job.client.checkpoint()
        last = max(tmp_path.iterdir())
        assert lineage(last) == ["checkpoint-00000005", "checkpoint-00000004"]
        Checkpoint.open(last).verify()
        assert size < Checkpoint.open(last).lineage("model", "one")[1].size_bytes / 2
        expected = training.rows
    with running_job(3, saved=Checkpoint.open(last)) as job:
        assert same(Training(job).rows, expected)


def test_rows_of_a_running_job_are_put_back_and_the_next_checkpoint_holds_all_of_them(tmp_path: Path) -> None:
    with running_job(2, checkpoints=CheckpointConfig(tmp_path, full_every=9)) as job:
        training = Training(job)
        training.step(0)
        job.client.checkpoint()
        before = training.rows
        for number in range(1, 4):
            training.step(number)
        assert not same(training.rows, before)
        job.client.restore_checkpoint()
        assert same(training.rows, before)
        training.step(4)
        after = training.rows
        job.client.checkpoint()
        last = max(tmp_path.iterdir())
        assert lineage(last) == [last.name]
    with running_job(1, saved=Checkpoint.open(last)) as job:
        assert same(Training(job).rows, after)


def test_a_checkpoint_with_other_tables_is_refused_with_every_difference(tmp_path: Path) -> None:
    checkpoint = saved(tmp_path)
    with running_job(1, saved=checkpoint) as job, pytest.raises(ModelMismatch) as refused:
        Training(job, rows.FTRL(lr=0.1))
    for table in ("one", "two"):
        assert f"table '{table}': optimizer ftrl instead of adam" in str(refused.value)


def test_rows_are_exported_imported_into_another_job_and_are_the_same(tmp_path: Path) -> None:
    checkpoint = saved(tmp_path / "checkpoints")
    with running_job(1, WORKERS, saved=checkpoint) as job:
        expected = trained(job, range(0))
    exported = CliRunner().invoke(main, ["export", str(checkpoint.folder), str(tmp_path / "out")])
    assert exported.output == f"{tmp_path / 'out'}: 3 files\n", exported.output
    told = CliRunner().invoke(main, ["export", str(checkpoint.folder), str(tmp_path / "again"), "--json"])
    facts = json.loads(told.output)
    assert (facts["folder"], len(facts["files"])) == (str(tmp_path / "again"), 3)
    assert all(Path(file).is_file() for file in facts["files"])
    with running_job(3) as job:
        training = Training(job)
        assert not same(training.rows, expected)
        for table in ("one", "two"):
            done = psctl(job, "import-rows", "--table", table, tmp_path / f"out/tables/{table}.safetensors")
            count = load_file(tmp_path / f"out/tables/{table}.safetensors")["ids"].size
            assert f"table {table}: {count} rows from 1 file, with state" in done.output, done.output
        assert same(training.rows, expected)
        path = tmp_path / "out/tables/one.safetensors"
        again = psctl(job, "import-rows", "--table", "one", "--json", path)
        count = load_file(path)["ids"].size
        assert json.loads(again.stdout) == {
            "model": "model",
            "table": "one",
            "rows": count,
            "files": [str(path)],
            "files_with_state": 1,
        }
        training.step(0)


def test_rows_of_no_use_are_refused_before_any_is_written(tmp_path: Path) -> None:
    good, bad, wide = (tmp_path / f"{name}.safetensors" for name in ("good", "bad", "wide"))
    ids, values = np.arange(10), np.full((10, DIM), 5.0, np.float32)
    save_file({"ids": ids, "rows": values}, good)
    save_file({"ids": ids, "rows": np.where(values == 5.0, np.float32("nan"), values)}, bad)
    save_file({"ids": ids, "rows": np.ones((10, DIM + 1), np.float32)}, wide)
    with running_job(2) as job:
        training = Training(job)
        before = training.rows
        for arguments, text in (
            (("--table", "one", good, bad), "NaN or infinity in the row of id 0"),
            (("--table", "one", good, wide), f"expected: float32 [n, {DIM}]; actual: float32 [n, {DIM + 1}]"),
            (("--table", "ads", good), "model 'model' has no table 'ads'; expected: one, two; actual: ads"),
        ):
            refused = psctl(job, "import-rows", *arguments)
            assert refused.exit_code != 0
            assert text in refused.output, refused.output
        assert same(training.rows, before)
        done = psctl(job, "import-rows", "--table", "one", good)
        assert "10 rows from 1 file, without state" in done.output, done.output
        with torch.no_grad():
            assert torch.equal(training.model.one(torch.arange(10)[:, None]), torch.full((10, DIM), 5.0))
