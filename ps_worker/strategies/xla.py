"""Replicas on XLA devices: TPU cores, or the CPU with ``PJRT_DEVICE=CPU``. Needs the torch_xla of this torch."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.runtime as xr
from torch import Tensor, nn

from ps_worker.data.equal_batches import equal_share
from ps_worker.strategies.base import Strategy, clip_in_steps


class XlaReplicas(Strategy):
    """A replica per process, as ``torch_xla.launch`` starts them; a script that is run alone is one replica.

    The optimizer is the user's own: before its step gradients are averaged, after it the step is sent to the device.
    """

    name: ClassVar[str] = "tpu"

    def __init__(self) -> None:
        super().__init__()
        self._device: torch.device = torch_xla.device()
        self._seed = 0

    @property
    def device(self) -> torch.device:
        """The XLA device of this process."""
        return self._device

    @property
    def rank(self) -> int:
        """Number of this replica, from 0."""
        return int(xr.global_ordinal())

    @property
    def replicas(self) -> int:
        """The number of replicas."""
        return int(xr.world_size())

    def _prepare(
        self,
        model: nn.Module,
        optimizer: type[torch.optim.Optimizer] | torch.optim.Optimizer,
        schedulers: tuple[Any, ...],
        arguments: Mapping[str, Any],
        clip_grad_norm: float | None,
    ) -> tuple[nn.Module, torch.optim.Optimizer]:
        if self.replicas > 1:
            xm.broadcast_master_param(model)
        built = optimizer(model.parameters(), **arguments) if isinstance(optimizer, type) else optimizer
        built.register_step_pre_hook(lambda stepped, *_: self._average(stepped))
        if clip_grad_norm is not None:
            clip_in_steps(built, clip_grad_norm)
        built.register_step_post_hook(lambda *_: torch_xla.sync())
        return model, built

    def _average(self, optimizer: torch.optim.Optimizer) -> None:
        if self.replicas > 1:
            gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
            xm.all_reduce(xm.REDUCE_SUM, gradients, scale=1.0 / self.replicas)

    def _distribute(self, loader: Any) -> Any:
        if self.replicas == 1:
            return loader
        return equal_share(loader, self.rank, self.replicas, self._seed, itertools.count(), None)

    def _all_reduce(self, how: str, tensor: Tensor) -> Tensor:
        total: Tensor = xm.all_reduce(xm.REDUCE_SUM, tensor.to(self._device))
        return total / self.replicas if how == "mean" else total

    def _all_gather(self, tensor: Tensor) -> list[Tensor]:
        parts: list[Tensor] = xm.mesh_reduce("gather", tensor.cpu(), list)
        return parts

    def barrier(self) -> None:
        """Wait until every replica has called this."""
        xm.rendezvous("barrier")

    def close(self) -> None:
        """Wait for the device."""
        torch_xla.sync(wait=True)
