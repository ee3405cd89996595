"""The data of the click examples: a stream by position with a known truth, and files in Criteo's format."""

import math
import random

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch.utils.data import DataLoader

from examples.clicks.auc import auc
from examples.clicks.batch import CATEGORIES, in_columns, whole
from examples.clicks.criteo import HEADER, reading
from examples.clicks.generated import HELD_OUT, ClickStream
from ps_protocol.errors import DamagedData
from ps_worker import files
from ps_worker.data.samples import Share, shard
from tests.worker.data.files.made import text

SEED = 5


def stacked(batch):
    """All of a batch in one tensor, a sample in each row."""
    return torch.cat([batch.numbers.double(), in_columns(batch.ids).double(), batch.labels.double()[:, None]], dim=1)


# -- the generated stream


def test_a_sample_is_the_same_in_whatever_batch_and_process_it_is_drawn():
    together = stacked(ClickStream(100, seed=SEED).__getitems__(range(100)))
    apart = torch.cat([stacked(ClickStream(100, seed=SEED)[position]) for position in range(100)])
    later = stacked(ClickStream(60, seed=SEED, first=40).__getitems__(range(60)))
    assert torch.equal(together, apart)
    assert torch.equal(together[40:], later)
    assert not torch.equal(together, stacked(ClickStream(100, seed=SEED + 1).__getitems__(range(100))))


def test_workers_share_a_stream_as_any_other_dataset():
    stream = ClickStream(1000, seed=SEED)
    parts = []
    for rank in range(3):
        loader = shard(
            DataLoader(stream, batch_size=64, collate_fn=whole), Share(rank, 3, 0), iter([0]), lambda samples: None
        )
        parts.append(torch.cat([stacked(batch) for batch in loader]))
    assert [len(part) for part in parts] == [334, 333, 333]
    everything = stacked(stream.__getitems__(range(1000)))
    assert torch.equal(torch.cat(parts).unique(dim=0), everything.unique(dim=0))


def test_the_samples_of_a_batch_are_counted():
    counts = []
    loader = DataLoader(ClickStream(1000, seed=SEED), batch_size=300, collate_fn=whole)
    list(shard(loader, Share(0, 1, 0), iter([0]), counts.append))
    assert counts == [300, 300, 300, 100]


def test_labels_are_drawn_from_the_true_probabilities():
    stream = ClickStream(40_000, seed=SEED, first=HELD_OUT)
    batch = stream.__getitems__(range(len(stream)))
    chances = 1 / (1 + np.exp(-stream.best_scores(batch).astype(np.float64)))
    labels = batch.labels.numpy()
    for part in (chances < 0.2, (chances >= 0.2) & (chances < 0.5), chances >= 0.5):
        surplus = (labels - chances)[part].sum() / np.sqrt((chances * (1 - chances))[part].sum())
        assert abs(surplus) < 4, f"{surplus:.1f} standard deviations"
    # Of the probabilities alone, without labels: what the best model reaches.
    order = np.argsort(chances)
    right = np.cumsum((1 - chances)[order]) @ chances[order]
    expected = right / (chances.sum() * (1 - chances).sum())
    assert auc(labels, chances) == pytest.approx(expected, abs=0.01)
    assert auc(labels, chances) > 0.75


def test_ids_follow_a_power_law_and_belong_to_one_feature():
    stream = ClickStream(50_000, seed=SEED, exponent=1.2)
    ids = in_columns(stream.__getitems__(range(len(stream))).ids).numpy()
    seen = [np.unique(ids[:, column], return_counts=True) for column in range(CATEGORIES)]
    for (values, counts), size in zip(seen, stream.sizes, strict=True):
        assert len(values) <= size
        first, second = (1 - k**-0.2 for k in (2.0, 3.0))
        whole_mass = 1 - (size + 1.0) ** -0.2
        expected = np.array([first, second - first]) / whole_mass
        found = np.sort(counts)[::-1][:2] / len(ids)
        assert found == pytest.approx(expected, rel=0.1)
    distinct = [len(values) for values, _ in seen]
    assert len(np.unique(ids)) == sum(distinct) > 100_000
    assert stream.sizes.sum() == pytest.approx(1e8, rel=1e-3)


