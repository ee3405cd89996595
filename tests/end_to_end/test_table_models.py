"""Models with tables around training: converted ones, evaluators, declarations that differ, rows that are refused."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn

from ps_protocol.cluster.view import Role
from ps_protocol.errors import ConfigError, InvalidRequest, ModelMismatch, NonFiniteGradient, TableFull
from ps_protocol.model.spec import Consistency, Mode
from ps_worker import Cluster, rows
from ps_worker.tables import EmbeddingBags, Table
from tests.end_to_end.table_training import (
    DIM,
    TOP,
    Model,
    on_shards,
    read,
    steps_of,
    train,
)
from tests.end_to_end.training import run_workers
from tests.support.shards import wait_until
from tests.worker.jobs import running_job

_SEEDED = threading.Lock()
"""Held while values are drawn: workers are threads here, and the generator is one."""


class Old(nn.Module):
    """As a model was before there were tables."""

    def __init__(self) -> None:
        super().__init__()
        with _SEEDED:
            torch.manual_seed(1)
            self.user = nn.Embedding(60, 4, padding_idx=0)
            self.item = nn.EmbeddingBag(50, 4, mode="sum")
            self.small = nn.Embedding(5, 4)
            self.same = nn.Embedding(60, 4)
        self.same.weight = self.user.weight

    def forward(self, user: torch.Tensor, item: torch.Tensor) -> torch.Tensor:
        result = self.user(user) * self.item(item) + self.small(user % 5) + self.same(user)
        return result.sum(1)


def test_a_converted_model_begins_and_trains_as_before() -> None:
    generator = torch.Generator().manual_seed(2)
    data = [
        (torch.randint(1, 60, (7,), generator=generator), torch.randint(50, (7, 3), generator=generator))
        for _ in range(4)
    ]
    plain = Old()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    outputs = []
    for user, item in data:
        optimizer.zero_grad()
        outputs.append(plain(user, item))
        outputs[-1].mean().backward()
        optimizer.step()

    def work(cluster: Cluster) -> list[torch.Tensor]:
        model = cluster.convert_embeddings(Old(), min_rows=50, optimizer=rows.SGD(lr=0.1))
        assert [name for name, _ in model.named_parameters()] == ["small.weight"]
        assert model.user.tables == model.same.tables
        own, found = cluster.optimizer(torch.optim.SGD, model, lr=0.1), []
        assert model.user.tables[0].initial is None
        for user, item in data:
            own.zero_grad()
            found.append(model(user, item))
            found[-1].mean().backward()
            own.step()
        return found

    with running_job(2, 2, consistency=Consistency(Mode.SYNC)) as job:
        for found in run_workers(job, 2, work):
            for mine, theirs in zip(found, outputs, strict=True):
                torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-5)


def test_an_evaluator_reads_rows_as_they_are() -> None:
    with running_job(2, 1) as job:
        cluster = job.cluster()
        model = on_shards(cluster, "sum", rows.SGD(lr=0.5), shared=False)
        optimizer = cluster.optimizer(torch.optim.SGD, model, lr=TOP)
        evaluator = job.cluster(Role.EVALUATOR)
        copy = on_shards(evaluator, "sum", rows.SGD(lr=0.5), shared=False)
        versions = evaluator.follow(copy, min_interval_seconds=0.01)
        next(versions)
        train(cluster, model, optimizer, [step[0] for step in steps_of(1, 3, 1)])
        assert next(versions) == 3
        for mine, theirs in zip(read(copy.one, copy.two), read(model.one, model.two), strict=True):
            assert torch.equal(mine, theirs)
        other = Model(evaluator.embedding_bag(DIM, name="one"), evaluator.embedding_bag(5, name="three"))
        with pytest.raises(
            ModelMismatch, match="table 'two' is missing here; table 'three' is not in the declared model"
        ):
            next(evaluator.follow(other))
        many = torch.arange(700_000)[:, None]
        with torch.no_grad():
            assert copy.one(many).shape == (700_000, DIM)


def test_workers_that_declare_a_table_differently_are_told(tmp_path: Any) -> None:
    def work(cluster: Cluster) -> str:
        model = nn.ModuleList([cluster.embedding(3 if cluster.rank == 0 else 4, name="t")])
        if cluster.rank == 1:
            wait_until(lambda: "model" in cluster._session.view.models)
        try:
            cluster.optimizer(torch.optim.SGD, model, lr=0.1)
        except ModelMismatch as error:
            return str(error)
        return ""

    with running_job(1, 2) as job:
        _, second = run_workers(job, 2, work)
    assert "'t'" in second


def test_bad_rows_are_refused_by_name_and_training_goes_on() -> None:
    with running_job(2) as job:
        cluster = job.cluster()
        full = cluster.embedding_bag(2, name="full", mode="sum", max_rows=256, optimizer=rows.SGD(lr=1.0))
        optimizer = cluster.optimizer(torch.optim.SGD, nn.ModuleList([full]), lr=0.1)
        (full(torch.tensor([[1]])) * float("nan")).sum().backward()
        with pytest.raises(NonFiniteGradient, match="full"):
            optimizer.step()
        optimizer.zero_grad()
        full(torch.arange(2000)[:, None]).sum().backward()
        with pytest.raises(TableFull, match="full"):
            optimizer.step()
        optimizer.zero_grad()
        before = full(torch.tensor([[1]]))
        before.sum().backward()
        optimizer.step()
        with torch.no_grad():
            torch.testing.assert_close(full(torch.tensor([[1]])), before - 1)
        other = cluster.embedding_bags({"a": Table(2, name="a")})
        with pytest.raises(ConfigError, match="prefetch"):
            cluster.optimizer(torch.optim.SGD, other, lr=0.1, name="other", overlap=True)
        with pytest.raises(InvalidRequest, match="another model"):
            cluster.optimizer(torch.optim.SGD, EmbeddingBags({"f": full}), lr=0.1, name="third")
