"""Data dealt to replicas: each sample once per epoch, as many batches on each. 2 CPU seconds."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    TensorDataset,
)

from ps_worker import ConfigError
from ps_worker.data.equal_batches import EqualStream, equal_share, windows
from tests.support.length import examples


def dataset(count):
    return TensorDataset(torch.arange(count))


def shares(loader, replicas, verify=None, seed=5):
    return [equal_share(loader, rank, replicas, seed, itertools.count(), verify) for rank in range(replicas)]


def epoch_of(share):
    return [batch[0].tolist() for batch in share]


def flat(found):
    return sorted(number for share in found for batch in share for number in batch)


@given(st.integers(1, 60), st.integers(1, 5), st.integers(1, 5))
@examples(200)
def test_each_sample_is_used_once_in_batches_of_nearly_equal_size_and_number(count, batch_size, replicas):
    if count < replicas:
        with pytest.raises(ConfigError, match="fewer samples"):
            windows(count, batch_size * replicas, replicas, drop_last=False)
        return
    loader = DataLoader(dataset(count), batch_size=batch_size, shuffle=True)
    found = [epoch_of(each) for each in shares(loader, replicas)]
    assert flat(found) == list(range(count))
    assert len({len(each) for each in found}) == 1
    for step in zip(*found, strict=True):
        sizes = [len(batch) for batch in step]
        assert min(sizes) >= 1
        assert max(sizes) <= batch_size + 1
        assert max(sizes) - min(sizes) <= 1
    assert [len(each) for each in shares(loader, replicas)] == [len(each) for each in found]


@given(st.integers(1, 60), st.integers(1, 5), st.integers(1, 5), st.booleans())
@examples(200)
def test_a_stream_is_dealt_as_a_dataset_with_a_length_is(count, batch_size, replicas, drop_last):
    if count < replicas:
        return
    loader = DataLoader(dataset(count), batch_size=batch_size, drop_last=drop_last)
    wanted = [epoch_of(each) for each in shares(loader, replicas)]
    found = [list(EqualStream(range(count), batch_size, drop_last, rank, replicas)) for rank in range(replicas)]
    assert found == wanted


class Numbers(IterableDataset):
    def __iter__(self):
        return iter(range(7))


def test_a_loader_of_a_stream_gives_collated_batches():
    found = [[each.tolist() for each in share] for share in shares(DataLoader(Numbers(), batch_size=2), 2)]
    assert found == [[[0, 2], [4, 6]], [[1, 3], [5]]]


def test_a_stream_with_loader_processes_is_refused():
    with pytest.raises(ConfigError, match="num_workers=0 and a batch_size"):
        shares(DataLoader(Numbers(), batch_size=2, num_workers=2), 2)


def test_epochs_are_shuffled_anew_and_alike_on_all_replicas():
    one, other = shares(DataLoader(dataset(8), batch_size=2, shuffle=True), 2)
    first = [epoch_of(one), epoch_of(other)]
    second = [epoch_of(one), epoch_of(other)]
    assert first != second
    assert flat(second) == list(range(8))


def test_drop_last_drops_the_last_window_alone():
    found = [epoch_of(each) for each in shares(DataLoader(dataset(11), batch_size=2, drop_last=True), 2)]
    assert flat(found) == list(range(8))


class Own(Sampler):
    """Yields every second sample, the last first; has no torch generator."""

    def __iter__(self):
        return iter(range(9, -1, -2))

    def __len__(self):
        return 5


def test_a_sampler_of_the_users_own_is_kept_and_its_order_compared():
    digests = []
    loader = DataLoader(dataset(10), batch_size=2, sampler=Own())
    found = [epoch_of(each) for each in shares(loader, 2, digests.append)]
    assert found == [[[9, 5, 1]], [[7, 3]]]
    assert digests[0] == digests[1]


def test_samplers_of_torch_need_no_comparison():
    def refuse(digest):
        raise AssertionError("compared")

    for shuffle in (False, True):
        for share in shares(DataLoader(dataset(8), batch_size=2, shuffle=shuffle), 2, refuse):
            epoch_of(share)


def test_batches_of_the_users_own_are_dealt_in_turn_as_they_are():
    batches = BatchSampler(SequentialSampler(range(8)), 2, drop_last=False)
    loader = DataLoader(dataset(8), batch_sampler=[list(each) for each in batches])
    assert [epoch_of(each) for each in shares(loader, 2)] == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]


def test_batches_of_the_users_own_that_do_not_come_out_even_are_refused():
    loader = DataLoader(dataset(6), batch_sampler=[[0, 1], [2, 3], [4, 5]])
    with pytest.raises(ConfigError, match="expected: a multiple of 2; actual: 3"):
        list(shares(loader, 2)[0])


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        ([1, 2], "expected: a DataLoader"),
        (
            DataLoader(dataset(4), sampler=DistributedSampler(dataset(4), num_replicas=2, rank=0)),
            "split by a DistributedSampler already",
        ),
        (type("Own", (DataLoader,), {"__iter__": lambda self: iter([1])})(dataset(4)), "its own, and cannot be split"),
    ],
)
def test_what_cannot_be_split_is_a_typed_error(loader, message):
    with pytest.raises(ConfigError, match=message):
        shares(loader, 2)


def test_epochs_advance_until_one_is_set():
    share = shares(DataLoader(dataset(20), batch_size=5, shuffle=True), 2)[0]
    first, second = epoch_of(share), epoch_of(share)
    assert first != second
    share.batch_sampler.set_epoch(0)
    assert epoch_of(share) == epoch_of(share) == first


@pytest.mark.parametrize(
    ("loader", "samples"),
    [
        (DataLoader(dataset(9), batch_size=4), [5]),
        (DataLoader(Numbers(), batch_size=2), [2, 2]),
        (DataLoader(dataset(7), batch_sampler=[[0, 1, 2], [3], [4, 5], [6]]), [3, 2]),
        (DataLoader(dataset(4), batch_size=None), [1, 1]),
    ],
)
def test_samples_are_counted(loader, samples):
    counted = []
    epoch_of(equal_share(loader, 0, 2, 5, itertools.count(), None, counted.append))
    assert counted == samples


def test_batches_of_the_users_own_have_the_order_of_the_epoch_that_is_set():
    batches = BatchSampler(RandomSampler(range(20)), 2, drop_last=False)
    share = shares(DataLoader(dataset(20), batch_sampler=batches), 2)[0]
    assert epoch_of(share) != epoch_of(share)
    share.batch_sampler.set_epoch(0)
    assert epoch_of(share) == epoch_of(share)
