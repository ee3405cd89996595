"""Workers share data exactly: every sample once per epoch, and their k-th batches form one window of a common order."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    get_worker_info,
)

from ps_protocol.errors import ConfigError
from ps_worker.data.samples import Share, batch_samples, rebuilt, shard
from tests.support.length import examples


def part(data: Any, rank: int, world_size: int, seed: int = 7, counted: list[int] | None = None) -> Any:
    return shard(
        data, Share(rank, world_size, seed), itertools.count(), [].append if counted is None else counted.append
    )


def numbers(n: int) -> Dataset[Any]:
    return TensorDataset(torch.arange(n))


def batches(loader: Any) -> list[list[int]]:
    return [batch[0].tolist() if isinstance(batch, list) else batch.tolist() for batch in loader]


def flat(nested: list[list[int]]) -> list[int]:
    return list(itertools.chain.from_iterable(nested))


@examples(60)
@given(
    n=st.integers(1, 60),
    world=st.integers(1, 5),
    size=st.integers(1, 9),
    shuffle=st.booleans(),
    seed=st.integers(0, 2**64 - 1),
)
def test_parts_are_an_exact_partition_whose_batches_form_windows(
    n: int, world: int, size: int, shuffle: bool, seed: int
) -> None:
    loader = DataLoader(numbers(n), batch_size=size, shuffle=shuffle)
    loaders = [part(loader, rank, world, seed) for rank in range(world)]
    epochs = [[batches(each) for each in loaders] for _ in range(2)]
    for parts in epochs:
        assert sorted(flat(flat(parts))) == list(range(n))
        assert [len(p) for p in parts] == [len(each) for each in loaders]
        sizes = [len(flat(p)) for p in parts]
        assert max(sizes) - min(sizes) <= 1
        order = [x for row in itertools.zip_longest(*map(flat, parts)) for x in row if x is not None]
        for k in range(len(parts[0])):
            window = flat([p[k] for p in parts if k < len(p)])
            assert sorted(window) == sorted(order[k * size * world : (k + 1) * size * world])
        assert shuffle or order == list(range(n))


def test_each_epoch_has_its_own_order_and_a_seed_repeats_it() -> None:
    loader = DataLoader(numbers(100), batch_size=10, shuffle=True)
    one, same, other = part(loader, 0, 2, 1), part(loader, 0, 2, 1), part(loader, 0, 2, 2)
    first, second = batches(one), batches(one)
    assert first != second
    assert [batches(same), batches(same)] == [first, second]
    assert batches(other) != first


def test_epochs_go_on_when_a_loader_is_sharded_again_with_the_same_counter() -> None:
    loader = DataLoader(numbers(50), batch_size=10, shuffle=True)
    epochs = itertools.count()
    first = batches(shard(loader, Share(0, 1, 3), epochs, lambda n: None))
    again = batches(shard(loader, Share(0, 1, 3), epochs, lambda n: None))
    assert first != again


@pytest.mark.parametrize(
    "sampler",
    [
        SubsetRandomSampler(range(40)),
        WeightedRandomSampler([1.0] * 40, 40, replacement=False),
        RandomSampler(range(40)),
        SequentialSampler(range(40)),
        list(range(39, -1, -1)),
    ],
    ids=lambda s: type(s).__name__,
)
def test_samplers_are_split_exactly(sampler: Any) -> None:
    loader = DataLoader(numbers(40), batch_size=4, sampler=sampler)
    assert sorted(flat(flat([batches(part(loader, rank, 3)) for rank in range(3)]))) == list(range(40))


def test_drawing_with_replacement_keeps_its_number_of_samples() -> None:
    loader = DataLoader(numbers(5), batch_size=4, sampler=RandomSampler(range(5), replacement=True, num_samples=31))
    assert [len(flat(batches(part(loader, rank, 2)))) for rank in range(2)] == [16, 15]


@pytest.mark.parametrize(
    "inner", [SequentialSampler(range(23)), RandomSampler(range(23))], ids=["in order", "shuffled"]
)
def test_a_batch_sampler_is_split_by_whole_batches(inner: Any) -> None:
    loader = DataLoader(numbers(23), batch_sampler=BatchSampler(inner, 4, drop_last=False))
    parts = [part(loader, rank, 2) for rank in range(2)]
    seen = [batches(each) for each in parts]
    assert [len(p) for p in seen] == [len(each) for each in parts] == [3, 3]
    assert [len(b) for b in flat([seen[0], seen[1]])] == [4, 4, 4, 4, 4, 3]  # type: ignore[list-item, arg-type]
    assert sorted(flat(flat(seen))) == list(range(23))


def test_a_loader_without_batching_is_split_by_samples() -> None:
    loader = DataLoader(range(7), batch_size=None)  # type: ignore[arg-type]
    counted: list[int] = []
    assert list(part(loader, 1, 2, counted=counted)) == [1, 3, 5]
    assert counted == [1, 1, 1]


def test_incomplete_batches_are_dropped_when_the_loader_drops_them() -> None:
    loader = DataLoader(numbers(11), batch_size=2, drop_last=True)
    assert [len(list(part(loader, rank, 2))) for rank in range(2)] == [3, 2]
    assert [len(part(loader, rank, 2)) for rank in range(2)] == [3, 2]


def test_more_workers_than_samples_leave_some_without() -> None:
    loader = DataLoader(numbers(2), batch_size=2, shuffle=True)
    assert [len(list(part(loader, rank, 4))) for rank in range(4)] == [1, 1, 0, 0]


def to_list(batch: list[Any]) -> list[Any]:
    return batch


def seed_worker(worker: int) -> None:
    torch.manual_seed(worker)


def test_the_other_arguments_of_a_loader_are_kept() -> None:
    generator = torch.Generator()
    loader = DataLoader(
        numbers(8),
        batch_size=3,
        num_workers=2,
        collate_fn=to_list,
        drop_last=True,
        timeout=30,
        worker_init_fn=seed_worker,
        multiprocessing_context="fork",
        generator=generator,
        prefetch_factor=4,
        persistent_workers=True,
        in_order=False,
    )
    mine = part(loader, 0, 2)
    assert isinstance(mine, DataLoader)
    kept = """batch_size num_workers collate_fn pin_memory drop_last timeout worker_init_fn multiprocessing_context
        generator prefetch_factor persistent_workers in_order dataset"""
    for name in kept.split():
        assert getattr(mine, name) is getattr(loader, name) or getattr(mine, name) == getattr(loader, name), name


def test_persistent_loader_processes_see_a_new_order_each_epoch() -> None:
    loader = DataLoader(numbers(20), batch_size=4, shuffle=True, num_workers=1, persistent_workers=True)
    mine = part(loader, 0, 1)
    first, second = batches(mine), batches(mine)
    assert first != second
    assert sorted(flat(first)) == sorted(flat(second)) == list(range(20))


class Doubling(DataLoader[Any]):
    """A loader as people write them to move batches to a device."""

    def __iter__(self) -> Iterator[Any]:
        for batch in super().__iter__():
            yield [2 * part for part in batch] if isinstance(batch, list) else 2 * batch


class Straight(DataLoader[Any]):
    """Reads the dataset by itself."""

    def __iter__(self) -> Iterator[Any]:
        return iter([torch.tensor([0]), torch.tensor([1])])


class Begun(DataLoader[Any]):
    """Begins in its constructor and never ends, as loaders that keep their processes."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.iterator = super().__iter__()

    def __iter__(self) -> Iterator[Any]:
        for _ in range(len(self)):
            yield next(self.iterator)


