"""The engine beside a real job, in a stand-in for vLLM with the interface that its documentation has: vLLM itself needs
an accelerator, and is not run.
"""

from __future__ import annotations

import sys
import types
from abc import ABC
from typing import Any, Generic, TypeVar

import pytest
import torch
from torch import nn

from ps_protocol.errors import ConfigError, InvalidRequest, UnknownVersion
from ps_worker.vllm import ENGINE, register
from tests.worker.jobs import running_job

I_, U_ = TypeVar("I_"), TypeVar("U_")


class Engine(ABC, Generic[I_, U_]):
    init_info_cls: Any
    update_info_cls: Any

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: nn.Module) -> None:
        self.config, self.device, self.model = config, device, model
        self.model_config = vllm_config

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.update_info_cls(**update_info))


class Model(nn.Linear):
    """Has ``load_weights``, as models of vLLM."""

    def load_weights(self, weights: Any) -> None:
        for name, value in weights:
            self.get_parameter(name).data.copy_(value)


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[str, str]]:
    """The engines that were registered."""
    engines: dict[str, tuple[str, str]] = {}
    calls: list[str] = []

    class Factory:
        @classmethod
        def register_engine(cls, name: str, module: str, class_name: str) -> None:
            if name in engines:
                raise ValueError(f"{name} is already registered")
            engines[name] = module, class_name

    base = {"WeightTransferEngine": Engine, "WeightTransferInitInfo": ABC, "WeightTransferUpdateInfo": ABC}
    reload = {
        "initialize_layerwise_reload": lambda model: calls.append("begin"),
        "finalize_layerwise_reload": lambda model, config: calls.append("end"),
    }
    for name, contents in {
        "vllm": {},
        "vllm.distributed": {},
        "vllm.distributed.weight_transfer": {},
        "vllm.distributed.weight_transfer.base": base,
        "vllm.distributed.weight_transfer.factory": {"WeightTransferEngineFactory": Factory},
        "vllm.model_executor": {},
        "vllm.model_executor.model_loader": {},
        "vllm.model_executor.model_loader.reload": reload,
    }.items():
        module = types.ModuleType(name)
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "ps_worker.vllm.engine", raising=False)
    yield engines
    monkeypatch.delitem(sys.modules, "ps_worker.vllm.engine", raising=False)


def test_the_engine_is_registered_once_and_where_there_is_no_vllm_nothing_happens(vllm, monkeypatch):
    register()
    register()
    assert vllm == {ENGINE: ("ps_worker.vllm.engine", "PublishedWeightEngine")}
    monkeypatch.setitem(sys.modules, "vllm.distributed.weight_transfer.factory", None)
    register()


def test_a_server_has_the_version_that_it_is_told_to_load(vllm):
    from ps_worker.vllm.engine import PublishedWeightEngine

    with running_job(shards=2) as job:
        trained, served = nn.Linear(5, 3).bfloat16(), Model(5, 3).bfloat16()
        cluster = job.cluster()
        optimizer = cluster.optimizer(torch.optim.SGD, trained, lr=0.5)
        engine = PublishedWeightEngine(None, None, torch.device("cpu"), served)
        engine.init_transfer_engine(engine.init_info_cls(coordinator=job.address))
        for step in (1, 2):
            trained(torch.ones(2, 5, dtype=torch.bfloat16)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            number = cluster.publish("policy", optimizer, step=step, wait=True)
            engine.start_weight_update()
            engine.update_weights({"number": number})
            engine.finish_weight_update()
            assert torch.equal(served.weight, trained.weight)
            assert torch.equal(served.bias, trained.bias)
        with pytest.raises(UnknownVersion):
            engine.update_weights({"number": 9})
        assert torch.equal(served.weight, trained.weight)
        engine.shutdown()
        engine.shutdown()


def test_what_the_engine_cannot_do_is_refused(vllm):
    from ps_worker.vllm.engine import PublishedWeightEngine

    engine = PublishedWeightEngine(None, None, torch.device("cpu"), Model(5, 3))
    with pytest.raises(InvalidRequest, match="before init_transfer_engine"):
        engine.update_weights({"number": 1})
    with pytest.raises(ConfigError, match="no such dtype"):
        engine.init_transfer_engine(engine.init_info_cls(coordinator="127.0.0.1:1", dtype="bf17"))
    with pytest.raises(ConfigError, match=r"cluster\.publish"):
        engine.trainer_send_weights(iter(()), None)