@pytest.mark.parametrize("seed", range(5))
def test_auc_counts_the_pairs_in_the_right_order(seed):
    random_ = np.random.default_rng(seed)
    labels = random_.random(60) < 0.4
    scores = random_.integers(0, 12, 60)
    pairs = scores[labels][:, None] - scores[~labels]
    assert auc(labels, scores) == pytest.approx(((pairs > 0) + 0.5 * (pairs == 0)).mean())


def test_auc_of_labels_that_are_all_alike_is_not_a_number():
    assert math.isnan(auc([1, 1], [0.1, 0.2]))


# -- files in Criteo's layout


def sample(random_):
    """A random label, its numbers and its categories; None for a field that is not given."""
    numbers = [None if random_.random() < 0.2 else random_.randint(-3, 10 ** random_.randint(1, 9)) for _ in range(13)]
    categories = [None if random_.random() < 0.1 else f"{random_.getrandbits(32):08x}" for _ in range(26)]
    return [random_.randint(0, 1), *numbers, *categories]


@pytest.fixture
def samples():
    random_ = random.Random(SEED)
    return [sample(random_) for _ in range(200)]


def lines(samples):
    return ["\t".join("" if field is None else str(field) for field in each) for each in samples]


def write(path, samples):
    if path.suffix == ".parquet":
        pq.write_table(pa.table(dict(zip(HEADER, zip(*samples, strict=True), strict=True))), path, 64)
    else:
        text(path, lines(samples))


def read(path, batch=64):
    return list(files.read(**reading(str(path), batch), shuffle=False))


@pytest.mark.parametrize("name", ["day_0.txt", "day_0.gz", "day_0.parquet"])
def test_files_are_read_as_they_were_written(tmp_path, samples, name):
    write(tmp_path / name, samples)
    batches = read(tmp_path / name)
    assert [len(batch.labels) for batch in batches] == [64, 64, 64, 8]
    assert torch.cat([batch.labels for batch in batches]).tolist() == [each[0] for each in samples]
    expected = torch.tensor([[math.log1p(max(0, number or 0)) for number in each[1:14]] for each in samples])
    assert torch.allclose(torch.cat([batch.numbers for batch in batches]), expected)
    ids = torch.cat([in_columns(batch.ids) for batch in batches]).tolist()
    of = {}
    for row, given in zip(ids, samples, strict=True):
        for column, (id, value) in enumerate(zip(row, given[14:], strict=True)):
            # One id for each (column, value), "missing" being a value like others.
            assert of.setdefault((column, value), id) == id
    assert len(set(of.values())) == len(of)


def test_text_and_parquet_give_the_same_samples(tmp_path, samples):
    for name in ("day_0.txt", "day_1.parquet"):
        write(tmp_path / name, samples)
    text_batches, parquet_batches = (read(tmp_path / name) for name in ("day_0.txt", "day_1.parquet"))
    for one, other in zip(text_batches, parquet_batches, strict=True):
        assert torch.equal(stacked(one), stacked(other))


WRONG = {
    "a field too few": lambda fields: fields[:-1],
    "a field too many": lambda fields: [*fields, ""],
    "a number with a letter": lambda fields: [fields[0], "1x", *fields[2:]],
    "no label": lambda fields: ["", *fields[1:]],
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_line_is_named_with_its_file_and_range(tmp_path, samples, wrong):
    written = lines(samples)
    written[70] = "\t".join(WRONG[wrong](written[70].split("\t")))
    path = text(tmp_path / "day_0.txt", written)
    with pytest.raises(DamagedData, match=r"day_0\.txt, lines from byte 0"):
        read(path)
