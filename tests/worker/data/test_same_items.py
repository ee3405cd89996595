"""Data that is split already is refused, and data that splits itself is noticed. Costs 2 s of CPU time."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, Sampler, Subset, TensorDataset

from ps_protocol.errors import ConfigError
from ps_worker import Cluster
from ps_worker.data.same_items import SameItems
from tests.worker.jobs import running_job, together


class Numbers(IterableDataset[Any]):
    """``count`` numbers from ``first`` on, every ``step``-th."""

    def __init__(self, count: int = 40, first: int = 0, step: int = 1, sized: bool = True) -> None:
        self.numbers = range(first, count, step)
        self.sized = sized

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return ({"x": torch.tensor([float(n)]), "name": f"item {n}", "y": np.int64(n)} for n in self.numbers)

    def __len__(self) -> int:
        if not self.sized:
            raise TypeError
        return len(self.numbers)


class Own(Sampler[int]):
    """A sampler of the user's own."""

    def __init__(self, positions: range) -> None:
        self.positions = positions

    def __iter__(self) -> Iterator[int]:
        return iter(self.positions)

    def __len__(self) -> int:
        return len(self.positions)


def tensors(count: int = 40) -> Dataset[Any]:
    return TensorDataset(torch.arange(count))


Make = Callable[[int], Any]

SPLIT_TWICE: dict[str, Make] = {
    "in its iteration": lambda rank: DataLoader(Numbers(first=rank, step=2), batch_size=2),
    "in processes of its own": lambda rank: DataLoader(Numbers(first=rank, step=2), batch_size=2, num_workers=2),
    "alone": lambda rank: Numbers(first=rank, step=2),
    "fewer than are compared": lambda rank: Numbers(6, first=rank, step=2),
    "without a length": lambda rank: DataLoader(Numbers(first=rank, step=2, sized=False), batch_size=2),
    "a sampler": lambda rank: DataLoader(tensors(), sampler=Own(range(rank, 40, 2)), batch_size=2),
}

WHOLE: dict[str, Make] = {
    "a stream": lambda rank: DataLoader(Numbers(), batch_size=2),
    "a stream in processes": lambda rank: DataLoader(Numbers(), batch_size=2, num_workers=1),
    "a sampler": lambda rank: DataLoader(tensors(), sampler=Own(range(40)), batch_size=2),
    "shuffled": lambda rank: DataLoader(tensors(), shuffle=True, batch_size=2),
    "empty": lambda rank: DataLoader(Numbers(0), batch_size=2),
}


def read(make: Make, **how: Any) -> list[int]:
    """How many batches each of two workers reads in two epochs."""
    with running_job(1, 2) as job:
        clusters = together(lambda: job.cluster(rank=0), lambda: job.cluster(rank=1))
        parts = [cluster.shard(make(cluster.rank), **how) for cluster in clusters]
        return [sum(1 for _ in part) for _ in range(2) for part in parts]


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if "first items" in r.getMessage()]


@pytest.mark.parametrize("name", SPLIT_TWICE)
def test_data_that_splits_itself_by_rank_is_said_with_how_much_of_it_is_trained(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "ps_worker"):
        batches = read(SPLIT_TWICE[name])
    assert all(batches)
    texts = said(caplog)
    # Each worker says it once; the first one asks again in its second epoch.
    assert 1 <= len(texts) <= 2, texts
    wanted = {
        "fewer than are compared": "2 of the 3 items",
        "without a length": "one of 2 items",
    }.get(name, "10 of the 20 items")
    assert all(wanted in text and "leave it as it is" in text for text in texts), texts


@pytest.mark.parametrize("name", WHOLE)
def test_data_that_all_workers_have_alike_is_no_matter(name: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "ps_worker"):
        read(WHOLE[name])
    assert said(caplog) == []


def test_batches_of_equal_number_are_compared_too(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "ps_worker"):
        read(WHOLE["a stream"], even=True)
        read(WHOLE["a sampler"], even=True)
        assert said(caplog) == []
        read(SPLIT_TWICE["in its iteration"], even=True)
        read(SPLIT_TWICE["a sampler"], even=True)
    assert {text.split(" are others")[0] for text in said(caplog)} == {
        "the first items of the iterable dataset",
        "the first items of the sampler",
    }


def test_nobody_is_asked_at_every_batch_and_nothing_is_said_before_all_are_there() -> None:
    asked: list[str] = []

    def compare(own: str) -> None:
        asked.append(own)

    same = SameItems("sampler", 2, None, compare)
    assert len(list(same.watch(iter(range(1000)), checks=True))) == 1000
    assert len(asked) == 10
    assert len(set(asked)) == 1


@pytest.mark.parametrize(
    "again",
    [
        lambda cluster: cluster.shard(DataLoader(tensors(), batch_size=2)),
        lambda cluster: cluster.shard(DataLoader(tensors(), batch_size=2), even=True),
        lambda cluster: cluster.shard(DataLoader(tensors(), batch_size=2), lease=True),
        lambda cluster: cluster.shard(tensors()),
        lambda cluster: cluster.shard(Numbers()),
        lambda cluster: cluster.shard(DataLoader(Numbers(), batch_size=2)),
        lambda cluster: DataLoader(cluster.shard(tensors()), batch_size=2),
        lambda cluster: DataLoader(ConcatDataset([Subset(cluster.shard(tensors()), range(4))]), batch_size=2),
    ],
)
@pytest.mark.parametrize("how", [{}, {"even": True}, {"lease": True}], ids=str)
def test_what_was_split_is_not_split_again(again: Callable[[Cluster], Any], how: dict[str, bool]) -> None:
    with running_job(1, 1) as job, job.cluster(rank=0) as cluster:
        part = again(cluster)
        if how and not isinstance(part, DataLoader):
            return
        if how.get("lease") and isinstance(part.dataset, IterableDataset):
            return
        with pytest.raises(ConfigError, match=r"split among the workers already.*remedy: split it once") as caught:
            cluster.shard(part, **how)
        assert "40" in str(caught.value)


def test_what_another_program_has_split_is_not_split_again() -> None:
    from accelerate.data_loader import BatchSamplerShard, IterableDatasetShard

    batches = torch.utils.data.BatchSampler(Own(range(8)), 2, drop_last=False)
    with running_job(1, 1) as job, job.cluster(rank=0) as cluster:
        for loader in (
            DataLoader(tensors(), batch_sampler=BatchSamplerShard(batches, 2, 0)),
            DataLoader(IterableDatasetShard(Numbers(), batch_size=2, num_processes=2), batch_size=2),
        ):
            with pytest.raises(ConfigError, match="Shard already"):
                cluster.shard(loader)
