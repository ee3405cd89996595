"""The strategy one_device: plain torch in one process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ps_worker.session.device import check_device
from ps_worker.strategies.base import Strategy, clip_in_steps


class OneDevice(Strategy):
    """One replica: model and optimizer are the script's own objects."""

    name: ClassVar[str] = "one_device"

    def __init__(self, *, device: str | None = None) -> None:
        """Choose the device.

        Args:
            device: Torch device. None: a GPU where there is one.

        Raises:
            ConfigError: Torch does not know the device.
        """
        super().__init__()
        check_device(device)
        self._device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))

    @property
    def device(self) -> torch.device:
        """As given, else a GPU, else the CPU."""
        return self._device

    @property
    def rank(self) -> int:
        """0."""
        return 0

    @property
    def replicas(self) -> int:
        """1."""
        return 1

    def _prepare(
        self,
        model: nn.Module,
        optimizer: type[torch.optim.Optimizer] | torch.optim.Optimizer,
        schedulers: tuple[Any, ...],
        arguments: Mapping[str, Any],
        clip_grad_norm: float | None,
    ) -> tuple[nn.Module, torch.optim.Optimizer]:
        built = optimizer(model.parameters(), **arguments) if isinstance(optimizer, type) else optimizer
        if clip_grad_norm is not None:
            clip_in_steps(built, clip_grad_norm)
        return model, built

    def _distribute(self, loader: Any) -> Any:
        return loader

    def _all_reduce(self, how: str, tensor: Tensor) -> Tensor:
        return tensor

    def _all_gather(self, tensor: Tensor) -> list[Tensor]:
        return [tensor]

    def barrier(self) -> None:
        """Return at once."""

    def close(self) -> None:
        """Do nothing."""
