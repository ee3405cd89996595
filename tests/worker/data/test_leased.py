"""Workers of an elastic job lease their data: every item is trained once an epoch, also when workers leave or die."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler, TensorDataset

from ps_protocol.cluster.view import Role
from ps_protocol.errors import ConfigError, InvalidRequest
from ps_worker import Cluster
from ps_worker.data.leased_loader import LeasedLoader, lease_items
from tests.support.length import paired
from tests.support.shards import wait_until
from tests.worker.jobs import Job, running_job, together

pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")

ITEMS = 96


@pytest.fixture
def job() -> Iterator[Job]:
    with running_job(workers=0) as job:
        yield job


def loader(items: int = ITEMS, **arguments: Any) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.arange(items)), **{"batch_size": 4, **arguments})


def numbers(batch: Any) -> list[int]:
    tensor = batch[0] if isinstance(batch, list) else batch
    return [int(tensor)] if tensor.ndim == 0 else tensor.tolist()


def epoch_of(leased: Any) -> list[int]:
    return [item for batch in leased for item in numbers(batch)]


def kill(cluster: Cluster) -> None:
    """To the cluster it is as if the process had died."""
    cluster._session._membership.close()


def test_a_worker_alone_gets_everything_in_the_order_of_the_epoch(job: Job) -> None:
    cluster = job.cluster()
    assert epoch_of(cluster.shard(loader())) == list(range(ITEMS))
    shuffled = cluster.shard(loader(shuffle=True))
    first, second = epoch_of(shuffled), epoch_of(shuffled)
    assert first != second
    assert sorted(first) == sorted(second) == list(range(ITEMS))


@pytest.mark.parametrize("loader_processes", [0, 2])
def test_workers_share_an_epoch_exactly_in_whole_batches(job: Job, loader_processes: int) -> None:
    clusters = [job.cluster() for _ in range(3)]

    def train(cluster: Cluster) -> list[list[list[int]]]:
        mine = cluster.shard(loader(98, shuffle=True, num_workers=loader_processes))
        return [[numbers(batch) for batch in mine] for _ in range(3)]

    parts = together(*(lambda c=c: train(c) for c in clusters))
    for epoch in range(3):
        batches = [batch for part in parts for batch in part[epoch]]
        assert sorted(itertools.chain(*batches)) == list(range(98))
        assert sorted(map(len, batches)) == [2] + [4] * 24


def test_with_a_fixed_number_of_workers_data_is_leased_on_request_only() -> None:
    with running_job(workers=1) as job:
        cluster = job.cluster()
        assert not isinstance(cluster.shard(loader()), LeasedLoader)
        leased = cluster.shard(loader(), lease=True)
        assert isinstance(leased, LeasedLoader)
        assert epoch_of(leased) == list(range(ITEMS))


def test_in_an_elastic_job_the_split_by_live_workers_can_be_asked_for(job: Job) -> None:
    first, second = job.cluster(), job.cluster()
    wait_until(lambda: first.world_size == second.world_size == 2)
    parts = [epoch_of(cluster.shard(loader(), lease=False)) for cluster in (first, second)]
    assert parts == [list(range(0, ITEMS, 2)), list(range(1, ITEMS, 2))]


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(10))


@pytest.mark.parametrize("data", [DataLoader(Stream()), TensorDataset(torch.arange(4))], ids=["iterable", "dataset"])
def test_what_has_no_numbered_items_keeps_the_split_and_cannot_be_leased(job: Job, data: Any) -> None:
    cluster = job.cluster()
    assert len(list(cluster.shard(data))) in (4, 10)
    with pytest.raises(ConfigError, match="lease=True"):
        cluster.shard(data, lease=True)


def test_an_evaluator_gets_everything_and_leases_nothing(job: Job) -> None:
    assert epoch_of(job.cluster(Role.EVALUATOR).shard(loader())) == list(range(ITEMS))


def test_a_worker_that_joins_gets_its_part_of_the_epoch_under_way(job: Job) -> None:
    first = job.cluster()
    mine = first.shard(loader())
    for _ in range(2):
        epoch_of(mine)
    running = iter(mine)
    seen = numbers(next(running))
    late = job.cluster()
    theirs: list[list[int]] = [[], [], []]
    leased, begun = late.shard(loader()), threading.Event()

    def train_late() -> None:
        for epoch in range(3):
            for batch in leased:
                theirs[epoch].extend(numbers(batch))
                begun.set()

    def train_on() -> None:
        assert begun.wait(60)
        for batch in running:
            seen.extend(numbers(batch))

    together(train_late, train_on)
    assert theirs[:2] == [[], []]
    assert theirs[2]
    assert sorted(seen + theirs[2]) == list(range(ITEMS))


def test_a_lease_that_was_used_up_is_reported_with_the_next_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ps_server.coordinator.times.DISCONNECTED_SECONDS", 0.5)
    with running_job(workers=0) as job:
        dead, alive = job.cluster(), job.cluster()
        running = iter(dead.shard(loader()))
        size = lease_items(ITEMS, 4, 2)
        lost = {number for _ in range(2 * size // 4 + 1) for number in numbers(next(running))}
        kill(dead)
        again = set(epoch_of(alive.shard(loader()))) & lost
        assert len(again) <= 2 * size


def stop_by_break(cluster: Cluster, leased: Any) -> list[int]:
    seen: list[int] = []
    for batch in leased:
        if len(seen) == 12:
            break
        seen += numbers(batch)
    return seen


def stop_by_exception(cluster: Cluster, leased: Any) -> list[int]:
    seen: list[int] = []

    def train() -> None:
        with cluster:
            for batch in leased:
                if len(seen) == 12:
                    _ = 1 / 0
                seen.extend(numbers(batch))

    with pytest.raises(ZeroDivisionError):
        train()
    return seen


def stop_by_leaving(cluster: Cluster, leased: Any) -> list[int]:
    running = iter(leased)
    seen = [number for _ in range(3) for number in numbers(next(running))]
    next(running)
    cluster.close()
    return seen


@pytest.mark.parametrize(
    ("stop", "loader_processes"), paired([stop_by_break, stop_by_exception, stop_by_leaving], [2, 0])
)
def test_what_was_trained_is_reported_and_the_rest_given_back(
    job: Job, stop: Callable[[Cluster, Any], list[int]], loader_processes: int
) -> None:
    first, second = job.cluster(), job.cluster()
    seen = stop(first, first.shard(loader(num_workers=loader_processes)))
    assert seen == list(range(12))
    assert epoch_of(second.shard(loader())) == list(range(12, ITEMS))


def test_a_batch_in_hand_counts_as_trained_when_a_step_was_made_with_it(job: Job) -> None:
    first, second = job.cluster(), job.cluster()
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = first.optimizer(torch.optim.SGD, [parameter], lr=0.1)
    for _ in first.shard(loader()):
        parameter.grad = torch.ones(1)
        optimizer.step()
        break
    assert epoch_of(second.shard(loader())) == list(range(4, ITEMS))


def test_an_iteration_after_a_break_goes_on_with_what_is_left(job: Job) -> None:
    cluster = job.cluster()
    leased = cluster.shard(loader())
    assert stop_by_break(cluster, leased) == list(range(12))
    assert epoch_of(leased) == [*range(12, ITEMS), *range(ITEMS)]


def test_a_second_iteration_ends_the_first(job: Job) -> None:
    leased = job.cluster().shard(loader())
    first = iter(leased)
    next(first)
    assert epoch_of(leased) == [*range(ITEMS), *range(ITEMS)]
    first.close()


def test_the_same_loader_sharded_again_goes_on_with_its_epochs_and_others_have_names_of_their_own(job: Job) -> None:
    cluster = job.cluster()
    train, test = loader(), loader(8)
    assert [len(epoch_of(cluster.shard(data))) for data in (train, test, train, test)] == [ITEMS, 8, ITEMS, 8]
    assert [len(epoch_of(cluster.shard(loader(12), name="mine"))) for _ in range(2)] == [12, 12]


def test_workers_with_different_data_under_one_name_are_told_so(job: Job) -> None:
    first, second = job.cluster(), job.cluster()
    epoch_of(first.shard(loader()))
    with pytest.raises(InvalidRequest, match=r"96 items.*97 items"):
        epoch_of(second.shard(loader(97)))


def test_incomplete_batches_are_dropped_when_the_loader_drops_them_and_the_epoch_ends(job: Job) -> None:
    leased = job.cluster().shard(loader(30, drop_last=True))
    assert [len(epoch_of(leased)) for _ in range(2)] == [28, 28]


@pytest.mark.parametrize(
    "arguments",
    [
        {"batch_size": None},
        {"batch_size": 1, "batch_sampler": BatchSampler(SequentialSampler(range(ITEMS)), 5, drop_last=False)},
    ],
    ids=["no batching", "batch sampler"],
)
def test_loaders_without_batching_or_with_a_batch_sampler_are_leased(job: Job, arguments: dict[str, Any]) -> None:
    clusters = [job.cluster(), job.cluster()]
    parts = together(*(lambda c=c: epoch_of(c.shard(loader(**arguments))) for c in clusters))
    assert sorted(itertools.chain(*parts)) == list(range(ITEMS))


def test_a_sampler_that_belies_its_length_is_named(job: Job) -> None:
    class Short(list[int]):
        def __iter__(self) -> Iterator[int]:
            return itertools.islice(super().__iter__(), 5)

    with pytest.raises(ConfigError, match="8 items"):
        epoch_of(job.cluster().shard(loader(sampler=Short(range(8)))))


def test_the_length_is_an_even_part_among_the_workers_that_live(job: Job) -> None:
    first = job.cluster()
    leased = first.shard(loader())
    assert len(leased) == 24
    job.cluster()
    wait_until(lambda: len(leased) == 12)


def test_who_waits_for_the_last_items_says_who_has_them(job: Job, caplog: pytest.LogCaptureFixture) -> None:
    first, second = job.cluster(), job.cluster()
    running = iter(first.shard(loader(4)))
    next(running)
    waiting = threading.Thread(target=lambda: epoch_of(second.shard(loader(4))))
    waiting.start()
    wait_until(lambda: "worker 1: waiting for the last items of 'data': worker 0 has them" in caplog.messages)
    assert list(running) == []
    waiting.join(60)
    assert not waiting.is_alive()


@pytest.mark.parametrize(
    ("length", "batch", "workers", "items"), [(0, 4, 1, 4), (96, 4, 1, 12), (96, 4, 3, 4), (10**6, 32, 2, 64 * 32)]
)
def test_a_lease_is_a_number_of_whole_batches(length: int, batch: int, workers: int, items: int) -> None:
    assert lease_items(length, batch, workers) == items
