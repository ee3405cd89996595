"""What cannot run is one typed error with a remedy, and nothing was started or declared. 3 CPU seconds."""

from __future__ import annotations

import importlib.util
import threading

import psutil
import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import ps_worker
from ps_worker import ConfigError, PsError, UnsupportedOptimizer
from tests.worker.jobs import running_job


def running() -> set[object]:
    """What a strategy may start: processes, threads, a process group."""
    # Python names a thread that it did not start, be it of an earlier test, "Dummy" when that first runs Python.
    threads = {thread for thread in threading.enumerate() if not thread.name.startswith("Dummy")}
    groups = {"a process group"} if torch.distributed.is_initialized() else set[str]()
    return {*psutil.Process().children(recursive=True), *threads, *groups}


HERE = [
    ("mirorred", {}, "unknown strategy 'mirorred'"),
    ("one_device", {"devices": 2}, "has no option 'devices'"),
    ("one_device", {"device": "gpu"}, "device"),
    ("parameter_server", {"workers": 2}, "has no option 'workers'"),
    ("parameter_server", {"staleness": 2}, "belong to a mode"),
    ("parameter_server", {"model_options": {"clip_grad_norm": 1.0}}, "give it to prepare"),
    ("central_storage", {"mode": "async"}, "has no option 'mode'"),
    ("mirrored", {"devices": 64}, "does not have these devices"),
    ("mirrored", {"devices": "cpu", "communication": "nccl"}, "nccl moves data between GPUs"),
    ("mirrored", {"devices": "cpu", "reduction": "ring"}, "has no option 'reduction'"),
    ("tpu", {}, "no TPU that torch knows"),
]


@pytest.mark.parametrize(("name", "options", "message"), HERE)
def test_a_strategy_that_cannot_run_starts_nothing(monkeypatch, name, options, message):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "torch_xla" else found(name))
    for variable in ("PS_COORDINATOR", "PS_STRATEGY", "TF_CONFIG", "WORLD_SIZE", "RANK"):
        monkeypatch.delenv(variable, raising=False)
    before = running()
    with pytest.raises(ConfigError, match=message) as caught:
        ps_worker.strategy(name, **options)
    assert caught.value.remedy or caught.value.expected
    assert running() <= before, "what earlier tests started may end meanwhile"


def wrapped(kind: type[nn.Module]) -> nn.Module:
    """A model in a wrapper whose constructor needs other processes."""
    made = kind.__new__(kind)
    nn.Module.__init__(made)
    made.module = nn.Linear(1, 1)
    return made


class FullyShardedDataParallel(nn.Module):
    """Stands for torch's, whose import takes seconds."""

    __module__ = "torch.distributed.fsdp.fully_sharded_data_parallel"


class FSDPModule(nn.Module):
    """Stands for what ``fully_shard`` makes a base of each module."""

    __module__ = "torch.distributed.fsdp._fully_shard._fully_shard"


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def linear() -> nn.Module:
    return nn.Linear(1, 1)


def closured(model: nn.Module) -> torch.optim.Optimizer:
    """An optimizer of the user's own that needs a closure."""
    kind = type("LineSearch", (torch.optim.Optimizer,), {"step": lambda self, closure: closure()})
    return kind(model.parameters(), {})


@pytest.mark.parametrize(
    ("model", "optimizer", "message"),
    [
        (linear, lambda m: torch.optim.LBFGS, "LBFGS cannot run on shards"),
        (linear, lambda m: torch.optim.LBFGS(m.parameters()), "LBFGS cannot run on shards"),
        (linear, lambda m: torch.optim.SparseAdam, "SparseAdam cannot run on shards"),
        (linear, lambda m: torch.optim.SparseAdam(m.parameters()), "SparseAdam cannot run on shards"),
        (linear, closured, "LineSearch is not an optimizer that shards run"),
        (linear, lambda m: sgd(nn.Linear(1, 1)), "are not of this model"),
        (lambda: nn.DataParallel(nn.Linear(1, 1)), sgd, "wrapped in DataParallel"),
        (lambda: wrapped(DistributedDataParallel), sgd, "wrapped in DistributedDataParallel"),
        (lambda: nn.Sequential(wrapped(FullyShardedDataParallel)), sgd, "0 is wrapped in FullyShardedDataParallel"),
        (lambda: wrapped(FSDPModule), sgd, "wrapped in FSDPModule"),
    ],
)
def test_what_shards_cannot_train_is_refused_and_not_declared(job, model, optimizer, message):
    s, coordinator = job
    made = model()
    with pytest.raises(PsError, match=message) as caught:
        s.prepare(made, optimizer(made))
    assert caught.value.remedy or caught.value.expected
    assert coordinator.view.models == {}


@pytest.fixture(scope="module")
def job():
    with (
        running_job() as started,
        ps_worker.strategy("central_storage", coordinator=started.address, device="cpu") as s,
    ):
        yield s, started


def refuses_a_second_time(s: ps_worker.Strategy) -> None:
    """What is the same in every strategy: an optimizer is prepared once, and data is split once."""
    model = nn.Linear(1, 1)
    model, optimizer = s.prepare(model, sgd(model))
    with pytest.raises(UnsupportedOptimizer, match="prepared before"):
        s.prepare(nn.Linear(1, 1), optimizer)
    data = TensorDataset(torch.zeros(4, 1))
    with pytest.raises(ConfigError, match="split by a DistributedSampler already"):
        s.distribute(DataLoader(data, sampler=DistributedSampler(data, num_replicas=2, rank=0)))


@pytest.mark.parametrize("name", ["one_device", "mirrored", "multi_worker_mirrored"])
def test_an_optimizer_is_prepared_once_and_data_is_split_once(name):
    with ps_worker.strategy(name) as s:
        refuses_a_second_time(s)


@pytest.mark.parametrize(("name", "options"), [("central_storage", {}), ("parameter_server", {"mode": "async"})])
def test_an_optimizer_is_prepared_once_and_data_is_split_once_on_shards(name, options):
    with (
        running_job() as started,
        ps_worker.strategy(name, coordinator=started.address, device="cpu", **options) as s,
    ):
        refuses_a_second_time(s)
        assert set(started.view.models) == {"model"}


def test_a_fit_refuses_an_optimizer_that_needs_a_closure():
    s = ps_worker.strategy("one_device", device="cpu")
    model, _ = s.prepare(nn.Linear(1, 1), torch.optim.LBFGS)
    before = [p.clone() for p in model.parameters()]
    with pytest.raises(UnsupportedOptimizer, match=r"without a closure.*actual: LBFGS; remedy: write the loop"):
        s.fit(model, (torch.zeros(4, 1), torch.zeros(4, 1)), loss=nn.functional.mse_loss)
    assert all(map(torch.equal, before, model.parameters()))
