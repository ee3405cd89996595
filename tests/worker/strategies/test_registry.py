"""Names of strategies, their options, and what each refuses before it starts anything. Under 2 CPU seconds."""

from __future__ import annotations

import importlib.util
from importlib.metadata import EntryPoint

import pytest
import torch

import ps_worker
from ps_protocol.cluster.replicas import STRATEGIES_GROUP
from ps_worker import ConfigError, UnsupportedOptimizer
from ps_worker.strategies import registry, tpu
from ps_worker.strategies.data_parallel import ReplicatedModule
from ps_worker.strategies.one_device import OneDevice
from tests.worker.strategies import same_training


class Foreign(OneDevice):
    """A strategy of another package."""

    name = "foreign"

    def __init__(self, *, depth: int = 1) -> None:
        super().__init__(device="cpu")
        self.depth = depth


def entry(name, value):
    return [EntryPoint(name, value, STRATEGIES_GROUP)]


def test_a_strategy_of_another_package_is_found_by_its_entry_point(monkeypatch):
    monkeypatch.setattr(registry, "entry_points", lambda group: entry("foreign", f"{__name__}:Foreign"))
    found = ps_worker.strategy("foreign", depth=3)
    assert (type(found), found.depth) == (Foreign, 3)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("no_such_module:Kind", "strategy 'foreign' of no_such_module:Kind cannot be imported"),
        ("json:loads", "expected: a subclass of ps_worker.Strategy; actual: json:loads"),
    ],
)
def test_an_entry_point_that_is_no_strategy_is_a_typed_error(monkeypatch, value, message):
    monkeypatch.setattr(registry, "entry_points", lambda group: entry("foreign", value))
    with pytest.raises(ConfigError, match=message):
        ps_worker.strategy("foreign")


def test_an_unknown_name_lists_those_that_are_there(monkeypatch):
    monkeypatch.setattr(registry, "entry_points", lambda group: entry("foreign", f"{__name__}:Foreign"))
    with pytest.raises(ConfigError, match="central_storage, parameter_server, tpu, foreign; actual: miror"):
        ps_worker.strategy("miror")


def test_the_environment_names_the_strategy(monkeypatch):
    monkeypatch.setenv("PS_STRATEGY", "one_device")
    with ps_worker.strategy(device="cpu") as s:
        assert s.name == "one_device"
        assert repr(s) == "OneDevice(replica 0 of 1 on cpu)"


@pytest.mark.parametrize("built", [False, True])
def test_one_device_is_plain_torch(built):
    with ps_worker.strategy("one_device", device="cpu") as s:
        found = same_training.train(s, built=built)
        assert s.num_replicas_in_sync == 1
    assert found == same_training.alone()


@pytest.mark.parametrize("built", [False, True])
def test_one_device_clips_what_it_applies(built):
    with ps_worker.strategy("one_device", device="cpu") as s:
        same_training.assert_clipped(same_training.train(s, built=built, clip=same_training.CLIP))


@pytest.mark.parametrize("norm", [0, -1.0, float("nan"), True, "1"])
def test_a_norm_that_nothing_can_be_clipped_to_is_refused(norm):
    with pytest.raises(ConfigError, match="clip_grad_norm is not a norm"):
        ps_worker.strategy("one_device").prepare(torch.nn.Linear(1, 1), torch.optim.SGD, lr=0.1, clip_grad_norm=norm)


def test_one_device_uses_each_sample_once_in_the_loaders_own_order():
    s = ps_worker.strategy("one_device", device="cpu")
    same_training.assert_dealt([same_training.epochs_of(s)])


def test_one_device_gives_back_the_users_own_objects():
    s = ps_worker.strategy("one_device", device="cpu")
    model = torch.nn.Linear(2, 1)
    given = torch.optim.SGD(model.parameters(), lr=0.1)
    assert s.prepare(model, given) == (model, given)
    with s.accumulate(model):
        pass
    s.barrier()
    s.close()


def test_values_of_one_replica():
    s = ps_worker.strategy("one_device", device="cpu")
    assert s.reduce("mean", 3) == 3
    assert s.reduce("sum", {"a": (torch.tensor([1, 2]), 2.5)})["a"][1] == 2.5
    assert s.gather(torch.tensor(3)).tolist() == [3]
    assert s.local_results(7) == (7,)
    with pytest.raises(ConfigError, match="expected: mean or sum; actual: max"):
        s.reduce("max", 1)


def test_replicas_are_seeded_apart(monkeypatch):
    s = ps_worker.strategy("one_device", device="cpu")
    drawn = []
    for rank in (0, 1, 0):
        monkeypatch.setattr(OneDevice, "rank", rank)
        s.seed_replica(5)
        drawn.append(torch.rand(1).item())
    assert drawn[0] == drawn[2] != drawn[1]


@pytest.mark.parametrize(
    ("model", "optimizer", "arguments", "kind", "message"),
    [
        (torch.nn.DataParallel(torch.nn.Linear(1, 1)), torch.optim.SGD, {}, ConfigError, "wrapped in DataParallel"),
        (
            torch.nn.Sequential(ReplicatedModule.__new__(ReplicatedModule)),
            torch.optim.SGD,
            {},
            ConfigError,
            "wrapped in DistributedDataParallel already",
        ),
        ([torch.nn.Linear(1, 1)], torch.optim.SGD, {}, ConfigError, r"expected: a torch\.nn\.Module; actual: list"),
        (torch.nn.Linear(1, 1), "SGD", {}, UnsupportedOptimizer, "prepare.. has no optimizer"),
        (torch.nn.Linear(1, 1), dict, {}, UnsupportedOptimizer, "prepare.. has no optimizer"),
    ],
)
def test_what_cannot_be_prepared_is_a_typed_error(model, optimizer, arguments, kind, message):
    s = ps_worker.strategy("one_device", device="cpu")
    if isinstance(model, torch.nn.Sequential):
        torch.nn.Module.__init__(model[0])
    with pytest.raises(kind, match=message):
        s.prepare(model, optimizer, **arguments)


def test_arguments_beside_a_built_optimizer_are_refused():
    model = torch.nn.Linear(1, 1)
    with pytest.raises(ConfigError, match="arguments for a new one; actual: lr"):
        ps_worker.strategy("one_device").prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), lr=0.2)


def test_a_torch_with_a_device_called_tpu_is_used_as_data_parallel_replicas(monkeypatch):
    monkeypatch.setattr(tpu, "accelerator", lambda: "tpu")
    monkeypatch.setattr(tpu.TpuReplicas, "_device_of", lambda self, place, devices: torch.device("cpu"))
    with ps_worker.strategy("tpu") as s:
        assert isinstance(s, tpu.TpuReplicas)
        same_training.assert_same(same_training.train(s), same_training.alone())


@pytest.mark.skipif(importlib.util.find_spec("torch_xla") is None, reason="torch_xla is not installed")
def test_a_replica_on_an_xla_device_equals_one_process(monkeypatch):
    monkeypatch.setenv("PJRT_DEVICE", "CPU")
    with ps_worker.strategy("tpu") as s:
        assert (s.device.type, s.replicas) == ("xla", 1)
        same_training.assert_same(same_training.train(s), same_training.alone())
        assert s.gather(torch.tensor(3)).tolist() == [3]
