"""Replicas in processes of their own: equal to one process, and an end without a hang. 10 CPU seconds."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Sampler, TensorDataset

import ps_worker
from ps_worker import ConfigError, ModelMismatch, Unavailable
from ps_worker.strategies.process_group import Placement, backend_for
from tests.end_to_end.training import loss_of, net
from tests.worker.strategies import same_training
from tests.worker.strategies.replicas import Replicas


@pytest.fixture
def replicas(tmp_path):
    started: list[Replicas] = []

    def start(count, work, argument=None, **environment):
        started.append(Replicas(tmp_path, count, work, argument, **environment))
        return started[-1]

    yield start
    for each in started:
        each.close()


def train_each_way(_: None) -> dict[str, Any]:
    """Trainings one after the other in one process group, and exchanges of values."""
    torch.set_num_threads(1)
    with ps_worker.strategy("mirrored", devices="cpu") as first:
        found = {"backend": same_training.train(first), "built": same_training.train(first, built=True)}
        rank = first.rank
        return {
            "trained": found,
            "dealt": same_training.epochs_of(first),
            "over hosts": same_training.epochs_of(ps_worker.strategy("multi_worker_mirrored", devices="cpu")),
            "clipped": same_training.train(first, clip=same_training.CLIP),
            "gathered": first.gather(torch.arange(rank * 2.0).reshape(rank, 2)).tolist(),
            "scalars": first.gather(torch.tensor(rank)).tolist(),
            "reduced": first.reduce("mean", {"a": torch.tensor([rank, 1]), "b": [rank, 2.0]})["b"],
            "sum": first.reduce("SUM", torch.tensor(rank)).item(),
            "mismatch": _error(lambda: first.gather(torch.zeros(1, 1 + rank % 2))),
            "dimensions": _error(lambda: first.gather(torch.zeros((1,) * (1 + rank % 2)))),
            "sampler": _error(lambda: list(first.distribute(DataLoader(_numbers(), 1, sampler=Different(rank))))),
            "seed": first._seed,
        }


def _numbers() -> TensorDataset:
    return TensorDataset(torch.arange(8))


class Different(Sampler):
    """Another order on each replica."""

    def __init__(self, rank):
        self.rank = rank

    def __iter__(self):
        return iter([*range(self.rank, 8), *range(self.rank)])

    def __len__(self):
        return 8


def _error(call) -> str:
    try:
        call()
    except ModelMismatch as error:
        return str(error)
    return ""


def test_four_replicas_equal_one_process(replicas):
    wanted = same_training.alone()
    found = replicas(4, train_each_way).values()
    for replica in found:
        assert set(replica["trained"]) == {"backend", "built"}
        for trained in replica["trained"].values():
            same_training.assert_same(trained, wanted)
        same_training.assert_clipped(replica["clipped"])
        assert replica["gathered"] == [[0, 1], [0, 1], [2, 3], [0, 1], [2, 3], [4, 5]]
        assert replica["scalars"] == [0, 1, 2, 3]
        assert replica["reduced"] == [1.5, 2.0]
        assert replica["sum"] == 6
        assert "differ beyond their first dimension" in replica["mismatch"]
        assert "different numbers of dimensions" in replica["dimensions"]
        assert "another order on each replica" in replica["sampler"]
    for dealt in ("dealt", "over hosts"):
        same_training.assert_dealt([replica[dealt] for replica in found])
    assert len({each["seed"] for each in found}) == 1


def train_until_killed(_: None) -> str:
    torch.set_num_threads(1)
    with ps_worker.strategy("mirrored", devices="cpu") as s:
        model, optimizer = s.prepare(net(), torch.optim.SGD, lr=0.1)
        batch = torch.randn(4, 6), torch.zeros(4, dtype=torch.int64)

        def step(number):
            if s.rank == 1 and number == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            loss_of(model, batch).backward()
            optimizer.step()

        for number in range(1000):
            s.run(step, number)
    return "trained on"


def test_a_replica_that_is_killed_ends_the_others_with_an_error(replicas):
    one, other = replicas(2, train_until_killed).answers()
    assert other == {}
    assert one["error"] == "Unavailable"
    assert "a replica was lost" in one["message"]
    assert "remedy: see which replica ended first" in one["message"]


def test_a_script_that_is_run_alone_is_one_replica(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with ps_worker.strategy("mirrored", devices="cpu") as s:
        assert (s.rank, s.replicas, s.is_chief) == (0, 1, True)
        assert not torch.distributed.is_initialized()
        same_training.assert_same(same_training.train(s), same_training.alone())
        assert s.gather(torch.tensor(3)).tolist() == [3]
        s.barrier()


def test_an_unknown_communication_is_a_typed_error():
    with pytest.raises(ConfigError, match="expected: auto, gloo, nccl; actual: mpi"):
        ps_worker.strategy("mirrored", devices="cpu", communication="mpi")


def test_a_communication_that_cannot_run_is_a_typed_error(monkeypatch):
    with pytest.raises(ConfigError, match="nccl moves data between GPUs"):
        backend_for("nccl", torch.device("cpu"))
    monkeypatch.setattr(torch.distributed, "is_gloo_available", lambda: False)
    with pytest.raises(ConfigError, match="this torch has no gloo"):
        backend_for("gloo", torch.device("cpu"))
    monkeypatch.setattr(torch.distributed, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"no torch\.distributed"):
        backend_for("auto", torch.device("cpu"))


def test_gpus_use_nccl_where_torch_has_it(monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    assert backend_for("auto", torch.device("cuda", 0)) == "nccl"
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    assert backend_for("auto", torch.device("cuda", 0)) == "gloo"


def test_replicas_on_several_hosts_are_not_mirrored(monkeypatch):
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "4"), ("LOCAL_RANK", "0"), ("LOCAL_WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "host")
    monkeypatch.setenv("MASTER_PORT", "1")
    with pytest.raises(ConfigError, match="remedy: use the strategy multi_worker_mirrored"):
        ps_worker.strategy("mirrored")


def test_replicas_that_do_not_come_are_an_error_within_the_timeout(monkeypatch, tmp_path):
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "0"), ("LOCAL_WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PS_REPLICA_STORE", str(tmp_path / "store"))
    with pytest.raises(Unavailable, match="the replicas did not find each other"):
        ps_worker.strategy("mirrored", devices="cpu", timeout_seconds=1.0)


@pytest.mark.parametrize(
    ("gpus", "devices", "place", "found"),
    [
        (0, None, Placement(1, 2, 1, 2), "cpu"),
        (2, "cpu", Placement(1, 2, 1, 2), "cpu"),
        (2, None, Placement(1, 2, 1, 2), "cuda:1"),
        (4, 2, Placement(1, 2, 1, 2), "cuda:1"),
        (4, ["cuda:3", "cuda:1"], Placement(1, 2, 1, 2), "cuda:1"),
        (4, "cuda:2", Placement(), "cuda:2"),
    ],
)
def test_the_device_of_a_replica(monkeypatch, gpus, devices, place, found):
    use_gpus(monkeypatch, gpus)
    assert str(data_parallel().device_of(place, devices)) == found


@pytest.mark.parametrize(
    ("gpus", "devices", "message"),
    [
        (0, 2, "no number: this host has no GPU; actual: 2"),
        (2, 3, "expected: 1 to 2 GPUs; actual: 3"),
        (2, True, "expected: 1 to 2 GPUs; actual: True"),
        (4, None, "expected: 4 processes on this host.*ps-run --strategy mirrored --workers 4"),
        (4, ["cuda:0", "cuda:1"], "expected: 2 processes on this host"),
    ],
)
def test_devices_that_this_host_does_not_have_are_refused(monkeypatch, gpus, devices, message):
    use_gpus(monkeypatch, gpus)
    with pytest.raises(ConfigError, match=message):
        data_parallel().device_of(Placement(), devices)


def data_parallel():
    from ps_worker.strategies import data_parallel

    return data_parallel


def use_gpus(monkeypatch, count):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(data_parallel(), "check_device", lambda device: None)