@pytest.mark.parametrize("kind", ["sampler", "batch sampler", "stream", "processes"])
def test_a_subclass_keeps_its_own_iteration_over_its_part(kind: str) -> None:
    def loader() -> DataLoader[Any]:
        match kind:
            case "sampler":
                return Doubling(numbers(10), batch_size=2)
            case "batch sampler":
                return Doubling(numbers(10), batch_sampler=BatchSampler(SequentialSampler(range(10)), 2, False))
            case "stream":
                return Doubling(Stream(10), batch_size=2)
            case _:
                return Doubling(numbers(10), batch_size=2, num_workers=1, persistent_workers=True)

    counted: list[int] = []
    parts = [part(loader(), rank, 2, counted=counted) for rank in (0, 1)]
    assert all(isinstance(each, Doubling) for each in parts)
    for _ in range(2):
        found = [flat(batches(each)) for each in parts]
        assert sorted(flat(found)) == list(range(0, 20, 2))
        assert all(len(each) >= 4 for each in found)
    assert sum(counted) == 20
    del parts


@pytest.mark.parametrize("kind", [Straight, Begun])
def test_a_subclass_whose_batches_would_be_everybody_s_is_refused(kind: type[DataLoader[Any]]) -> None:
    with pytest.raises(ConfigError, match=rf"the __iter__ of {kind.__name__} is its own") as refused:
        next(iter(part(kind(numbers(10), batch_size=2), 0, 2)))
    assert "plain DataLoader" in refused.value.remedy


