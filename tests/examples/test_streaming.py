"""The stream of clicks is a function of positions; its model learns in one process and on shards, each batch once."""

import importlib
import io
import itertools
import json
import sys
from contextlib import redirect_stdout
from pathlib import Path

import numpy as np
import pytest
import torch

from ps_worker import rows
from tests.cli import forked
from tests.support.length import choose
from tests.worker.jobs import running_job

EXAMPLES = Path(__file__).parents[2] / "examples"
SMALL = ("--windows", "2", "--events", "4096", "--items", "10", "--batch", "256", "--expect-auc", "0.55")


@pytest.fixture(scope="module", autouse=True)
def _in_the_folder_of_examples():
    threads = torch.get_num_threads()
    # For batches this small more threads only wait for each other.
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EXAMPLES)
        yield
    torch.set_num_threads(threads)


def module(name):
    return importlib.import_module(f"streaming.{name}")


def stream(**changes):
    return module("events").Stream(**{"seed": 5, "events": 4000, "items": 50, **changes})


# -- the stream


def test_an_event_is_the_same_wherever_it_is_drawn():
    whole, part = stream().draw(3, 0, 500), stream().draw(3, 120, 40)
    assert all(np.array_equal(each[120:160], other) for each, other in zip(whole, part, strict=True))
    assert not np.array_equal(whole.labels, stream(seed=6).draw(3, 0, 500).labels)
    assert len(stream().draw(3, 3990, 500).labels) == 10


def test_a_history_is_what_the_user_was_shown_before_also_in_the_window_before():
    made = stream()
    visits = made.live_users
    later, before = made.draw(4, 2 * visits, visits), made.draw(4, visits, visits)
    assert np.array_equal(later.users, before.users)
    assert np.array_equal(later.items[:, 1:], before.items[:, :-1])
    first, last = made.draw(5, 0, visits), made.draw(4, visits * (made.visits - 1), visits)
    stayed = first.users == last.users
    assert np.array_equal(first.items[stayed, 1:], last.items[stayed, :-1])
    assert (first.items[~stayed, 1:] == module("events").NONE).all()
    assert 0.2 < (~stayed).mean() < 0.3


def test_every_window_has_new_ids_and_other_popular_items():
    made = stream(events=40_000)
    known, tops = set(), []
    for window in range(4):
        events = made.draw(window, 0, made.events)
        assert events.users.max() < made.users_until(window)
        assert events.items.max() < made.items_until(window)
        values, counts = np.unique(events.items[:, 0], return_counts=True)
        new = set(values) - known
        assert len(new) > 0.15 * len(values)
        known |= new
        tops.append(set(values[np.argsort(-counts)[:100]]))
        assert np.sort(counts)[-100:].sum() > 5 * 100 * counts.mean()
    assert all(len(one & other) < 80 for one, other in itertools.pairwise(tops))


def test_labels_are_drawn_from_the_true_probabilities():
    events = stream(events=40_000).draw(1, 0, 40_000)
    chances = 1 / (1 + np.exp(-events.truth.astype(np.float64)))
    for part in (chances < 0.2, (chances >= 0.2) & (chances < 0.5), chances >= 0.5):
        surplus = (events.labels - chances)[part].sum() / np.sqrt((chances * (1 - chances))[part].sum())
        assert abs(surplus) < 4, f"{surplus:.1f} standard deviations"


def test_a_window_is_whole_batches_by_their_number_in_the_stream():
    window = module("batch").Window(stream(), 2, 1500)
    batches = list(window.loader())
    assert [len(batch.labels) for batch in batches] == [1500, 1500, 1000]
    assert [int(batch.number) for batch in batches] == [6, 7, 8]
    (first, second) = module("batch").Window(stream(), 2, 1500, every=2).loader()
    assert torch.equal(first.items, batches[0].items)
    assert torch.equal(second.items, batches[2].items)


# -- the model


