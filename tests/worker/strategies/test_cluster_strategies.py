"""parameter_server and central_storage over real servers, workers as threads. 4 CPU seconds."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import ps_worker
from ps_worker import ConfigError, UnsupportedOptimizer
from ps_worker.strategies import cluster_strategies
from tests.end_to_end.training import net
from tests.worker.jobs import running_job, together
from tests.worker.strategies import same_training


@pytest.fixture
def job():
    with running_job(shards=2, workers=2) as job:
        yield job


def both(job, work, name="central_storage", **options):
    """``work`` of a strategy on each of two workers; results by rank."""

    def one(rank):
        with ps_worker.strategy(name, coordinator=job.address, rank=rank, device="cpu", **options) as s:
            return work(s)

    return together(lambda: one(0), lambda: one(1))


@pytest.mark.parametrize("name", ["central_storage", "parameter_server"])
def test_two_workers_in_step_equal_one_process(job, name):
    options = {"mode": "sync"} if name == "parameter_server" else {}
    wanted = same_training.alone()
    for found in both(job, lambda s: same_training.train(s, built=name == "central_storage"), name, **options):
        same_training.assert_same(found, wanted)


@pytest.mark.parametrize(("name", "built"), [("central_storage", False), ("parameter_server", True)])
def test_two_workers_in_step_clip_the_mean_as_one_process_clips_the_joined_batch(job, name, built):
    options = {"mode": "sync"} if name == "parameter_server" else {}
    clip = same_training.CLIP
    for found in both(job, lambda s: same_training.train(s, built=built, clip=clip), name, **options):
        same_training.assert_clipped(found)


def test_a_norm_that_shards_were_not_told_is_refused_where_they_make_means(job):
    def fit(s):
        model, _ = s.prepare(net(), torch.optim.SGD, lr=0.1)
        with pytest.raises(ConfigError, match=r"give clip_grad_norm to prepare\(\)"):
            s.fit(model, (torch.zeros(4, 6), torch.zeros(4)), loss=torch.nn.functional.cross_entropy, clip_grad_norm=1)
        return s._session.steps

    assert both(job, fit) == [0, 0]


def test_a_rule_for_stale_gradients_is_an_option_of_the_models(job):
    def prepare(s):
        s.prepare(net(), torch.optim.SGD, lr=0.1)
        return dict(job.client.get_status().stale_rules)

    found = both(job, prepare, "parameter_server", model_options={"stale": "reject:8"})
    assert found == [{"model": "reject above 8"}] * 2


def test_samples_of_equal_batches_are_counted(job):
    def read(s):
        for _ in s.distribute(DataLoader(TensorDataset(torch.arange(9)), batch_size=4)):
            pass
        return s._session.progress.totals[1]

    assert both(job, read) == [5, 4]


def test_values_of_both_workers(job):
    def exchange(s):
        rank = s.rank
        with pytest.raises(UnsupportedOptimizer, match="LBFGS"):
            s.prepare(torch.nn.Linear(1, 1), torch.optim.LBFGS)
        model, _ = s.prepare(net(), torch.optim.SGD, lr=0.1)
        s.refresh(model)
        s.barrier()
        assert s.unwrap(model) is model
        return (
            s.gather(torch.arange(rank + 1.0)).tolist(),
            s.reduce("mean", {"loss": torch.tensor(float(rank)), "n": rank}),
            s.reduce("sum", torch.tensor([rank, 1])).tolist(),
            s.num_replicas_in_sync,
            s.is_chief,
            repr(s),
        )

    one, other = both(job, exchange)
    assert one[0] == other[0] == [0, 0, 1]
    assert one[1] == other[1] == {"loss": torch.tensor(0.5), "n": 0.5}
    assert one[2] == other[2] == [1, 2]
    assert (one[3], one[4], other[4]) == (2, True, False)
    assert one[5] == "CentralStorage(replica 0 of 2 on cpu)"


@pytest.mark.parametrize(
    ("name", "mode"), [("central_storage", ""), ("parameter_server", "async"), ("parameter_server", "sync")]
)
def test_each_sample_is_used_once_per_epoch_and_an_own_sampler_is_kept(job, name, mode):
    options = {"mode": mode} if mode else {}
    same_training.assert_dealt(both(job, same_training.epochs_of, name, **options))


def test_updates_of_a_job_that_is_not_in_sync_are_those_of_one_worker():
    with (
        running_job() as job,
        ps_worker.strategy("parameter_server", coordinator=job.address, mode="ssp", staleness=2, device="cpu") as s,
    ):
        assert s.num_replicas_in_sync == 1
        assert str(job.view.consistency) == "ssp(2)"
        loader = DataLoader(TensorDataset(torch.arange(4)))
        shared = s.distribute(loader)
        assert s.distribute(shared) is shared


def test_a_mode_that_the_job_refuses_ends_the_connection():
    with running_job() as job:
        with pytest.raises(ps_worker.InvalidRequest):
            ps_worker.strategy("parameter_server", coordinator=job.address, mode="sync", backup=3, device="cpu")
        assert job.gone(0)


def test_a_mode_that_is_not_seen_to_change_is_an_error(monkeypatch):
    monkeypatch.setenv("PS_RECONNECT_TIMEOUT", "0.01")
    monkeypatch.setattr(ps_worker.Cluster, "set_mode", lambda *_, **__: None)
    with running_job() as job, pytest.raises(ps_worker.Unavailable, match="mode is not seen to be sync"):
        ps_worker.strategy("parameter_server", coordinator=job.address, mode="sync", device="cpu")


def test_central_storage_refuses_an_elastic_job():
    with running_job(workers=0) as job, pytest.raises(ConfigError, match="needs a fixed number of workers"):
        ps_worker.strategy("central_storage", coordinator=job.address, device="cpu")


def test_central_storage_refuses_shards_that_share_no_memory(monkeypatch):
    connect = cluster_strategies.connect
    monkeypatch.setattr(
        cluster_strategies, "connect", lambda *a, **named: connect(*a, **{**named, "transport": "bulk"})
    )
    with (
        running_job() as job,
        ps_worker.strategy("central_storage", coordinator=job.address, device="cpu") as s,
        pytest.raises(ConfigError, match="expected: transport shm; actual: bulk"),
    ):
        s.prepare(net(), torch.optim.SGD, lr=0.1)
