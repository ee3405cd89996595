"""The data of the click examples: a stream by position with a known truth, and files in Criteo's format."""

import gzip
import math
import random

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from examples.clicks.auc import auc
from examples.clicks.batch import CATEGORIES, NUMBERS, in_columns, whole
from examples.clicks.criteo import Block, LineBlocks, Parser
from examples.clicks.generated import HELD_OUT, ClickStream
from ps_protocol.errors import InvalidRequest
from ps_worker.data.samples import Share, shard

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


# -- files in Criteo's format


def sample_line(random_):
    """A random sample as a line, its numbers and its categories; None for a field that is not given."""
    numbers = [None if random_.random() < 0.2 else random_.randint(-3, 10 ** random_.randint(1, 9)) for _ in range(13)]
    categories = [None if random_.random() < 0.1 else random_.getrandbits(32) for _ in range(26)]
    label = random_.randint(0, 1)
    texts = ["" if number is None else str(number) for number in numbers]
    texts += ["" if category is None else f"{category:08x}" for category in categories]
    return "\t".join([str(label), *texts]) + "\n", label, numbers, categories


@pytest.fixture
def sampled():
    """Lines, labels, numbers and categories of 200 samples."""
    random_ = random.Random(SEED)
    return list(zip(*(sample_line(random_) for _ in range(200)), strict=True))


@pytest.fixture
def written(tmp_path, sampled):
    path = tmp_path / "day_0.txt"
    path.write_text("".join(sampled[0]))
    return path


def read(path, block_lines=64, share=None, skip_wrong=False, **limits):
    parser = Parser(path, skip_wrong=skip_wrong)
    loader = DataLoader(LineBlocks(path, block_lines, **limits), batch_size=1, collate_fn=parser)
    if share:
        loader = shard(loader, share, iter([0]), lambda samples: None)
    return list(loader), parser


def test_a_file_is_read_as_it_was_written(written, sampled):
    batches, _ = read(written)
    assert [len(batch.labels) for batch in batches] == [64, 64, 64, 8]
    _, labels, numbers, categories = sampled
    assert torch.cat([batch.labels for batch in batches]).tolist() == list(labels)
    expected = torch.tensor([[math.log1p(max(0, number or 0)) for number in row] for row in numbers])
    assert torch.allclose(torch.cat([batch.numbers for batch in batches]), expected)
    ids = torch.cat([in_columns(batch.ids) for batch in batches]).tolist()
    of = {}
    for row, given in zip(ids, categories, strict=True):
        for column, (id, value) in enumerate(zip(row, given, strict=True)):
            # One id for each (column, value), "missing" being a value like others.
            assert of.setdefault((column, value), id) == id
    assert len(set(of.values())) == len(of)


def test_missing_numbers_are_zero_and_missing_categories_have_an_id_for_each_feature():
    empty = ("1" + "\t" * (NUMBERS + CATEGORIES) + "\n").encode()
    batch = Parser("memory")([Block(1, empty * 2)])
    assert not batch.numbers.any()
    ids = in_columns(batch.ids)
    assert torch.equal(ids[0], ids[1])
    assert len(ids[0].unique()) == CATEGORIES


def test_compressed_files_and_other_line_ends_give_the_same_samples(written, tmp_path):
    plain = torch.cat([stacked(batch) for batch in read(written)[0]])
    packed, windows = tmp_path / "day_0.gz", tmp_path / "day_1.txt"
    packed.write_bytes(gzip.compress(written.read_bytes()))
    windows.write_bytes(written.read_bytes().replace(b"\n", b"\r\n").rstrip())
    for path in (packed, windows):
        assert torch.equal(torch.cat([stacked(batch) for batch in read(path)[0]]), plain)


def test_workers_share_a_file_by_blocks_of_lines(written):
    plain = torch.cat([stacked(batch) for batch in read(written)[0]])
    parts = [read(written, 30, Share(rank, 2, 0))[0] for rank in range(2)]
    assert [[len(batch.labels) for batch in part] for part in parts] == [[30, 30, 30, 20], [30, 30, 30]]
    blocks = [None] * 7
    blocks[::2], blocks[1::2] = parts
    assert torch.equal(torch.cat([stacked(batch) for batch in blocks]), plain)


def test_the_first_lines_can_be_held_out(written):
    plain = torch.cat([stacked(batch) for batch in read(written)[0]])
    held_out, train = read(written, lines=50)[0], read(written, skip=50, lines=100)[0]
    assert torch.equal(torch.cat([stacked(batch) for batch in held_out + train]), plain[:150])


WRONG = {
    "a label of 2": lambda fields: ["2", *fields[1:]],
    "no label": lambda fields: ["", *fields[1:]],
    "a field too few": lambda fields: fields[:-1],
    "a field too many": lambda fields: [*fields, ""],
    "a number with a point": lambda fields: [fields[0], "1.5", *fields[2:]],
    "a minus alone": lambda fields: [fields[0], "-", *fields[2:]],
    "a number of 19 digits": lambda fields: [fields[0], "1" * 19, *fields[2:]],
    "a letter that is no digit": lambda fields: [*fields[:-1], "0123456g"],
    "a category of 9 digits": lambda fields: [*fields[:-1], "0" * 9],
    "an empty line": lambda fields: [],
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_line_is_named_or_left_out_and_counted(tmp_path, sampled, wrong):
    lines = list(sampled[0][:100])
    lines[70] = "\t".join(WRONG[wrong](lines[70].rstrip("\n").split("\t"))) + "\n"
    path = tmp_path / "day_0.txt"
    path.write_text("".join(lines))
    with pytest.raises(InvalidRequest) as raised:
        read(path)
    assert f"{path}, line 71 is not a sample" in str(raised.value)
    assert "40 fields" in raised.value.expected
    batches, parser = read(path, skip_wrong=True)
    assert parser.skipped == 1
    fine = Parser("memory")([Block(1, "".join(lines[:70] + lines[71:]).encode())])
    assert torch.equal(torch.cat([stacked(batch) for batch in batches]), stacked(fine))


def test_a_block_of_wrong_lines_gives_an_empty_batch():
    parser = Parser("memory", skip_wrong=True)
    batch = parser([Block(1, b"this is\nno click log")])
    assert parser.skipped == 2
    assert (len(batch.labels), batch.numbers.shape, in_columns(batch.ids).shape) == (0, (0, NUMBERS), (0, CATEGORIES))
