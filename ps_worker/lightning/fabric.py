"""The strategy of ``lightning.fabric.Fabric``."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from lightning.fabric.strategies.strategy import Strategy, _BackwardSyncControl

from ps_protocol.errors import ConfigError
from ps_worker.cluster import Cluster
from ps_worker.lightning.process import TrainerProcess

_numbers: Iterator[int] = itertools.count()


class NoGradientSync(_BackwardSyncControl):
    """Gradients stay in this process until ``step``, with and without ``no_backward_sync``."""

    def no_backward_sync(self, module: torch.nn.Module, enabled: bool) -> AbstractContextManager[None]:
        """Return a context that does nothing."""
        return nullcontext()


class TorchPsFabricStrategy(TrainerProcess, Strategy):
    """The strategy of Lightning's Fabric: ``Fabric(strategy="torch_ps")``, or an object of this class.

    ``fabric.launch()`` joins the job, ``fabric.setup`` has the shards run the optimizers, ``setup_dataloaders`` splits
    the data, and ``fabric.save`` writes on worker 0. Methods raise PsError.
    """

    def __init__(self, cluster: Cluster | None = None, **adopting: Any) -> None:
        """Keep the settings; ``fabric.launch()`` joins the job.

        Args:
            cluster: See ``TorchPsStrategy``.
            **adopting: See ``TorchPsStrategy``.
        """
        Strategy.__init__(self)
        TrainerProcess.__init__(self, cluster, f"fabric-{next(_numbers)}", lambda: 0)
        self._adopting = adopting
        self._modules: list[torch.nn.Module] = []
        self._backward_sync_control = NoGradientSync()

    def setup_environment(self) -> None:
        """Join the job."""
        self.join_job()
        super().setup_environment()

    def process_dataloader(self, dataloader: Any) -> Any:
        """Return this worker's part of the data. Raises ConfigError for data that cannot be split."""
        return self.cluster.shard(dataloader)

    def module_to_device(self, module: torch.nn.Module) -> None:
        """Move the module to the device before its parameters become views of flat memory."""
        module.to(self.root_device)

    def setup_module(self, module: torch.nn.Module) -> torch.nn.Module:
        """Keep the module, for its optimizers."""
        self._modules.append(module)
        return module

    def setup_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Have the shards run ``optimizer``. Raises ConfigError when its module was not set up before."""
        trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for module in reversed(self._modules):
            if any(id(p) in trained for p in module.parameters()):
                return self.cluster.adopt(optimizer, module, **self._adopting)
        raise ConfigError(
            "the optimizer's parameters are in no module that was set up",
            expected="its module first",
            actual=type(optimizer).__name__,
            remedy="call fabric.setup(model, optimizer), or setup_module(model) before setup_optimizers(optimizer)",
        )

    def get_optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return the state from the shards on worker 0, which writes it; nothing on others."""
        return optimizer.state_dict() if self.is_global_zero else {}

    def all_reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce a tensor, 64 KiB at most, over the workers."""
        return self.reduced(tensor, group, reduce_op)
