"""Rows of files under each strategy: every row is trained once in an epoch, or the strategy says that it cannot."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import ps_worker
from ps_worker import ConfigError, files
from tests.support.length import few
from tests.support.shards import wait_until
from tests.worker.data.files.made import folder, parquet
from tests.worker.jobs import running_job, together
from tests.worker.strategies.replicas import Replicas

ROWS = 700


@pytest.fixture(autouse=True)
def rows(tmp_path: Path) -> None:
    assert folder(tmp_path / "rows", [300, 250, 150]) == ROWS
    parquet(tmp_path / "more" / "rows.parquet", range(ROWS, ROWS + 90), group=8)


def pair(batch: dict[str, Any]) -> tuple[Tensor, Tensor]:
    return batch["x"][:, None], batch["id"]


def read(path: Path) -> files.FileBatches:
    return files.read(path, ["x", "id"], batch_size=16, transform=pair)


class Seen:
    """A loss that keeps the ids which it gets."""

    def __init__(self) -> None:
        self.trained: list[int] = []
        self.evaluated: list[int] = []

    def __call__(self, output: Tensor, ids: Tensor) -> Tensor:
        into = self.trained if torch.is_grad_enabled() else self.evaluated
        into += ids.tolist()
        return output.mean() * 0 + ids.double().mean()


def fit(s: Any, path: Path, epochs: int = 2, **options: Any) -> tuple[Seen, Any]:
    model, _ = s.prepare(nn.Linear(1, 1), torch.optim.SGD, lr=0.0)
    seen = Seen()
    given = {"validation": read(path / "more"), "progress": False, **options}
    return seen, s.fit(model, read(path / "rows"), loss=seen, epochs=epochs, **given)


@pytest.mark.parametrize("mode", few(["sync", None, "async", "ssp"], 2))
def test_every_row_is_trained_once_an_epoch_and_measured_once(tmp_path: Path, mode: str | None) -> None:
    name, options = ("parameter_server", {"mode": mode, "staleness": 1}) if mode else ("central_storage", {})
    options = {key: value for key, value in options.items() if key == "mode" or mode == "ssp"}
    with running_job(shards=2, workers=2) as job:

        def one(rank: int) -> tuple[Seen, Any]:
            with ps_worker.strategy(name, coordinator=job.address, rank=rank, device="cpu", **options) as s:
                return fit(s, tmp_path)

        (zero, history), (first, other) = together(lambda: one(0), lambda: one(1))
    assert Counter(zero.trained + first.trained) == dict.fromkeys(range(ROWS), 2)
    assert Counter(zero.evaluated + first.evaluated) == dict.fromkeys(range(ROWS, ROWS + 90), 2)
    assert history == other
    assert [epoch["loss"] for epoch in history] == pytest.approx([(ROWS - 1) / 2] * 2)
    assert [epoch["val_loss"] for epoch in history] == pytest.approx([ROWS + 89 / 2] * 2)


def test_one_device_trains_all_rows_and_goes_on_with_the_order_of_its_epoch(tmp_path: Path) -> None:
    with ps_worker.strategy("one_device", device="cpu") as s:
        whole, _ = fit(s, tmp_path)
    saved = tmp_path / "fit.pt"
    parts = []
    for epochs in (1, 2):
        with ps_worker.strategy("one_device", device="cpu") as s:
            parts += fit(s, tmp_path, epochs, checkpoint=saved)[0].trained
    assert parts == whole.trained
    assert Counter(parts) == dict.fromkeys(range(ROWS), 2)


def test_files_of_the_connection_are_taken_as_they_are(tmp_path: Path) -> None:
    with (
        running_job() as job,
        ps_worker.strategy("parameter_server", coordinator=job.address, device="cpu") as s,
    ):
        mine = s.cluster.files(tmp_path / "rows", ["id"], batch_size=16, name="rows")
        assert s.distribute(mine) is mine
        leased = s.distribute(read(tmp_path / "rows"))
        assert leased.leased
        assert s.distribute(leased) is leased


def test_a_batch_without_a_target_is_refused_with_what_to_do(tmp_path: Path) -> None:
    with ps_worker.strategy("one_device", device="cpu") as s:
        model, _ = s.prepare(nn.Linear(1, 1), torch.optim.SGD, lr=0.0)
        with pytest.raises(ConfigError, match="transform= of files"):
            s.fit(model, files.read(tmp_path / "rows", batch_size=16), loss=Seen(), progress=False)


def distribute(path: str) -> None:
    with ps_worker.strategy("mirrored", devices="cpu") as s:
        s.distribute(read(Path(path)))


def test_replicas_that_need_as_many_batches_refuse_files(tmp_path: Path) -> None:
    replicas = Replicas(tmp_path, 2, distribute, str(tmp_path / "rows"))
    try:
        for answer in replicas.answers():
            assert answer["error"] == "ConfigError"
            assert "parameter_server or central_storage" in answer["message"]
    finally:
        replicas.close()


@pytest.mark.parametrize("kind", ["files", "loader"])
def test_workers_whose_ranks_have_gaps_measure_every_sample_once(tmp_path: Path, kind: str) -> None:
    data: Any = read(tmp_path / "more")
    if kind == "loader":
        every = torch.arange(ROWS, ROWS + 90)
        data = DataLoader(TensorDataset(every[:, None].float(), every), batch_size=16)
    with running_job(workers=0) as job:
        first, left, last = (
            ps_worker.strategy("parameter_server", coordinator=job.address, rank=rank, device="cpu")
            for rank in range(3)
        )
        left.close()
        wait_until(lambda: first.replicas == last.replicas == 2)

        def evaluated(s: Any) -> list[int]:
            model, _ = s.prepare(nn.Linear(1, 1), torch.optim.SGD, lr=0.0)
            seen = Seen()
            with s:
                s.evaluate(model, data, loss=seen)
            return seen.evaluated

        found = together(lambda: evaluated(first), lambda: evaluated(last))
    assert Counter(itertools.chain(*found)) == dict.fromkeys(range(ROWS, ROWS + 90), 1)
