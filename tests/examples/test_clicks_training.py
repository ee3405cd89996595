"""The click examples train: in one process, and through ps-run with their rows on shards, to the same AUC."""

import functools
import importlib
import io
import random
import re
import sys
from contextlib import redirect_stdout
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from examples.clicks.batch import FEATURES
from examples.clicks.criteo import HEADER
from examples.clicks.local import LocalBags, OneProcess
from examples.clicks.training import parser_of
from ps_protocol.errors import ConfigError
from ps_worker import rows
from ps_worker.tables import Table
from tests.cli import forked
from tests.support.length import choose, few
from tests.worker.data.files.made import text

EXAMPLES = Path(__file__).parents[2] / "examples"
EVALUATED = ("--eval-samples", choose("20000", "8000"))
SMALL = ("--samples", choose("30000", "20000"), *EVALUATED, "--features-vocabulary", "100000")


def auc_in(text):
    """What was reached, and what can be."""
    found = re.search(r"held-out AUC ([\d.]+)", text)
    best = re.search(r"best reachable AUC ([\d.]+)", text)
    assert found, text
    return float(found[1]), float(best[1]) if best else None


@pytest.fixture(scope="module")
def run_locally():
    """Run an example with ``--local`` in this process, once for all tests: its exit code and what it prints."""
    threads = torch.get_num_threads()
    # For batches this small more threads only wait for each other.
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EXAMPLES)

        @functools.cache
        def run(example, *flags):
            patch.setattr(sys, "argv", [example, "--local", *flags])
            with redirect_stdout(io.StringIO()) as told:
                code = importlib.import_module(example).main()
            return code, told.getvalue()

        yield run
    torch.set_num_threads(threads)


@pytest.mark.parametrize("example", few(["factorization_machine", "click_model"]))
def test_one_process_learns_the_planted_truth(run_locally, example):
    code, told = run_locally(example, *SMALL)
    reached, best = auc_in(told)
    assert code == 0
    assert 0.72 < reached < best
    assert re.search(r"[\d,]+ samples in .* samples/s, .* rows/s", told)


@pytest.mark.long
def test_the_size_of_a_batch_hardly_matters_to_a_factorization_machine(run_locally):
    reached, _ = auc_in(run_locally("factorization_machine", *SMALL, "--batch", "256")[1])
    assert reached == pytest.approx(auc_in(run_locally("factorization_machine", *SMALL)[1])[0], abs=0.02)


def test_an_auc_below_the_expected_one_is_a_failure(run_locally):
    code, _ = run_locally("factorization_machine", "--samples", "1000", "--eval-samples", "1000", "--expect-auc", "0.9")
    assert code == 1


def bags(capacity=4):
    table = Table(2, name="t", optimizer=rows.Adagrad(lr=0.1), init=rows.Normal(std=0.01))
    return LocalBags(dict.fromkeys(FEATURES[:2], table), capacity)


def test_local_rows_are_one_for_each_id_until_they_are_shared():
    local = bags()
    ids = torch.tensor([[-9], [7], [1 << 60], [-9]])
    found = local({"C1": ids, "C2": ids[:2] + 100})
    assert [*found] == ["C1", "C2"]
    assert found["C1"].shape == (4, 2)
    assert torch.equal(found["C1"][0], found["C1"][3])
    assert local.used == 4
    local({"C1": torch.tensor([[1], [2], [3]]), "C2": ids[:0]})
    assert local.used == 4
    local.eval()
    unknown = local({"C1": torch.tensor([[12345]]), "C2": ids[:0]})["C1"]
    assert torch.equal(unknown[0], local.rows.weight[4])


def test_one_process_refuses_tables_that_it_cannot_hold():
    adam = Table(2, name="a", optimizer=rows.Adam(), init=rows.Normal(std=0.01))
    with pytest.raises(ConfigError):
        OneProcess(4).embedding_bags({"C1": adam})


def test_every_flag_has_a_help_text():
    for action in parser_of("", dim=16, lr=0.1, row_lr=0.1)._actions:
        assert action.help


def test_rows_on_shards_reach_the_auc_of_one_process(tmp_path, run_locally):
    job = ("--no-progress", "--seed", "1", "--shards", "2", "--workers", "2", "--mode", "sync")
    # Two workers average two halves of the batch of one.
    flags = (*SMALL, "--batch", "128")
    done = forked.run(tmp_path, *job, str(EXAMPLES / "factorization_machine.py"), *flags)
    assert done.returncode == 0, done.stdout + done.stderr
    reached, best = auc_in(done.stdout)
    _, told = run_locally("factorization_machine", *SMALL, "--batch", "256")
    alone, best_alone = auc_in(told)
    assert best == best_alone
    assert reached == pytest.approx(alone, abs=0.01)
    rows_alone = re.search(r"rows of this process: ([\d,]+)", told)
    assert rows_alone is not None
    assert f"tables: 1 with {rows_alone[1]} rows" in done.stdout


def written(path, samples, random_):
    """A file of Criteo's layout: the first category decides about the click, the others say nothing."""
    rows = []
    for _ in range(samples):
        kind = random_.randrange(20)
        label = int(random_.random() < (0.9 if kind % 2 else 0.1))
        others = [f"{random_.randrange(50):08x}" for _ in range(25)]
        rows.append([label, *[None] * 13, f"{kind:08x}", *others])
    if path.suffix == ".parquet":
        columns = dict(zip(HEADER, zip(*rows, strict=True), strict=True))
        types = {name: pa.int32() for name in HEADER[:14]}
        arrays = {name: pa.array(values, types.get(name, pa.string())) for name, values in columns.items()}
        pq.write_table(pa.table(arrays), path, row_group_size=500)
    else:
        text(path, ["\t".join("" if field is None else str(field) for field in row) for row in rows])


@pytest.mark.parametrize("kind", few(["parquet", "gz"]))
def test_criteo_files_train_a_model_with_26_tables(tmp_path, kind):
    random_ = random.Random(3)
    for day, samples in enumerate((4000, 3000, 3000)):
        written(tmp_path / f"day_{day}.{kind}", samples, random_)
    written(tmp_path / f"test.{kind}", 2000, random_)
    (tmp_path / f"day_3.{kind}").write_bytes(b"no click log\n")
    job = ("--no-progress", "--workers", "2", "--mode", "async", str(EXAMPLES / "click_model.py"))
    where = ("--data", str(tmp_path / f"day_*.{kind}"), "--held-out", str(tmp_path / f"test.{kind}"))
    refused = forked.run(tmp_path, *job, *where, "--expect-auc", "0.8")
    assert refused.returncode != 0
    assert f"day_3.{kind}" in refused.stdout
    done = forked.run(tmp_path, *job, *where, "--skip-wrong", "--expect-auc", "0.8")
    assert done.returncode == 0, done.stdout + done.stderr
    reached, best = auc_in(done.stdout)
    assert reached < 0.95
    assert best is None
    assert "tables: 26 with 1,270 rows" in done.stdout


def test_one_process_reads_the_same_files(tmp_path, run_locally):
    path = tmp_path / "day_0.parquet"
    written(path, 3000, random.Random(4))
    flags = ("--data", str(path), "--held-out", str(path), "--expect-auc", "0.75")
    code, told = run_locally("factorization_machine", *flags, "--row-lr", "0.3")
    assert code == 0, told