def test_a_subclass_with_its_own_iteration_has_no_leases() -> None:
    with pytest.raises(ConfigError, match="the __iter__ of Doubling is its own"):
        rebuilt(DataLoader, Doubling(numbers(10)), lambda source: SequentialSampler([]))


class Stream(IterableDataset[int]):
    """Yields 0..n-1 wherever it is iterated."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.n))


class SizedStream(Stream):
    def __len__(self) -> int:
        return self.n


class SelfSplitting(Stream):
    """Splits itself among a DataLoader's processes, as torch's documentation advises."""

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        yield from range(info.id if info else 0, self.n, info.num_workers if info else 1)


@pytest.mark.parametrize("stream", [Stream(23), SelfSplitting(23)], ids=lambda s: type(s).__name__)
@pytest.mark.parametrize("loader_processes", [0, 2])
def test_an_iterable_is_seen_exactly_once_over_workers_and_loader_processes(stream: Any, loader_processes: int) -> None:
    loader = DataLoader(stream, batch_size=4, num_workers=loader_processes)
    parts = [flat(batches(part(loader, rank, 2))) for rank in range(2)]
    assert sorted(parts[0]) == list(range(0, 23, 2))
    assert sorted(parts[1]) == list(range(1, 23, 2))


def test_an_iterable_alone_is_split_and_knows_its_length_if_it_has_one() -> None:
    assert list(part(Stream(7), 1, 3)) == [1, 4]
    assert len(part(SizedStream(7), 0, 3)) == 3
    with pytest.raises(TypeError):
        len(part(Stream(7), 0, 3))


def saw_worker_info(batch: list[Any]) -> bool:
    return get_worker_info() is not None


def test_collating_in_a_loader_process_still_sees_its_worker_info() -> None:
    loader = DataLoader(Stream(4), batch_size=2, num_workers=1, collate_fn=saw_worker_info)
    assert list(part(loader, 0, 1)) == [True, True]


def test_a_dataset_gives_an_interleaved_view() -> None:
    view = part(numbers(10), 2, 4)
    assert len(view) == 2
    assert [int(view[i][0]) for i in range(2)] == [2, 6]


def test_data_split_already_is_refused() -> None:
    loader = DataLoader(numbers(10), sampler=DistributedSampler(numbers(10), num_replicas=2, rank=0))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="DistributedSampler"):
        part(loader, 0, 2)


@pytest.mark.parametrize("data", [[1, 2, 3], iter(())], ids=["list", "iterator"])
def test_what_cannot_be_split_is_refused_by_type(data: Any) -> None:
    with pytest.raises(ConfigError, match=type(data).__name__):
        part(data, 0, 2)


def test_samples_are_counted_as_batches_are_handed_out() -> None:
    counted: list[int] = []
    for _ in part(DataLoader(numbers(10), batch_size=4), 0, 1, counted=counted):
        pass
    assert counted == [4, 4, 2]


@pytest.mark.parametrize(
    ("batch", "samples"),
    [
        (torch.zeros(5, 2), 5),
        (torch.tensor(1.0), 1),
        ([torch.zeros(3), torch.zeros(3)], 3),
        ({"x": torch.zeros(6), "y": torch.zeros(6)}, 6),
        (({"x": torch.zeros(2)}, torch.zeros(2)), 2),
        (["a", "b", "c"], 3),
        ([], 0),
        ({}, 0),
        (object(), 1),
    ],
)
def test_the_size_of_a_batch_is_found(batch: Any, samples: int) -> None:
    assert batch_samples(batch) == samples