def test_rows_of_one_process_are_those_of_a_shard():
    made = {"optimizer": rows.RowWiseAdagrad(lr=0.1, initial=1e-8), "init": rows.Constant(0.5)}
    batches = list(module("batch").Window(stream(), 0, 500).loader())[:4]
    found = []
    with running_job() as job, job.cluster() as shards:
        for cluster in (shards, module("local").OneProcess({"users": 4000})):
            table = cluster.embedding(4, name="users", **made)
            factor = torch.nn.Parameter(torch.ones(4))
            model = torch.nn.ModuleList([table, torch.nn.ParameterList([factor])])
            optimizer = cluster.optimizer(torch.optim.Adam, model, lr=0.01)
            for batch in batches:
                (table(batch.users % 100) @ factor * batch.labels).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            with torch.no_grad():
                found.append(table(torch.arange(100)).detach())
    assert not torch.allclose(found[0], torch.tensor(0.5))
    torch.testing.assert_close(found[0], found[1])


def test_one_process_learns_the_truth_and_draws_it(tmp_path, monkeypatch):
    picture = tmp_path / "auc.png"
    flags = ("--local", "--out", str(tmp_path), "--plot", str(picture))
    monkeypatch.setattr(sys, "argv", ["streaming_model", *SMALL, *flags])
    with redirect_stdout(io.StringIO()) as told:
        code = importlib.import_module("streaming_model").main()
    assert code == 0, told.getvalue()
    assert picture.read_bytes().startswith(b"\x89PNG")
    results = json.loads((tmp_path / "results.json").read_text())
    assert [window["window"] for window in results["windows"]] == [0, 1]
    assert 0.55 < results["windows"][-1]["auc"] < results["windows"][-1]["best"]


def test_workers_train_every_batch_once_and_rank_the_next_window_together(tmp_path):
    job = ("--no-progress", "--seed", "1", "--shards", choose("2", "1"), "--workers", "2", "--mode", "async")
    done = forked.run(tmp_path, *job, str(EXAMPLES / "streaming_model.py"), *SMALL, "--out", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "32 batches, 0 not trained, 0 twice" in done.stdout
    assert len(list((tmp_path / "scores").glob("*.npy"))) == 16


class AsIfUnreported:
    """A cluster that leases data under other names: as data that is leased again."""

    def __init__(self, cluster):
        self._cluster = cluster

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self._cluster.close()

    def __getattr__(self, name):
        return getattr(self._cluster, name)

    def shard(self, loader, *, lease, name):
        return self._cluster.shard(loader, lease=lease, name=f"{name} again")


def test_batches_that_come_again_are_not_trained_again(tmp_path, monkeypatch):
    example = importlib.import_module("streaming_model")
    found = []
    with running_job(workers=0) as job:
        for number, changed in enumerate((lambda cluster: cluster, AsIfUnreported)):
            monkeypatch.setattr(example.ps_worker, "connect", lambda changed=changed: changed(job.cluster()))
            out = tmp_path / str(number)
            monkeypatch.setattr(sys, "argv", ["streaming_model", *SMALL, "--out", str(out)])
            with redirect_stdout(io.StringIO()) as told:
                assert example.main() == 0, told.getvalue()
            found.append(json.loads((out / "results.json").read_text()))
    assert [sum(window["again"] for window in each["windows"]) for each in found] == [0, 32]
    assert [(each["not trained"], each["trained twice"]) for each in found] == [(0, 0), (0, 0)]


def test_an_auc_below_what_is_expected_fails(tmp_path, monkeypatch):
    flags = ("--local", "--out", str(tmp_path), "--expect-auc", "0.99")
    monkeypatch.setattr(sys, "argv", ["streaming_model", *SMALL, *flags])
    with redirect_stdout(io.StringIO()):
        assert importlib.import_module("streaming_model").main() == 1


def test_a_folder_with_the_results_of_another_run_is_refused(tmp_path, monkeypatch, capsys):
    (tmp_path / "results.json").write_text("{}")
    monkeypatch.setattr(sys, "argv", ["streaming_model", "--local", "--out", str(tmp_path)])
    with pytest.raises(SystemExit):
        importlib.import_module("streaming_model").main()
    assert "has the results of another run" in capsys.readouterr().err
